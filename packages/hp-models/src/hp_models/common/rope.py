"""Rotary position embedding: one-dimensional, partial, and interleaved over (time, height, width).

In: position ids [B, S], or [3, B, S] for mRoPE. Out: cos and sin [B, S, R], with R the rotated channels of a
head; `apply_rotary` turns queries or keys by them. R = head_dim · partial_rotary_factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hp_protocols.module import Module
from hp_protocols.platform import ops

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["RoPE", "apply_rotary"]


class RoPE(Module):
    """Angles of the rotation, from positions.

    The frequencies are a non-persistent buffer that always holds the fp32 values θ^(-2j/R), whatever dtype or
    device the model is cast to, since that is what published weights were trained with. cos and sin are computed
    in fp32 (in fp64 for an fp64 model) and cast once to the activations' dtype.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        head_dim: int
        theta: float = 10000.0
        partial_rotary_factor: float = 1.0
        mrope_section: tuple[int, int, int] | None = None
        """Rotary slots for (time, height, width), interleaved; None refuses three-row positions."""

    inv_freq: Tensor
    axis_of_slot: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.theta = config.theta
        self.rotary_dim = int(config.head_dim * config.partial_rotary_factor)
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > config.head_dim:
            raise ValueError(
                f"RoPE rotates pairs of channels: head_dim {config.head_dim} x partial_rotary_factor "
                f"{config.partial_rotary_factor} gives {self.rotary_dim}, allowed: an even number from 2 to head_dim"
            )
        self.mrope_section = config.mrope_section
        self.register_buffer("inv_freq", ops.empty(0), persistent=False)
        self.register_buffer("axis_of_slot", ops.empty(0), persistent=False)
        # On the device that a surrounding `init_on_device` chose, so that the model works right after build().
        self._init_self_buffers(buffer_device=self.inv_freq.device)

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        device = self.inv_freq.device if buffer_device is None else buffer_device
        # Computed on the CPU for every device: pow rounds differently elsewhere.
        exponent_H = ops.arange(0, self.rotary_dim, 2, dtype=ops.float32, device="cpu") / self.rotary_dim
        self.inv_freq = (1.0 / (self.theta**exponent_H)).to(device)
        axes = mrope_axes(self.rotary_dim // 2, self.mrope_section or (0, 0, 0))
        self.axis_of_slot = ops.tensor(axes, dtype=ops.int64, device="cpu").to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> RoPE:
        # A cast of the model would round the frequencies, and `to_empty` would lose them: compute them again.
        super()._apply(fn, *args, **kwargs)
        self._init_self_buffers(buffer_device=self.inv_freq.device)
        return self

    def forward(self, position_ids: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B, S, R] in `dtype` for positions [B, S] or [3, B, S] (time, height, width)."""
        wide = ops.promote_types(dtype, ops.float32)
        # [B, S, 1] with one position for all slots, or [B, S, R/2] with each slot's own.
        if position_ids.dim() == 2:
            position_BSH = position_ids.unsqueeze(-1)
        else:
            if self.mrope_section is None:
                raise ValueError(
                    f"position_ids of shape {tuple(position_ids.shape)}: this model has no mrope_section, "
                    "so it takes [batch, sequence]"
                )
            position_BSH = position_ids.index_select(0, self.axis_of_slot).permute(1, 2, 0)
        angle_BSH = position_BSH.to(wide) * self.inv_freq.to(wide)
        angle_BSR = ops.cat((angle_BSH, angle_BSH), dim=-1)
        return angle_BSR.cos().to(dtype), angle_BSR.sin().to(dtype)

    def extra_repr(self) -> str:
        return f"rotary_dim={self.rotary_dim}, theta={self.theta}, mrope_section={self.mrope_section}"


def mrope_axes(slots: int, section: tuple[int, int, int]) -> list[int]:
    """Which position (0 time, 1 height, 2 width) turns each slot, interleaved: slot j of axis a has j % 3 == a.

    Height and width take slots up to 3 · section; a section longer than the slots is cut, as transformers does.
    """
    return [j % 3 if j < 3 * section[j % 3] else 0 for j in range(slots)]


def apply_rotary(x_BSNE: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Tensor:
    """Turn the first R channels of every head by the angles; channel j pairs with j + R/2. The rest passes."""
    rotary_dim = cos_BSR.shape[-1]
    cos_BS1R, sin_BS1R = cos_BSR.unsqueeze(2), sin_BSR.unsqueeze(2)
    x_BSNR = x_BSNE[..., :rotary_dim]
    first, second = x_BSNR.chunk(2, dim=-1)
    turned_BSNR = x_BSNR * cos_BS1R + ops.cat((-second, first), dim=-1) * sin_BS1R
    if rotary_dim == x_BSNE.shape[-1]:
        return turned_BSNR
    return ops.cat((turned_BSNR, x_BSNE[..., rotary_dim:]), dim=-1)
