"""Rows of one length out of a token stream.

In: a `TokenStream` and a row length S. Out: `PackedRows`: row i is tokens i·S … (i+1)·S of the stream with their next
tokens as labels, so that every token is an input once and no label crosses from one document into the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hp_components.data.token_stream import TokenStream

__all__ = [
    "FIELDS",
    "IGNORE_INDEX",
    "PADDING_ROW",
    "Batch",
    "PackedRows",
    "Rows",
    "as_batch",
    "document_bounds",
    "stack_rows",
]

# B: rows of a batch, S: tokens of a row, F: the fields of a row, in this order.
FIELDS = ("input", "labels", "positions", "segment_ids")
IGNORE_INDEX = -100
# Stands for a row that holds padding only: it completes the last batch of an epoch.
PADDING_ROW = -1

Batch = dict[str, torch.Tensor]


class Rows(Protocol):
    """Rows that a loader fetches by number."""

    def stack(self, indices: Sequence[int]) -> torch.Tensor:
        """The fields of these rows, [F, B, S] int64. One tensor, as each costs a worker process a file handle."""


def stack_rows(
    indices: Sequence[int], count: int, seq_len: int, fill: Callable[[np.ndarray, int], None]
) -> torch.Tensor:
    """What `Rows.stack` returns of `count` rows, where `fill(fields_FS, index)` writes one of them, or PADDING_ROW."""
    fields_FBS = np.empty((len(FIELDS), len(indices), seq_len), np.int64)
    for place, index in enumerate(indices):
        if index != PADDING_ROW and not 0 <= index < count:
            raise IndexError(f"row {index} of {count}")
        fill(fields_FBS[:, place], index)
    return torch.from_numpy(fields_FBS)


def as_batch(fields_FBS: torch.Tensor) -> Batch:
    """The fields of a stack by name, each [B, S]."""
    return dict(zip(FIELDS, fields_FBS, strict=True))


def document_bounds(segment_ids_BS: torch.Tensor) -> torch.Tensor:
    """Where in the flattened batch each document begins, and B·S at the end: int32, on the host.

    Every row begins one, so that no document reaches from one row into the next.
    """
    begins_BS = torch.ones_like(segment_ids_BS, dtype=torch.bool)
    begins_BS[:, 1:] = segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1]
    begins = begins_BS.flatten().nonzero().flatten().to(torch.int32)
    return torch.cat([begins, torch.tensor([segment_ids_BS.numel()], dtype=torch.int32)])


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of a token stream; the last one is padded with `pad_id`. The fields of a row:

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

    def stack(self, indices: Sequence[int]) -> torch.Tensor:
        """The fields of these rows, [F, B, S] int64; PADDING_ROW among the indices gives a row of padding."""
        return stack_rows(indices, len(self), self.seq_len, self._fill)

    def _fill(self, fields_FS: np.ndarray, index: int) -> None:
        input_S, labels_S, positions_S, segment_ids_S = fields_FS
        place_S = np.arange(self.seq_len)
        input_S[:], labels_S[:], positions_S[:], segment_ids_S[:] = self.pad_id, IGNORE_INDEX, place_S, 0
        if index == PADDING_ROW:
            return
        tokens, starts = self.stream.tokens, self.stream.starts
        begin = index * self.seq_len
        end = min(begin + self.seq_len, len(tokens))
        input_S[: end - begin] = tokens[begin:end]
        following = tokens[begin + 1 : end + 1]
        labels_S[: len(following)] = following
        # Documents that begin inside this row, or right behind it: the token before such a place ends a document.
        first, last = np.searchsorted(starts, [begin + 1, end + 1])
        inner = np.asarray(starts[first:last]) - begin
        labels_S[inner - 1] = IGNORE_INDEX
        begins_S = np.zeros(self.seq_len + 1, bool)
        begins_S[inner] = True
        begins_S[end - begin] = True  # of the padding, if there is any
        begins_S = begins_S[:-1]
        segment_ids_S[:] = np.cumsum(begins_S)
        positions_S[:] = place_S - np.maximum.accumulate(np.where(begins_S, place_S, 0))
