"""Gated DeltaNet: linear attention that keeps a matrix per head, corrected by the delta rule, forgotten by a gate.

In: x [B, S, D], a padding mask [B, S], ages of tokens in their documents [B, S]. Out: [B, S, D].
Shapes: B batch, S sequence, D model width, K key heads of E channels, N value heads of V channels, X = K·E, Y = N·V,
W taps of the convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_models.common.causal_conv import causal_conv
from hp_models.common.delta_rule import CHUNK_SIZE, ChunkTerms, chunk_terms, scan_chunks
from hp_models.common.linear import Linear
from hp_models.common.norm import GatedRMSNorm
from hp_protocols.module import Module
from hp_protocols.platform import F, nn, ops

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GatedDeltaNet", "GatedDeltaRule"]


class GatedDeltaRule(Module):
    """All that happens along the sequence: the convolutions, then the delta rule; between projections and norm.

    A module of its own, with the layer's parameters as inputs, so that a sharding declaration can run it on local
    heads, and a variant of it (see `previous_tokens`, `scan`) on a stretch of the sequence.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        key_head_dim: int
        value_head_dim: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.key_head_dim = config.key_head_dim
        self.value_head_dim = config.value_head_dim

    def forward(
        self,
        q_BSX: Tensor,
        k_BSX: Tensor,
        v_BSY: Tensor,
        a_BSN: Tensor,
        b_BSN: Tensor,
        conv_q: Tensor,
        conv_k: Tensor,
        conv_v: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        age_BS: Tensor | None = None,
    ) -> Tensor:
        """[B, S, N, V] for projected queries, keys, values, decay and learning-rate inputs.

        Args:
            conv_q, conv_k, conv_v: kernels [channels, 1, W].
            A_log, dt_bias: [N]; the decay is exp(-exp(A_log) · softplus(a + dt_bias)).
            age_BS: how many tokens of its document come before each token; default: one document per row.
        """
        wide = ops.promote_types(a_BSN.dtype, ops.float32)
        # In two dims: the gradient of softplus has strides that a traced graph does not foresee, and only a view that
        # joins dims would mind.
        pace_TN = F.softplus((a_BSN.to(wide) + dt_bias).flatten(0, 1))
        decay_BSN = -A_log.to(wide).exp() * pace_TN.unflatten(0, a_BSN.shape[:2])
        terms = chunk_terms(
            self.convolved(q_BSX, conv_q, age_BS).unflatten(-1, (-1, self.key_head_dim)),
            self.convolved(k_BSX, conv_k, age_BS).unflatten(-1, (-1, self.key_head_dim)),
            self.convolved(v_BSY, conv_v, age_BS).unflatten(-1, (-1, self.value_head_dim)),
            decay_BSN,
            ops.sigmoid(b_BSN),
            age_BS,
        )
        return self.scan(terms).to(v_BSY.dtype)

    def convolved(self, x_BSC: Tensor, weight_C1W: Tensor, age_BS: Tensor | None) -> Tensor:
        halo_BHC = self.previous_tokens(x_BSC, weight_C1W.shape[-1] - 1)
        return F.silu(causal_conv(x_BSC, weight_C1W, age_BS, halo_BHC))

    def previous_tokens(self, x_BSC: Tensor, count: int) -> Tensor | None:
        """The `count` tokens before these, for a variant whose rows are stretches of longer ones; None: no tokens."""
        return None

    def scan(self, terms: ChunkTerms) -> Tensor:
        """The output [B, S, N, V], for a variant that starts from another state than zero."""
        return scan_chunks(terms)[0]


class GatedDeltaNet(Module):
    """The layer: projections, convolutions and delta rule, a norm gated by silu(z), and the output projection.

    Queries, keys and values have projections and convolutions of their own (checkpoints hold them joined), so that
    each can be cut by heads.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        num_key_heads: int
        num_value_heads: int
        key_head_dim: int
        value_head_dim: int
        conv_kernel_size: int
        in_proj_q: Linear.Config
        in_proj_k: Linear.Config
        in_proj_v: Linear.Config
        in_proj_z: Linear.Config
        in_proj_b: Linear.Config
        in_proj_a: Linear.Config
        inner: GatedDeltaRule.Config
        norm: GatedRMSNorm.Config
        out_proj: Linear.Config

        def head_counts(self) -> tuple[int, ...]:
            """Numbers of heads of each kind; tensor-parallel ranks share each number evenly."""
            return (self.num_key_heads, self.num_value_heads)

        def heads_unfit_for(self, ranks: int) -> tuple[int, ...]:
            """Those of `head_counts` that this many ranks cannot share."""
            return tuple(count for count in self.head_counts() if count % ranks)

        def core_flops(self, seq_len: int) -> int:
            """Floating-point operations per token of forward and backward, without those of the projections.

            The products of the chunked rule, 2 per multiplication forward and 4 backward: within a chunk of L tokens
            query·key (per key head), key·key and attention·update (per value head); between chunks three with the
            state. A triangular system takes half a product to solve, and as much and one product backward. The
            convolutions, W multiplications per channel, are not counted. Rows are taken to be whole chunks.
            """
            heads, chunk = self.num_value_heads, CHUNK_SIZE
            both = self.key_head_dim + self.value_head_dim
            products = self.num_key_heads * chunk * self.key_head_dim + heads * chunk * both
            products += 3 * heads * self.key_head_dim * self.value_head_dim
            return 6 * products + 4 * heads * chunk * both

    def __init__(self, config: Config) -> None:
        super().__init__()
        if config.num_value_heads % config.num_key_heads:
            raise ValueError(
                f"num_value_heads {config.num_value_heads} must be a multiple of num_key_heads {config.num_key_heads}: "
                "each key head serves the same number of value heads"
            )
        self.value_head_dim = config.value_head_dim
        self.in_proj_q = config.in_proj_q.build()
        self.in_proj_k = config.in_proj_k.build()
        self.in_proj_v = config.in_proj_v.build()
        self.in_proj_z = config.in_proj_z.build()
        self.in_proj_b = config.in_proj_b.build()
        self.in_proj_a = config.in_proj_a.build()
        key_channels = config.num_key_heads * config.key_head_dim
        value_channels = config.num_value_heads * config.value_head_dim
        self.conv_q = nn.Parameter(ops.empty(key_channels, 1, config.conv_kernel_size))
        self.conv_k = nn.Parameter(ops.empty(key_channels, 1, config.conv_kernel_size))
        self.conv_v = nn.Parameter(ops.empty(value_channels, 1, config.conv_kernel_size))
        self.A_log = nn.Parameter(ops.empty(config.num_value_heads))
        self.dt_bias = nn.Parameter(ops.empty(config.num_value_heads))
        self.inner = config.inner.build()
        self.norm = config.norm.build()
        self.out_proj = config.out_proj.build()

    def forward(self, x_BSD: Tensor, padding_BS: Tensor | None = None, age_BS: Tensor | None = None) -> Tensor:
        """The layer's output [B, S, D].

        Args:
            padding_BS: nonzero for tokens; padding enters as zeros, which leave the state as it is.
            age_BS: as for `GatedDeltaRule`.
        """
        if padding_BS is not None:
            x_BSD = x_BSD * padding_BS.unsqueeze(-1).to(x_BSD.dtype)
        out_BSNV = self.inner(
            self.in_proj_q(x_BSD),
            self.in_proj_k(x_BSD),
            self.in_proj_v(x_BSD),
            self.in_proj_a(x_BSD),
            self.in_proj_b(x_BSD),
            self.conv_q,
            self.conv_k,
            self.conv_v,
            self.A_log,
            self.dt_bias,
            age_BS,
        )
        gate_BSNV = self.in_proj_z(x_BSD).unflatten(-1, (-1, self.value_head_dim))
        return self.out_proj(self.norm(out_BSNV, gate_BSNV).flatten(2))
