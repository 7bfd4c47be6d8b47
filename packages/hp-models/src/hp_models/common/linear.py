"""The matrix multiplication of every projection.

In: x of shape [..., in_features]. Out: x Wᵀ (+ b) of shape [..., out_features].
It is the platform's own Linear, made configurable; the weight is [out_features, in_features].
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_protocols.module import Module
from hp_protocols.platform import nn

__all__ = ["Linear"]


class Linear(nn.Linear, Module):
    """A configurable `nn.Linear`, without a bias unless asked."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_features: int
        out_features: int
        bias: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.out_features, bias=config.bias)
