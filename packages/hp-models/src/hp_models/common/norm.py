"""Root-mean-square norms over the last dimension, in the three conventions of the field.

In: x of shape [..., dim]. Out: the same shape and dtype; x / rms(x), scaled by the weight.
Statistics are taken in fp32, or in the input's own precision where that is higher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_protocols.module import Module
from hp_protocols.platform import F, nn, ops

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GatedRMSNorm", "Qwen3_5RMSNorm", "RMSNorm"]


class RMSNorm(Module):
    """The usual convention: the weight starts at one and multiplies after the cast to the input's dtype."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        eps: float = 1e-6

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(ops.ones(config.dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * normalised(x, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class Qwen3_5RMSNorm(Module):
    """Qwen3.5's convention: the scale is 1 + weight, the weight starts at zero, and there is one cast, at the end.

    The one is added in fp32: a bf16 checkpoint with the one folded in could not hold the small weights.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        eps: float = 1e-6

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(ops.zeros(config.dim))

    def forward(self, x: Tensor) -> Tensor:
        x_wide = normalised(x, self.eps)
        return (x_wide * (1.0 + self.weight.to(x_wide.dtype))).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class GatedRMSNorm(Module):
    """Norm of the output of linear attention: weight · x / rms(x), then times silu(gate).

    The weight starts at one and multiplies after the cast to the input's dtype; the gate in fp32 or wider, with one
    more cast at the end. Doing both products in fp32 gives other bits in bf16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        eps: float = 1e-6

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(ops.ones(config.dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x_wide = normalised(x, self.eps)
        scaled = self.weight * x_wide.to(x.dtype)
        return (scaled * F.silu(gate.to(x_wide.dtype))).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


def normalised(x: Tensor, eps: float) -> Tensor:
    """x · rsqrt(mean(x²) + eps) over the last dimension, in fp32 or wider."""
    x_wide = x.to(ops.promote_types(x.dtype, ops.float32))
    return x_wide * ops.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + eps)
