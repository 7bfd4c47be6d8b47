"""Layers as they are where ranks share a sequence and placements cannot say what that means.

In: `apply_cp`, which turns a layer into its variant here and sets `sequence_axis`. Out: the layer's result for this
rank's stretch, the same as if one process had computed the whole. Model code knows none of it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hp_models.common.delta_rule import ChunkTerms, scan_chunks
from hp_models.common.gated_delta_net import GatedDeltaRule
from hp_models.common.rope import RoPE
from hp_protocols.platform import F, ops

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hp_protocols.distributed import SequenceAxis

__all__ = ["ACROSS_STRETCHES", "GatedDeltaRuleOfStretch", "RoPEOfStretch"]


class RoPEOfStretch(RoPE):
    """The angles of this rank's tokens, at their places in the whole sequence."""

    sequence_axis: SequenceAxis

    def forward(self, position_ids: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B, S, R] of this rank's stretch, for positions [B, S] or [3, B, S] of whole rows."""
        return super().forward(self.sequence_axis.cut(position_ids, -1), dtype=dtype)


class GatedDeltaRuleOfStretch(GatedDeltaRule):
    """The rule on one stretch of a longer sequence; no rank waits for another one's scan.

    The state after a stretch is affine in the state before it, and so is each output: last = carry · first + gain,
    out = own + reach · first. One scan from the states [0 | I], with zeros appended to the values, gives all four.
    Carries and gains are gathered, and every rank composes those of the stretches before its own. Documents need
    nothing more: where one starts, the terms have forgotten the state already.

    Shapes as in `delta_rule`; P ranks, W = V + E columns of the widened state.
    """

    sequence_axis: SequenceAxis

    def previous_tokens(self, x_BSC: Tensor, count: int) -> Tensor:
        """The last `count` tokens before this stretch; zeros before the start of the sequence."""
        axis = self.sequence_axis
        kept = min(count, x_BSC.shape[1])  # Of each rank: a stretch may be shorter than the reach of the convolution.
        ends_BTC = axis.gather(x_BSC[:, x_BSC.shape[1] - kept :].contiguous(), 1)
        before = axis.rank * kept
        # The same operations on every rank, the first one too: the backward pass of the gathering is a collective.
        return F.pad(ends_BTC, (0, 0, count, 0))[:, before : before + count]

    def scan(self, terms: ChunkTerms) -> Tensor:
        """The output [B, S, N, V] of this stretch, going on from the state that the stretches before it leave."""
        key_dim, value_dim = terms.key_CHLE.shape[-1], terms.update_CHLV.shape[-1]
        heads = terms.key_CHLE.shape[1] // terms.batch
        identity_EE = ops.eye(key_dim, dtype=terms.update_CHLV.dtype, device=terms.update_CHLV.device)
        unit_BNEW = F.pad(identity_EE, (value_dim, 0)).expand(terms.batch, heads, key_dim, value_dim + key_dim)
        widened = dataclasses.replace(terms, update_CHLV=F.pad(terms.update_CHLV, (0, key_dim)))
        out_BSNW, last_BNEW = scan_chunks(widened, unit_BNEW)
        own_BSNV, reach_BSNE = out_BSNW.split((value_dim, key_dim), dim=-1)
        first_BNEV = self._state_before(last_BNEW, value_dim)
        return own_BSNV + (reach_BSNE.transpose(1, 2) @ first_BNEV).transpose(1, 2)

    def _state_before(self, last_BNEW: Tensor, value_dim: int) -> Tensor:
        """The state [B, N, E, V] after all stretches before this rank's, from each stretch's [gain | carry]."""
        axis = self.sequence_axis
        last_PBNEW = axis.gather_each(last_BNEW.contiguous())
        gain_PBNEV, carry_PBNEE = last_PBNEW.split((value_dim, last_BNEW.shape[-1] - value_dim), dim=-1)
        states = [ops.zeros_like(gain_PBNEV[0])]
        for gain_BNEV, carry_BNEE in zip(gain_PBNEV.unbind(0)[:-1], carry_PBNEE.unbind(0)[:-1], strict=True):
            states.append(carry_BNEE @ states[-1] + gain_BNEV)
        # Every rank computes all of them, for the same reason as above.
        return ops.stack(states)[axis.rank]


ACROSS_STRETCHES: dict[type, type] = {RoPE: RoPEOfStretch, GatedDeltaRule: GatedDeltaRuleOfStretch}
"""For `apply_cp(across=…)`: which layer becomes what."""
