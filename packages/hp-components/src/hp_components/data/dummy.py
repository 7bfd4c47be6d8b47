"""Random tokens in place of data: for speed measurements and smoke tests.

In: a vocabulary size and a seed. Out: endless batches; row i is a function of the seed and i alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hp_components.data.base import BaseDataLoader
from hp_components.data.order import RankSlice, RowOrder
from hp_components.data.packing import FIELDS
from hp_components.data.row_loader import RowLoader
from hp_components.tokenizer.base import BaseTokenizer
from hp_protocols.errors import ConfigError, Fault

__all__ = ["DummyDataLoader", "RandomRows"]


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Row i: seq_len + 1 random tokens, as input and labels of one document."""

    seq_len: int
    vocab_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {self.seq_len}")

    def stack(self, indices: Sequence[int]) -> torch.Tensor:
        """The fields of these rows, [F, B, S] int64."""
        fields_FBS = np.zeros((len(FIELDS), len(indices), self.seq_len), np.int64)
        for place, index in enumerate(indices):
            raw = np.random.PCG64(np.random.SeedSequence([self.seed, index])).random_raw(self.seq_len + 1)
            tokens = raw % self.vocab_size
            fields_FBS[:3, place] = tokens[:-1], tokens[1:], np.arange(self.seq_len)
        return torch.from_numpy(fields_FBS)


class DummyDataLoader(RowLoader):
    """Endless random tokens, with the state of every other loader."""

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
        """Build from `config`; the other arguments are those of TextDataLoader.

        Raises:
            ValueError: neither a vocab_size in the config nor a tokenizer.
        """
        if faults := config.faults("dataloader"):
            raise ConfigError(faults)
        vocab_size = config.vocab_size
        if vocab_size is None:
            if tokenizer is None:
                raise ValueError("DummyDataLoader needs vocab_size in its config, or a tokenizer")
            vocab_size = tokenizer.vocab_size
        self._text = f"random tokens below {vocab_size}, rows of {seq_len}"
        super().__init__(
            RandomRows(seq_len, vocab_size, seed),
            RowOrder(rows=None, shuffle=False, seed=seed),
            RankSlice(local_batch_size, dp_rank, dp_world_size),
            identity={"seq_len": seq_len, "vocab_size": vocab_size, "seed": seed},
        )

    def __str__(self) -> str:
        return self._text
