"""What layers do across the stretches of a sequence that ranks share, where placements cannot say it.

In: a layer's own forward, the axis over which the sequence is cut, the layer's arguments. Out: its result for this
rank's stretch, the same as if one process had computed the whole. Handed to `apply_cp`; model code knows none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hp_models.common.rope import RoPE

if TYPE_CHECKING:
    from torch import Tensor

    from hp_protocols.distributed import AcrossStretches, SequenceAxis

__all__ = ["ACROSS_STRETCHES", "angles_of_stretch"]


def angles_of_stretch(
    forward: Callable[..., Any], axis: SequenceAxis, position_ids: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The angles of this rank's tokens, at their places in the whole sequence: positions [B, S] or [3, B, S]."""
    return forward(axis.cut(position_ids, -1), **options)


ACROSS_STRETCHES: dict[type, AcrossStretches] = {RoPE: angles_of_stretch}
"""For `apply_cp(across=…)`: what each class of layer does."""
