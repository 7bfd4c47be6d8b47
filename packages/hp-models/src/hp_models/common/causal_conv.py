"""Depthwise causal convolution along the sequence, which stops at document starts.

In: x [B, S, C], one kernel of W taps for each channel [C, 1, W] (the layout of checkpoints). Out: [B, S, C], no bias.
Shapes: B batch, S sequence, C channels, W taps, H = W - 1 tokens of halo, T = H + S.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hp_protocols.platform import F, ops

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["causal_conv"]


def causal_conv(
    x_BSC: Tensor, weight_C1W: Tensor, age_BS: Tensor | None = None, halo_BHC: Tensor | None = None
) -> Tensor:
    """y[s] = Σ_j weight[W - 1 - j] · x[s - j], summed in fp32 (fp64 for fp64 input) and rounded once.

    A sum of W shifted products: the channels stay last, as the projections write and the heads read them; on CPU that
    is several times faster than a convolution kernel between two transpositions, and gives the same bits.

    Args:
        age_BS: how many tokens of its document come before each token; taps that reach further back see zero.
        halo_BHC: the W - 1 tokens before these, where the sequence is cut; default zeros.
    """
    out_BSC: Tensor = _CausalConv.apply(x_BSC, weight_C1W, age_BS, halo_BHC)
    return out_BSC


class _CausalConv(ops.autograd.Function):
    """By hand, since autograd would keep a padded copy of x and fill a tensor of zeros for every tap."""

    @staticmethod
    def forward(x_BSC: Tensor, weight_C1W: Tensor, age_BS: Tensor | None, halo_BHC: Tensor | None) -> Tensor:
        padded_BTC, tap_WC = _padded(x_BSC, weight_C1W, halo_BHC), _taps(weight_C1W, x_BSC)
        seq_len, width = x_BSC.shape[1], tap_WC.shape[0]
        out_BSC = _seen(padded_BTC[:, :seq_len], width - 1, age_BS) * tap_WC[0]
        # Earliest tap first, each product added in one operation: the order of a convolution kernel.
        for tap in range(1, width):
            shifted_BSC = _seen(padded_BTC[:, tap : tap + seq_len], width - 1 - tap, age_BS)
            out_BSC = ops.addcmul(out_BSC, shifted_BSC, tap_WC[tap])
        return out_BSC.to(x_BSC.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_BSC: Tensor) -> tuple[Tensor | None, ...]:
        x_BSC, weight_C1W, age_BS, halo_BHC = ctx.saved_tensors
        padded_BTC, tap_WC = _padded(x_BSC, weight_C1W, halo_BHC), _taps(weight_C1W, x_BSC)
        seq_len, width = x_BSC.shape[1], tap_WC.shape[0]
        grad_BSC = grad_BSC.to(tap_WC.dtype)
        halo = 0 if halo_BHC is None else width - 1
        # A token's gradient comes from itself and the W - 1 tokens after it.
        reached = seq_len + halo
        later = F.pad(grad_BSC, (0, 0, halo, width - 1))
        grad_x_BTC: Tensor | None = None
        grad_taps: list[Tensor] = []
        for back in range(width):
            tap = width - 1 - back
            seen_BSC = _seen(grad_BSC, back, age_BS)
            grad_taps.insert(0, (seen_BSC * padded_BTC[:, tap : tap + seq_len]).sum((0, 1)))
            # One padded copy serves all taps where nothing is masked.
            spread = later if seen_BSC is grad_BSC else F.pad(seen_BSC, (0, 0, halo, width - 1))
            later_BTC = spread[:, back : back + reached]
            grad_x_BTC = (
                later_BTC * tap_WC[tap] if grad_x_BTC is None else ops.addcmul(grad_x_BTC, later_BTC, tap_WC[tap])
            )
        assert grad_x_BTC is not None
        grad_halo = None if halo_BHC is None else grad_x_BTC[:, :halo].to(halo_BHC.dtype)
        grad_weight = ops.stack(grad_taps, dim=1).unsqueeze(1).to(weight_C1W.dtype)
        return grad_x_BTC[:, halo:].to(x_BSC.dtype), grad_weight, None, grad_halo


def _taps(weight_C1W: Tensor, x_BSC: Tensor) -> Tensor:
    """[W, C], contiguous, in the precision of the sum."""
    wide = ops.promote_types(x_BSC.dtype, ops.float32)
    return weight_C1W.squeeze(1).t().to(wide).contiguous()


def _padded(x_BSC: Tensor, weight_C1W: Tensor, halo_BHC: Tensor | None) -> Tensor:
    wide = ops.promote_types(x_BSC.dtype, ops.float32)
    if halo_BHC is None:
        return F.pad(x_BSC.to(wide), (0, 0, weight_C1W.shape[-1] - 1, 0))
    return ops.cat((halo_BHC.to(wide), x_BSC.to(wide)), dim=1)


def _seen(x_BSC: Tensor, back: int, age_BS: Tensor | None) -> Tensor:
    """Zero at the tokens whose document has no token that far back."""
    if age_BS is None or back == 0:
        return x_BSC
    return x_BSC.masked_fill((age_BS < back).unsqueeze(-1), 0.0)
