"""Losses that are sums over tokens, so that any split into ranks and micro-batches adds up to the same value.

In: logits and labels of one micro-batch. Out: a 0-d sum over its valid tokens, and their count; the trainer
divides by the number of valid tokens of the whole step (M32). Shape suffixes: B rows, S positions, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hp_protocols.configurable import Configurable

__all__ = ["BaseLoss", "CrossEntropyLoss"]


class BaseLoss(Configurable, ABC):
    """What the trainer asks of a loss: the sum over valid tokens, and how many there are."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        ignore_index: int = -100
        """Label of tokens that take no part: padding, prompts, the position after a document's end."""

    def __init__(self, config: Config) -> None:
        self.ignore_index = config.ignore_index

    @abstractmethod
    def __call__(self, logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        """The loss summed over valid tokens: 0-d, float32 (float64 if the logits are)."""

    def count_tokens(self, labels_BS: torch.Tensor) -> torch.Tensor:
        """The number of valid tokens: 0-d int64, on the labels' device."""
        return (labels_BS != self.ignore_index).sum()


class CrossEntropyLoss(BaseLoss):
    """Cross-entropy of the next token, in float32 whatever the model computes in.

    Labels are already shifted: `labels_BS[b, s]` is the token that `logits_BSV[b, s]` predicts. Without a single
    valid token the sum is 0 and every gradient is 0.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """Nothing beyond `ignore_index`."""

    def __call__(self, logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        if logits_BSV.shape[:-1] != labels_BS.shape:
            raise ValueError(
                f"logits {tuple(logits_BSV.shape)} do not fit labels {tuple(labels_BS.shape)}: "
                "logits must have the labels' shape and one dimension more, the vocabulary"
            )
        # Half-precision log-softmax loses the small differences that training lives on; float64 stays, for tests.
        precise_NV = logits_BSV.flatten(0, -2).to(torch.promote_types(logits_BSV.dtype, torch.float32))
        return F.cross_entropy(precise_NV, labels_BS.flatten(), ignore_index=self.ignore_index, reduction="sum")
