"""Rows of whole conversations: several to a row where they fit, or one each.

In: a `TokenStream` with a mask, a row length S. Out: rows with the fields of `PackedRows`, whose labels are −100 but
for the tokens to learn; what to do with a conversation that is longer than a row is said, never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from hp_components.data.packing import IGNORE_INDEX, PADDING_ROW, stack_rows
from hp_components.data.token_stream import TokenStream
from hp_protocols.errors import ConfigError, Fault

__all__ = ["ConversationRows", "LongConversations", "best_fit"]

LongConversations = Literal["error", "truncate", "skip"]


def best_fit(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Put things of these lengths into as few rows as is cheap to find: the longest first, each where it leaves least.

    The same for every run. Things within a row, and rows, are in the order of their (first) numbers.
    """
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = {}
    spaces = 0  # bit s: there is a row with exactly s places left
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[number]
        fitting = spaces >> length
        if fitting:
            space = (fitting & -fitting).bit_length() - 1 + length
            row = with_space[space].pop()
            if not with_space[space]:
                spaces ^= 1 << space
        else:
            space, row = seq_len, len(rows)
            rows.append([])
        rows[row].append(number)
        left = space - length
        if left:
            with_space.setdefault(left, []).append(row)
            spaces |= 1 << left
    return sorted(sorted(row) for row in rows)


class ConversationRows:
    """The rows of a stream of conversations. A row may be shared (`packing`); no conversation is in two.

    Attributes:
        note: what became of conversations that are too long, for the user; empty if there are none.
    """

    def __init__(
        self, stream: TokenStream, seq_len: int, pad_id: int, packing: bool, on_too_long: LongConversations
    ) -> None:
        """Raises ConfigError where a conversation is too long and nothing says what to do with it."""
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        if stream.mask is None:
            raise ValueError("these tokens have no mask: they are text, not conversations")
        self.stream, self.seq_len, self.pad_id = stream, seq_len, pad_id
        self.packing, self.on_too_long = packing, on_too_long
        self.note = ""
        ends = np.append(np.asarray(self.stream.starts)[1:], len(self.stream.tokens))
        lengths = ends - np.asarray(self.stream.starts)
        kept = self._kept(lengths)
        fitting = np.minimum(lengths[kept], self.seq_len).tolist()
        rows = best_fit(fitting, self.seq_len) if self.packing else [[number] for number in range(len(kept))]
        # Two flat arrays, as a list of lists of millions of conversations would be copied into every worker.
        self._members = kept[np.fromiter((number for row in rows for number in row), np.int64, len(kept))]
        self._row_starts = np.cumsum([0, *(len(row) for row in rows)])
        self._ends = ends

    def _kept(self, lengths: np.ndarray) -> np.ndarray:
        """The numbers of the conversations that are to be in rows."""
        everything = np.arange(len(lengths))
        too_long = everything[lengths > self.seq_len]
        if not len(too_long):
            return everything
        many = f"{len(too_long):,} of {len(lengths):,} conversations are longer than a row of {self.seq_len} tokens"
        longest = f"the longest has {lengths.max():,}"
        if self.on_too_long == "error":
            raise ConfigError(
                Fault(
                    "dataloader.on_too_long",
                    f"{many} ({longest})",
                    allowed="truncate (cut their ends off) or skip (leave them out)",
                    hint=f"--dataloader.on_too_long skip, or --training.seq_len {lengths.max()}",
                )
            )
        if self.on_too_long == "skip":
            dropped = too_long
            self.note = f"{many} and are left out; {longest}"
        else:
            dropped = np.array([number for number in too_long if not self._teaches(number)], int)
            self.note = f"{many} and are cut; {longest}; {len(dropped)} have no answer left then and are left out"
        kept = np.setdiff1d(everything, dropped)
        if not len(kept):
            raise ConfigError(Fault("training.seq_len", f"{many}, and so there is nothing to train on; {longest}"))
        return kept

    def _teaches(self, conversation: int) -> bool:
        """Whether there is something to learn in the part that fits into a row."""
        start = int(self.stream.starts[conversation])
        return bool(self._mask[start + 1 : start + self.seq_len].any())

    @property
    def _mask(self) -> np.ndarray:
        assert self.stream.mask is not None
        return self.stream.mask

    def __len__(self) -> int:
        return len(self._row_starts) - 1

    def stack(self, indices: Sequence[int]) -> torch.Tensor:
        """The fields of these rows, [F, B, S] int64; PADDING_ROW among the indices gives a row of padding."""
        return stack_rows(indices, len(self), self.seq_len, self._fill)

    def _fill(self, fields_FS: np.ndarray, index: int) -> None:
        input_S, labels_S, positions_S, segment_ids_S = fields_FS
        first, last = (0, 0) if index == PADDING_ROW else self._row_starts[index : index + 2]
        members = self._members[first:last]
        labels_S[:] = IGNORE_INDEX
        done = 0
        for segment, member in enumerate(members):
            start = int(self.stream.starts[member])
            length = min(int(self._ends[member]) - start, self.seq_len)
            tokens_T = np.asarray(self.stream.tokens[start : start + length], np.int64)
            learn_T = np.asarray(self._mask[start : start + length], bool)
            end = done + length
            input_S[done:end] = tokens_T
            labels_S[done : end - 1] = np.where(learn_T[1:], tokens_T[1:], IGNORE_INDEX)
            positions_S[done:end] = np.arange(length)
            segment_ids_S[done:end] = segment
            done = end
        input_S[done:], segment_ids_S[done:] = self.pad_id, len(members)
        positions_S[done:] = np.arange(self.seq_len - done)
