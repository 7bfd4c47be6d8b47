"""Layers as they are where ranks share a sequence and placements cannot say what that means.

In: `apply_cp`, which turns a layer into its variant here and sets `sequence_axis`. Out: the layer's result for this
rank's stretch, the same as if one process had computed the whole. Model code knows none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_models.common.rope import RoPE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hp_protocols.distributed import SequenceAxis

__all__ = ["ACROSS_STRETCHES", "RoPEOfStretch"]


class RoPEOfStretch(RoPE):
    """The angles of this rank's tokens, at their places in the whole sequence."""

    sequence_axis: SequenceAxis

    def forward(self, position_ids: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B, S, R] of this rank's stretch, for positions [B, S] or [3, B, S] of whole rows."""
        return super().forward(self.sequence_axis.cut(position_ids, -1), dtype=dtype)


ACROSS_STRETCHES: dict[type, type] = {RoPE: RoPEOfStretch}
"""For `apply_cp(across=…)`: which layer becomes what."""
