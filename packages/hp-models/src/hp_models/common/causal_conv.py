"""Depthwise causal convolution along the sequence, which stops at document starts.

In: x [B, S, C], one kernel of W taps for each channel [C, 1, W] (the layout of checkpoints). Out: [B, S, C], no bias.
Shapes: B batch, S sequence, C channels, W taps, H = W - 1 tokens of halo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_protocols.platform import F, ops

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["causal_conv"]


def causal_conv(
    x_BSC: Tensor, weight_C1W: Tensor, age_BS: Tensor | None = None, halo_BHC: Tensor | None = None
) -> Tensor:
    """y[s] = Σ_j weight[W - 1 - j] · x[s - j], summed in fp32 (fp64 for fp64 input) and rounded once.

    A sum of W shifted products: the channels stay last, as the projections write and the heads read them; on CPU that
    is several times faster than a convolution kernel between two transpositions.

    Args:
        age_BS: how many tokens of its document come before each token; taps that reach further back see zero.
        halo_BHC: the W - 1 tokens before these, where the sequence is cut; default zeros.
    """
    width, seq_len = weight_C1W.shape[-1], x_BSC.shape[1]
    wide = ops.promote_types(x_BSC.dtype, ops.float32)
    tap_WC = weight_C1W.squeeze(1).t().to(wide)
    # Padded before the cast: the padded copy is what the products keep for backward, nothing else of this size.
    if halo_BHC is None:
        padded_BTC = F.pad(x_BSC, (0, 0, width - 1, 0)).to(wide)
    else:
        padded_BTC = ops.cat((halo_BHC, x_BSC), dim=1).to(wide)
    out_BSC = padded_BTC[:, width - 1 :] * tap_WC[width - 1]
    for back in range(1, width):
        start = width - 1 - back
        product_BSC = padded_BTC[:, start : start + seq_len] * tap_WC[width - 1 - back]
        if age_BS is not None:
            product_BSC = product_BSC.masked_fill((age_BS < back).unsqueeze(-1), 0.0)
        out_BSC = out_BSC + product_BSC
    return out_BSC.to(x_BSC.dtype)
