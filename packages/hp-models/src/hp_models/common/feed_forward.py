"""The gated feed-forward block (SwiGLU).

In: x [B, S, D]. Out: down(silu(gate(x)) · up(x)), [B, S, D].
The hidden width is what the projections' configs say; nothing is rounded or scaled here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_models.common.linear import Linear
from hp_protocols.module import Module
from hp_protocols.platform import F

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FeedForward"]


class FeedForward(Module):
    """SwiGLU with three projections."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        gate_proj: Linear.Config
        up_proj: Linear.Config
        down_proj: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = config.gate_proj.build()
        self.up_proj = config.up_proj.build()
        self.down_proj = config.down_proj.build()

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))
