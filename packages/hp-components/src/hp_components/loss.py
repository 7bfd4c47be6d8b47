"""Losses that are sums over tokens, so that any split into ranks and micro-batches adds up to the same value.

In: a model, its inputs and the labels of one micro-batch (or logits and labels). Out: a 0-d sum over the valid tokens,
and their count; the trainer divides by the number of valid tokens of the whole step (M32).
Shape suffixes: B rows, S positions, V vocabulary, N tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from hp_components.loss_parallel import local_logits, parallel_cross_entropy_sum
from hp_protocols.configurable import Configurable
from hp_protocols.errors import ConfigError, Fault

__all__ = ["BaseLoss", "CrossEntropyLoss"]


class BaseLoss(Configurable, ABC):
    """What the trainer asks of a loss: run the model, the sum over valid tokens, and how many there are."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        ignore_index: int = -100
        """Label of tokens that take no part: padding, prompts, the position after a document's end."""

    def __init__(self, config: Config) -> None:
        self.ignore_index = config.ignore_index

    @abstractmethod
    def __call__(self, logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        """The loss summed over valid tokens: 0-d, float32 (float64 if the logits are)."""

    def run_model(self, model: nn.Module, labels_BS: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward of the model on these arguments, then the loss: a 0-d sum that can be differentiated.

        The trainer calls this, so that a loss may decide how the last layer's output reaches it.
        """
        # The logits get no name here: they are the largest activation, and autograd keeps what it needs of them.
        return self(model(*args, **kwargs), labels_BS)

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that `run_model` could not drive, before anything is trained.

        Raises:
            ConfigError: with what to use instead.
        """

    def count_tokens(self, labels_BS: torch.Tensor) -> torch.Tensor:
        """The number of valid tokens: 0-d int64, on the labels' device."""
        return (labels_BS != self.ignore_index).sum()


class CrossEntropyLoss(BaseLoss):
    """Cross-entropy of the next token, in float32 whatever the model computes in.

    Labels are already shifted: `labels_BS[b, s]` is the token that `logits_BSV[b, s]` predicts. Without a single
    valid token the sum is 0 and every gradient is 0. Logits that tensor parallelism left cut along the vocabulary are
    not gathered: each rank works on its own columns (loss parallel); every rank of the group gets the same sum.
    Made with `num_chunks`, it is a `ChunkedCELoss`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        num_chunks: int = 0
        """Parts into which each row is cut; the logits of one part exist at a time, which saves memory where the
        vocabulary is large. 0: all logits at once."""

        def faults(self, path: str) -> list[Fault]:
            """A number of chunks that cannot be."""
            if self.num_chunks >= 0:
                return []
            return [Fault(f"{path}.num_chunks", f"{self.num_chunks} is no number of parts", allowed="0 or more")]

    def __new__(cls, config: Config | None = None) -> Self:
        # Without a config where a copy is made.
        if cls is CrossEntropyLoss and config is not None and config.num_chunks:
            from hp_components.loss_chunked import ChunkedCELoss

            cls = cast(type[Self], ChunkedCELoss)
        return super().__new__(cls)

    def __init__(self, config: Config) -> None:
        if faults := config.faults("loss"):
            raise ConfigError(faults)
        super().__init__(config)

    def __call__(self, logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        part = None
        if isinstance(logits_BSV, DTensor):
            logits_BSV, part = local_logits(logits_BSV)
        if logits_BSV.shape[:-1] != labels_BS.shape:
            raise ValueError(
                f"logits {tuple(logits_BSV.shape)} do not fit labels {tuple(labels_BS.shape)}: "
                "logits must have the labels' shape and one dimension more, the vocabulary"
            )
        logits_NV, labels_N = logits_BSV.flatten(0, -2), labels_BS.flatten()
        if part is not None:
            return parallel_cross_entropy_sum(logits_NV, labels_N, part, self.ignore_index)
        # Half-precision log-softmax loses the small differences that training lives on; float64 stays, for tests.
        precise_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        return F.cross_entropy(precise_NV, labels_N, ignore_index=self.ignore_index, reduction="sum")
