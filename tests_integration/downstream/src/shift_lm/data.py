"""Rows that count in steps: 3, 7, 11, 15 … In: a largest step. Out: endless batches that resume exactly.

Row i is a function of the seed and of i alone, so that any number of ranks sees the same rows in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hp_components import BaseDataLoader, BaseTokenizer
from hp_protocols import ConfigError, Fault


class CountingDataLoader(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        largest_stride: int = 5
        """A row counts in steps of 1 to this."""

        def faults(self, path: str) -> list[Fault]:
            if self.largest_stride >= 1:
                return []
            return [Fault(f"{path}.largest_stride", f"{self.largest_stride} is no step", allowed="1 or more")]

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        seed: int = 0,
    ) -> None:
        self.rows, self.ranks, self.rank = local_batch_size, dp_world_size, dp_rank
        self.identity = {
            "largest_stride": config.largest_stride,
            "vocab_size": tokenizer.vocab_size,
            "seq_len": seq_len,
            "seed": seed,
        }
        self.cursor = 0  # rows that all ranks together have had

    @property
    def fingerprint(self) -> str:
        return str(self.identity)

    def __str__(self) -> str:
        return f"counting in steps of 1 to {self.identity['largest_stride']}"

    def __next__(self) -> dict[str, torch.Tensor]:
        first = self.cursor + self.rank * self.rows
        self.cursor += self.rows * self.ranks
        tokens_BS = torch.stack([self.row(first + row) for row in range(self.rows)])
        input_BS = tokens_BS[:, :-1]
        return {
            "input": input_BS,
            "labels": tokens_BS[:, 1:],
            "positions": torch.arange(input_BS.shape[1]).expand_as(input_BS),
            "segment_ids": torch.zeros_like(input_BS),
        }

    def row(self, index: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.identity["seed"] * 1_000_003 + index)
        vocabulary, length = self.identity["vocab_size"], self.identity["seq_len"] + 1
        start = torch.randint(vocabulary, (), generator=draw)
        stride = torch.randint(1, self.identity["largest_stride"] + 1, (), generator=draw)
        return (start + stride * torch.arange(length)) % vocabulary

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "identity": self.identity}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["identity"] != self.identity:
            problem = f"the checkpoint's rows are {state_dict['identity']}, this run's {self.identity}"
            raise ConfigError(Fault("dataloader", problem))
        self.cursor = state_dict["cursor"]
