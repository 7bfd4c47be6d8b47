"""Rows of one length out of a token stream.

In: a `TokenStream` and a row length S. Out: `PackedRows`: row i is tokens i·S … (i+1)·S of the stream with their next
tokens as labels, so that every token is an input once and no label crosses from one document into the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from hp_components.data.token_stream import TokenStream

__all__ = ["IGNORE_INDEX", "PADDING_ROW", "Batch", "PackedRows"]

IGNORE_INDEX = -100
# Stands for a row that holds padding only: it completes the last batch of an epoch.
PADDING_ROW = -1

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PackedRows(Dataset[Batch]):
    """The rows of a token stream.

    Rows overlap in nothing; the last is padded. Fields of a row or batch, all int64:
        input: token ids.
        labels: the next token of the same document, −100 where there is none (its last token, padding).
        positions: place within the document, as far as it lies in this row (so always below the row's length).
        segment_ids: 0, 1, … for the documents in the row; padding counts as one more.
    """

    stream: TokenStream
    seq_len: int
    pad_id: int

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {self.seq_len}")

    def __len__(self) -> int:
        return -(-len(self.stream.tokens) // self.seq_len)

    def __getitem__(self, index: int) -> Batch:
        return {name: values_BS[0] for name, values_BS in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A batch [len(indices), seq_len]; PADDING_ROW among the indices gives a row of padding."""
        rows = [self._row(int(index)) for index in indices]
        names = ("input", "labels", "positions", "segment_ids")
        return {
            name: torch.from_numpy(np.stack(parts)) for name, parts in zip(names, zip(*rows, strict=True), strict=True)
        }

    def _row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        input_S = np.full(self.seq_len, self.pad_id, np.int64)
        labels_S = np.full(self.seq_len, IGNORE_INDEX, np.int64)
        place_S = np.arange(self.seq_len)
        if index == PADDING_ROW:
            return input_S, labels_S, place_S, np.zeros(self.seq_len, np.int64)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        tokens, starts = self.stream.tokens, self.stream.starts
        begin = index * self.seq_len
        end = min(begin + self.seq_len, len(tokens))
        length = end - begin
        input_S[:length] = tokens[begin:end]
        following = tokens[begin + 1 : end + 1]
        labels_S[: len(following)] = following
        # Documents that begin inside this row or right behind it.
        first, last = np.searchsorted(starts, [begin + 1, end + 1])
        inner = np.asarray(starts[first:last]) - begin
        labels_S[inner - 1] = IGNORE_INDEX
        begins_S = np.zeros(self.seq_len, bool)
        begins_S[inner[inner < self.seq_len]] = True
        if length < self.seq_len:
            begins_S[length] = True
        segment_S = np.cumsum(begins_S)
        positions_S = place_S - np.maximum.accumulate(np.where(begins_S, place_S, 0))
        return input_S, labels_S, positions_S, segment_S
