"""Which declarations the parts of a dense Qwen3.5 carry.

In: the config tree. Out: every `sharding_config` in it filled in place, by the helpers of `decoder_sharding`.
They are filled whether or not a run shards: axes that its mesh lacks are ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_models.common.attention import GQAttention
from hp_models.common.decoder_sharding import (
    norm_config,
    set_decoder_sharding_config,
    set_dense_ffn_sharding,
    set_gated_delta_net_sharding,
    set_gqa_attention_sharding,
    set_gqa_inner_attention_local_map,
)
from hp_models.common.gated_delta_net import GatedDeltaNet
from hp_protocols.platform import Replicate, Shard

if TYPE_CHECKING:
    from hp_models.qwen3_5_v2.model import Qwen3_5Model

__all__ = ["set_qwen3_5_sharding_config"]


def set_qwen3_5_sharding_config(
    config: Qwen3_5Model.Config, *, loss_parallel: bool, enable_sp: bool, tp_degree: int = 1
) -> None:
    """Fill the declarations of the whole tree.

    Args:
        loss_parallel: under tensor parallelism leave the logits cut along the vocabulary.
        enable_sp: sequence parallelism, under tensor parallelism: between attention and feed-forward blocks
            each rank holds a stretch of the sequence.
        tp_degree: ranks of tensor parallelism; more of them than key/value heads need copies of these.
    """
    set_decoder_sharding_config(config, loss_parallel=loss_parallel, enable_sp=enable_sp)
    for layer in config.layers:
        layer.input_layernorm.sharding_config = norm_config(enable_sp=enable_sp)
        layer.post_attention_layernorm.sharding_config = norm_config(enable_sp=enable_sp)
        mixer = layer.mixer
        if isinstance(mixer, GQAttention.Config):
            set_gqa_attention_sharding(mixer, enable_sp=enable_sp, tp_degree=tp_degree)
            set_gqa_inner_attention_local_map(mixer.inner_attention)
        elif isinstance(mixer, GatedDeltaNet.Config):
            set_gated_delta_net_sharding(mixer, enable_sp=enable_sp)
        else:
            raise TypeError(f"no sharding is known for attention of the kind {type(mixer).__qualname__}")
        set_dense_ffn_sharding(layer.mlp, attn_x_placement=Shard(1) if enable_sp else Replicate(), enable_sp=enable_sp)
