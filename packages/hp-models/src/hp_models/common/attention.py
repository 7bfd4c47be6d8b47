"""Softmax attention with grouped key/value heads, optional query/key norm and output gate.

In: x [B, S, D], cos and sin [B, S, R], a boolean mask [B, 1, S, S] or None for causal. Out: [B, S, D].
Shapes: B batch, S sequence, D model width, N query heads, K key/value heads, E channels of a head, R rotated ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_models.common.linear import Linear
from hp_models.common.rope import apply_rotary
from hp_protocols.module import Module
from hp_protocols.platform import F, ops

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BaseAttention", "GQAttention", "ScaledDotProductAttention"]


class ScaledDotProductAttention(Module):
    """softmax(q kᵀ · E^-½) v, the part between the projections; its inner precision is at least fp32.

    A module of its own, so that a sharding declaration can run it on local heads (`set_gqa_inner_attention_local_map`).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, q_BSNE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        """[B, S, N, E]; each of the K key/value heads serves N/K consecutive query heads.

        Raises:
            ValueError: no mask, but other numbers of queries and keys, so that causal would mean nothing.
        """
        if mask_B1SS is None and q_BSNE.shape[1] != k_BSKE.shape[1]:
            raise ValueError(
                f"{q_BSNE.shape[1]} queries and {k_BSKE.shape[1]} keys need an explicit mask (Decoder.explicit_mask)"
            )
        q_BNSE, k_BKSE, v_BKSE = q_BSNE.transpose(1, 2), k_BSKE.transpose(1, 2), v_BSKE.transpose(1, 2)
        out_BNSE = F.scaled_dot_product_attention(
            q_BNSE,
            k_BKSE,
            v_BKSE,
            attn_mask=mask_B1SS,
            is_causal=mask_B1SS is None,
            scale=q_BSNE.shape[-1] ** -0.5,
            enable_gqa=q_BSNE.shape[2] != k_BSKE.shape[2],
        )
        return out_BNSE.transpose(1, 2).contiguous()


class BaseAttention(Module):
    """What a block's `self_attn` is: forward(x, cos, sin, mask) → [B, S, D]."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        num_heads: int

        def head_counts(self) -> tuple[int, ...]:
            """Numbers of heads of each kind; tensor-parallel ranks share each number evenly."""
            return (self.num_heads,)

        def heads_unfit_for(self, ranks: int) -> tuple[int, ...]:
            """Those of `head_counts` that this many tensor-parallel ranks cannot share."""
            return tuple(count for count in self.head_counts() if count % ranks)

        def core_flops(self, seq_len: int) -> int:
            """Floating-point operations per token of forward and backward, without those of the projections."""
            raise NotImplementedError(f"{type(self).__qualname__} does not implement core_flops")

    def forward(self, x_BSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        raise NotImplementedError


class GQAttention(BaseAttention):
    """Grouped-query attention.

    With `output_gate`, q_proj emits for each head its query and then its gate, and the attention output is
    multiplied by sigmoid(gate) before o_proj. `q_norm` and `k_norm` act on the channels of a head, before RoPE.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseAttention.Config):
        num_kv_heads: int
        head_dim: int
        q_proj: Linear.Config
        k_proj: Linear.Config
        v_proj: Linear.Config
        o_proj: Linear.Config
        q_norm: Module.Config | None = None
        k_norm: Module.Config | None = None
        output_gate: bool = False
        kv_copies: int = 1
        """Each key/value head is handed to this many groups of query heads, for a layout that gives each group a
        head of its own; the result is the same."""
        inner_attention: ScaledDotProductAttention.Config

        def head_counts(self) -> tuple[int, ...]:
            return (self.num_heads, self.num_kv_heads)

        def heads_unfit_for(self, ranks: int) -> tuple[int, ...]:
            unfit = [self.num_heads] if self.num_heads % ranks else []
            # Fewer key/value heads than ranks are copied (`kv_copies`), each as often as the others.
            if self.num_kv_heads % ranks and ranks % self.num_kv_heads:
                unfit.append(self.num_kv_heads)
            return tuple(unfit)

        def core_flops(self, seq_len: int) -> int:
            """q·k and p·v: 2 · 2 · heads · head_dim · seq_len forward, twice that backward.

            Following the field's convention the whole square is counted, although causal attention masks half of it.
            """
            return 12 * self.num_heads * self.head_dim * seq_len

    def __init__(self, config: Config) -> None:
        super().__init__()
        if config.num_heads % config.num_kv_heads:
            raise ValueError(
                f"num_heads {config.num_heads} must be a multiple of num_kv_heads {config.num_kv_heads}: "
                "each key/value head serves the same number of query heads"
            )
        if (config.q_norm is None) != (config.k_norm is None):
            raise ValueError("q_norm and k_norm go together: give both or neither")
        self.head_dim = config.head_dim
        self.output_gate = config.output_gate
        self.kv_copies = config.kv_copies
        self.q_proj = config.q_proj.build()
        self.k_proj = config.k_proj.build()
        self.v_proj = config.v_proj.build()
        self.o_proj = config.o_proj.build()
        self.q_norm = None if config.q_norm is None else config.q_norm.build()
        self.k_norm = None if config.k_norm is None else config.k_norm.build()
        self.inner_attention = config.inner_attention.build()

    def forward(self, x_BSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        # The number of heads is left to -1: a declaration may have given this rank only some of them.
        q_BSNE = self.q_proj(x_BSD).unflatten(-1, (-1, self.head_dim * (2 if self.output_gate else 1)))
        k_BSKE = self.k_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSKE = self.v_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        gate_BSNE = None
        if self.output_gate:
            q_BSNE, gate_BSNE = q_BSNE.chunk(2, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSNE, k_BSKE = self.q_norm(q_BSNE), self.k_norm(k_BSKE)
        q_BSNE, k_BSKE = apply_rotary(q_BSNE, cos_BSR, sin_BSR), apply_rotary(k_BSKE, cos_BSR, sin_BSR)
        if self.kv_copies > 1:
            k_BSKE, v_BSKE = _copied(k_BSKE, self.kv_copies), _copied(v_BSKE, self.kv_copies)
        out_BSNE = self.inner_attention(q_BSNE, k_BSKE, v_BSKE, mask_B1SS)
        if gate_BSNE is not None:
            out_BSNE = out_BSNE * ops.sigmoid(gate_BSNE)
        return self.o_proj(out_BSNE.flatten(2))


def _copied(x_BSKE: Tensor, copies: int) -> Tensor:
    """Every head `copies` times, copies of one head side by side."""
    return x_BSKE.unsqueeze(3).expand(-1, -1, -1, copies, -1).flatten(2, 3)
