"""Random tokens in place of data: for speed measurements and smoke tests.

In: a vocabulary size and a seed. Out: endless batches; row i is a function of the seed and i alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hp_components.data.base import BaseDataLoader
from hp_components.data.loader import RankSlice, RowLoader, RowOrder
from hp_components.data.packing import Batch
from hp_components.tokenizer.base import BaseTokenizer
from hp_protocols.errors import ConfigError, Fault

__all__ = ["DummyDataLoader"]


@dataclass(frozen=True, slots=True)
class RandomRows(Dataset[Batch]):
    """Row i: seq_len + 1 random tokens, as input and labels."""

    seq_len: int
    vocab_size: int
    seed: int

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A batch [len(indices), seq_len]."""
        tokens_BT = torch.from_numpy(np.stack([self._tokens(int(index)) for index in indices]))
        positions_BS = torch.arange(self.seq_len).repeat(len(indices), 1)
        return {
            "input": tokens_BT[:, :-1].contiguous(),
            "labels": tokens_BT[:, 1:].contiguous(),
            "positions": positions_BS,
            "segment_ids": torch.zeros_like(positions_BS),
        }

    def __getitem__(self, index: int) -> Batch:
        return {name: values_BS[0] for name, values_BS in self.__getitems__([index]).items()}

    def _tokens(self, index: int) -> np.ndarray:
        raw = np.random.PCG64(np.random.SeedSequence([self.seed, index])).random_raw(self.seq_len + 1)
        return (raw % self.vocab_size).astype(np.int64)


class DummyDataLoader(RowLoader):
    """Endless random tokens, with the same state protocol as TextDataLoader."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab_size: int | None = None
        """Tokens are drawn from [0, vocab_size); unset: the tokenizer's."""

        def faults(self, path: str) -> list[Fault]:
            """What is wrong with these values, for the whole config's list of faults."""
            if self.vocab_size is None or self.vocab_size >= 1:
                return []
            return [Fault(f"{path}.vocab_size", f"is {self.vocab_size}", allowed="1 or more")]

    def __init__(
        self,
        config: Config,
        *,
        seq_len: int,
        local_batch_size: int,
        tokenizer: BaseTokenizer | None = None,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        seed: int = 0,
    ) -> None:
        if faults := config.faults("dataloader"):
            raise ConfigError(faults)
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        vocab_size = config.vocab_size if config.vocab_size is not None else getattr(tokenizer, "vocab_size", None)
        if vocab_size is None:
            raise ValueError("DummyDataLoader needs vocab_size in its config, or a tokenizer")
        self._rows = RandomRows(seq_len, vocab_size, seed)
        self._start(
            self._rows,
            RowOrder(rows=None, shuffle=False, seed=seed),
            RankSlice(local_batch_size, dp_rank, dp_world_size),
        )

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"seq_len": self._rows.seq_len, "vocab_size": self._rows.vocab_size}
