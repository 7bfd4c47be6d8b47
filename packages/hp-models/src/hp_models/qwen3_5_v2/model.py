"""The dense Qwen3.5 text model and its sizes.

In: the sizes of a checkpoint's config.json (`qwen3_5_config`). Out: the complete config tree of a `Qwen3_5Model`,
with an initialiser for every parameter; `update_from_config` adds what a run decides: length and sharding.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hp_models.common.attention import GQAttention, ScaledDotProductAttention
from hp_models.common.decoder import Decoder, TransformerBlock
from hp_models.common.embedding import Embedding
from hp_models.common.feed_forward import FeedForward
from hp_models.common.gated_delta_net import GatedDeltaNet, GatedDeltaRule
from hp_models.common.linear import Linear
from hp_models.common.norm import GatedRMSNorm, Qwen3_5RMSNorm
from hp_models.common.param_init import log_uniform, normal, ones, zeros
from hp_models.common.rope import RoPE
from hp_models.qwen3_5_v2.sharding import set_qwen3_5_sharding_config
from hp_protocols.errors import ConfigError, Fault, nearest

if TYPE_CHECKING:
    from hp_protocols.trainer_sections import TrainerConfig

__all__ = ["Qwen3_5Model", "qwen3_5_config"]

FULL_ATTENTION, LINEAR_ATTENTION = LAYER_TYPES = ("full_attention", "linear_attention")
"""What a layer's mixer can be: gated softmax attention, or Gated DeltaNet."""

DECAY_RATES = (0.01, 16.0)
"""Where exp(A_log) starts; away from 0, whose logarithm would be -inf."""


class Qwen3_5Model(Decoder):
    """Dense Qwen3.5: Gated DeltaNet and gated attention with query/key norm, 1 + w norms, SwiGLU."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        @classmethod
        def from_hf_config(cls, source: Mapping[str, Any] | str | os.PathLike[str]) -> Qwen3_5Model.Config:
            """The config tree for a published `config.json`, given as its content or as the folder that holds it.

            Raises:
                ConfigError: a field that this model cannot honour, or does not know; all of them at once.
            """
            from hp_models.qwen3_5_v2.hf_config import config_from_hf

            return config_from_hf(source)

        def to_hf_config(self) -> dict[str, Any]:
            """The content of a `config.json` from which transformers builds this model.

            Raises:
                ConfigError: layers that differ in more than their type, which such a file cannot say.
            """
            from hp_models.qwen3_5_v2.hf_config import config_to_hf

            return config_to_hf(self)

        def update_from_config(self, *, trainer_config: TrainerConfig) -> None:
            """Check the run against the model; fill the sequence length and every sharding declaration."""
            super().update_from_config(trainer_config=trainer_config)
            parallelism = trainer_config.parallelism
            set_qwen3_5_sharding_config(
                self,
                loss_parallel=not parallelism.disable_loss_parallel,
                enable_sp=parallelism.enable_sequence_parallel,
                tp_degree=parallelism.tensor_parallel_degree,
            )


def qwen3_5_config(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    layer_types: Sequence[str],
    rope_theta: float = 10_000_000.0,
    partial_rotary_factor: float = 0.25,
    mrope_section: tuple[int, int, int] = (11, 11, 10),
    linear_num_key_heads: int = 16,
    linear_num_value_heads: int = 32,
    linear_key_head_dim: int = 128,
    linear_value_head_dim: int = 128,
    linear_conv_kernel_dim: int = 4,
    rms_norm_eps: float = 1e-6,
    initializer_range: float = 0.02,
    tie_word_embeddings: bool = False,
    max_position_embeddings: int = 262144,
) -> Qwen3_5Model.Config:
    """The config tree for these sizes; names as in config.json, defaults as in the published models.

    Every weight matrix and convolution starts from N(0, initializer_range), every norm at scale 1; the decay rates
    exp(A_log) of linear attention from [0.01, 16), dt_bias at 1.

    Raises:
        ConfigError: a layer type that is unknown.
    """
    _check_layer_types(layer_types)
    weight = {"weight": normal(initializer_range)}

    def linear(in_features: int, out_features: int) -> Linear.Config:
        return Linear.Config(in_features=in_features, out_features=out_features, param_init=dict(weight))

    def norm(dim: int) -> Qwen3_5RMSNorm.Config:
        return Qwen3_5RMSNorm.Config(dim=dim, eps=rms_norm_eps, param_init={"weight": zeros()})

    def attention() -> GQAttention.Config:
        return GQAttention.Config(
            num_heads=num_attention_heads,
            num_kv_heads=num_key_value_heads,
            head_dim=head_dim,
            # Per head: query, then gate.
            q_proj=linear(hidden_size, num_attention_heads * head_dim * 2),
            k_proj=linear(hidden_size, num_key_value_heads * head_dim),
            v_proj=linear(hidden_size, num_key_value_heads * head_dim),
            o_proj=linear(num_attention_heads * head_dim, hidden_size),
            q_norm=norm(head_dim),
            k_norm=norm(head_dim),
            output_gate=True,
            inner_attention=ScaledDotProductAttention.Config(),
        )

    def linear_attention() -> GatedDeltaNet.Config:
        key_channels = linear_num_key_heads * linear_key_head_dim
        value_channels = linear_num_value_heads * linear_value_head_dim
        conv = normal(initializer_range)
        return GatedDeltaNet.Config(
            num_key_heads=linear_num_key_heads,
            num_value_heads=linear_num_value_heads,
            key_head_dim=linear_key_head_dim,
            value_head_dim=linear_value_head_dim,
            conv_kernel_size=linear_conv_kernel_dim,
            in_proj_q=linear(hidden_size, key_channels),
            in_proj_k=linear(hidden_size, key_channels),
            in_proj_v=linear(hidden_size, value_channels),
            in_proj_z=linear(hidden_size, value_channels),
            in_proj_b=linear(hidden_size, linear_num_value_heads),
            in_proj_a=linear(hidden_size, linear_num_value_heads),
            inner=GatedDeltaRule.Config(key_head_dim=linear_key_head_dim, value_head_dim=linear_value_head_dim),
            norm=GatedRMSNorm.Config(dim=linear_value_head_dim, eps=rms_norm_eps, param_init={"weight": ones()}),
            out_proj=linear(value_channels, hidden_size),
            param_init={
                "conv_q": conv,
                "conv_k": conv,
                "conv_v": conv,
                "A_log": log_uniform(*DECAY_RATES),
                "dt_bias": ones(),
            },
        )

    def layer(layer_type: str) -> TransformerBlock.Config:
        full = layer_type == FULL_ATTENTION
        return TransformerBlock.Config(
            input_layernorm=norm(hidden_size),
            self_attn=attention() if full else None,
            linear_attn=None if full else linear_attention(),
            post_attention_layernorm=norm(hidden_size),
            mlp=FeedForward.Config(
                gate_proj=linear(hidden_size, intermediate_size),
                up_proj=linear(hidden_size, intermediate_size),
                down_proj=linear(intermediate_size, hidden_size),
            ),
        )

    return Qwen3_5Model.Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position_embeddings=max_position_embeddings,
        embed_tokens=Embedding.Config(num_embeddings=vocab_size, embedding_dim=hidden_size, param_init=dict(weight)),
        rotary_emb=RoPE.Config(
            head_dim=head_dim,
            theta=rope_theta,
            partial_rotary_factor=partial_rotary_factor,
            mrope_section=mrope_section,
        ),
        layers=[layer(layer_type) for layer_type in layer_types],
        norm=norm(hidden_size),
        lm_head=linear(hidden_size, vocab_size),
        tie_word_embeddings=tie_word_embeddings,
    )


def _check_layer_types(layer_types: Sequence[str]) -> None:
    faults = []
    for index, layer_type in enumerate(layer_types):
        where = f"layer_types[{index}]"
        if layer_type not in LAYER_TYPES:
            near = nearest(layer_type, LAYER_TYPES)
            hint = f"did you mean {near}?" if near else None
            faults.append(Fault(where, f"unknown layer type {layer_type!r}", allowed=", ".join(LAYER_TYPES), hint=hint))
    if not layer_types:
        faults.append(Fault("layer_types", "a model without layers", allowed="one entry per layer"))
    if faults:
        raise ConfigError(faults)
