"""Sharding declarations of a decoder's parts, by mesh axis name.

In: configs of layers. Out: their `sharding_config` filled in place; `Module.parallelize(mesh)` acts on it and
ignores axes that the mesh lacks. Names and meanings are torchtitan's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_protocols.platform import Partial, Replicate, Shard
from hp_protocols.sharding import LocalMapConfig, ShardingConfig
from hp_protocols.types import MeshAxisName, NamedPlacement

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

    from hp_models.common.attention import GQAttention, ScaledDotProductAttention
    from hp_models.common.decoder import Decoder
    from hp_models.common.feed_forward import FeedForward
    from hp_models.common.gated_delta_net import GatedDeltaNet, GatedDeltaRule

__all__ = [
    "colwise_config",
    "dense_activation_placement",
    "dense_param_placement",
    "norm_config",
    "replicated_config",
    "rowwise_config",
    "set_decoder_sharding_config",
    "set_dense_ffn_sharding",
    "set_gated_delta_net_sharding",
    "set_gated_delta_rule_local_map",
    "set_gqa_attention_sharding",
    "set_gqa_inner_attention_local_map",
    "set_qkv_linear_sharding",
]

BATCH, SEQUENCE, HEADS = 0, 1, 2
"""Tensor dims of activations: [batch, sequence, …], heads where there are heads."""

CHANNELS = 2
"""Tensor dim of the channels of projected activations [batch, sequence, channels], ordered by head."""

MASK_QUERY = 2
"""Tensor dim of the queries in an attention mask [batch, 1, query, key]."""

DATA_AXES = (MeshAxisName.DP, MeshAxisName.DP_REPLICATE, MeshAxisName.DP_SHARD, MeshAxisName.FSDP)
"""All names under which a mesh may hold data-parallel ranks."""


def dense_param_placement(*, tp: Placement) -> NamedPlacement:
    """A parameter of the dense path: cut as said on the tensor-parallel axis, whole on all others.

    Data-parallel sharding of the stored parameter is not declared here; FSDP adds it afterwards.
    """
    return {**{axis: Replicate() for axis in DATA_AXES}, MeshAxisName.CP: Replicate(), MeshAxisName.TP: tp}


def dense_activation_placement(*, tp: Placement, cp: Placement | None = None) -> NamedPlacement:
    """An activation of the dense path: batch over the data-parallel axes, sequence over context parallelism.

    `cp` other than the default Shard(1) is for tensors whose sequence is elsewhere (masks) or gathered (keys, values).
    """
    return {
        **{axis: Shard(BATCH) for axis in DATA_AXES},
        MeshAxisName.CP: Shard(SEQUENCE) if cp is None else cp,
        MeshAxisName.TP: tp,
    }


def colwise_config() -> ShardingConfig:
    """A Linear cut along its outputs: each rank computes its own columns of the result."""
    return ShardingConfig(
        state_shardings={
            "weight": dense_param_placement(tp=Shard(0)),
            "bias": dense_param_placement(tp=Shard(0)),
        },
        out_dst_shardings=dense_activation_placement(tp=Shard(-1)),
    )


def rowwise_config(*, output_sp: bool = False) -> ShardingConfig:
    """A Linear cut along its inputs: partial sums, reduced to whole rows or scattered along the sequence."""
    return ShardingConfig(
        state_shardings={
            "weight": dense_param_placement(tp=Shard(1)),
            "bias": dense_param_placement(tp=Replicate()),
        },
        out_dst_shardings=dense_activation_placement(tp=_residual_placement(output_sp)),
    )


def norm_config(*, enable_sp: bool) -> ShardingConfig:
    """A norm over the model width: whole weight; with sequence parallelism each rank norms its stretch."""
    placement = dense_activation_placement(tp=_residual_placement(enable_sp))
    return ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=Replicate())},
        in_src_shardings={"x": placement},
        in_dst_shardings={"x": placement},
        out_dst_shardings=placement,
    )


def replicated_config() -> ShardingConfig:
    """A Linear that every tensor-parallel rank computes whole."""
    whole = dense_param_placement(tp=Replicate())
    return ShardingConfig(
        state_shardings={"weight": whole, "bias": whole},
        out_dst_shardings=dense_activation_placement(tp=Replicate()),
    )


def set_qkv_linear_sharding(attention_cfg: GQAttention.Config) -> None:
    """Cut the query, key and value projections by heads.

    The rows of q_proj are ordered by head, and within a head query before gate; so an even cut of its rows
    gives each rank whole heads with their gates. Key/value heads that are copied (`kv_copies`) are fewer than the
    ranks: every rank computes them all.
    """
    attention_cfg.q_proj.sharding_config = colwise_config()
    for projection in (attention_cfg.k_proj, attention_cfg.v_proj):
        projection.sharding_config = colwise_config() if attention_cfg.kv_copies == 1 else replicated_config()


def set_gqa_attention_sharding(attention_cfg: GQAttention.Config, *, enable_sp: bool, tp_degree: int = 1) -> None:
    """Attention shared by heads: inputs whole, projections by head, output summed over ranks.

    Query and key norms act within a head, so they follow the heads. The part between the projections is
    declared by `set_gqa_inner_attention_local_map`. More ranks than key/value heads share them through copies.
    """
    attention_cfg.kv_copies = max(1, tp_degree // attention_cfg.num_kv_heads)
    whole = dense_activation_placement(tp=Replicate())
    # Every rank computes the angles for its stretch and the mask for the whole sequence.
    mask = dense_activation_placement(tp=Replicate(), cp=Replicate())
    shared = {"cos_BSR": whole, "sin_BSR": whole, "mask_B1SS": mask}
    attention_cfg.sharding_config = ShardingConfig(
        in_src_shardings={"x_BSD": dense_activation_placement(tp=_residual_placement(enable_sp)), **shared},
        in_dst_shardings={"x_BSD": whole, **shared},
    )
    set_qkv_linear_sharding(attention_cfg)
    by_head = dense_activation_placement(tp=Shard(HEADS))
    for norm, heads in ((attention_cfg.q_norm, by_head), (attention_cfg.k_norm, _kv_heads(attention_cfg))):
        if norm is not None:
            norm.sharding_config = ShardingConfig(
                state_shardings={"weight": dense_param_placement(tp=Replicate())},
                in_src_shardings={"x": heads},
                in_dst_shardings={"x": heads},
                out_dst_shardings=heads,
            )
    attention_cfg.o_proj.sharding_config = rowwise_config(output_sp=enable_sp)


def set_gqa_inner_attention_local_map(inner_attention_cfg: ScaledDotProductAttention.Config) -> None:
    """Run the kernel on local tensors: each rank on its own heads.

    Under context parallelism queries stay cut along the sequence and the mask, which is whole, is cut along them;
    keys and values are gathered, and their gradients, to which every rank contributes, are summed.
    """
    q = dense_activation_placement(tp=Shard(HEADS))
    kv = dense_activation_placement(tp=Shard(HEADS), cp=Replicate())
    kv_grad = dense_activation_placement(tp=Shard(HEADS), cp=Partial())
    whole_mask = dense_activation_placement(tp=Replicate(), cp=Replicate())
    mask = dense_activation_placement(tp=Replicate(), cp=Shard(MASK_QUERY))
    inner_attention_cfg.sharding_config = ShardingConfig(
        in_src_shardings={"q_BSNE": q, "k_BSKE": q, "v_BSKE": q, "mask_B1SS": whole_mask},
        in_dst_shardings={"q_BSNE": q, "k_BSKE": kv, "v_BSKE": kv, "mask_B1SS": mask},
        out_src_shardings=q,
        local_map=LocalMapConfig(in_grad_placements=(q, kv_grad, kv_grad, mask)),
    )


def set_gated_delta_net_sharding(delta_net_cfg: GatedDeltaNet.Config, *, enable_sp: bool) -> None:
    """Gated DeltaNet shared by heads: projections, convolutions and decays by head, output summed over ranks.

    Queries, keys and values have projections and convolutions of their own, so an even cut of each gives a rank whole
    heads. What runs along the sequence is declared by `set_gated_delta_rule_local_map`.
    """
    whole = dense_activation_placement(tp=Replicate())
    # Padding mask and ages come whole, and are cut to a rank's stretch here.
    whole_rows = dense_activation_placement(tp=Replicate(), cp=Replicate())
    by_channel = dense_param_placement(tp=Shard(0))
    delta_net_cfg.sharding_config = ShardingConfig(
        state_shardings=dict.fromkeys(("conv_q", "conv_k", "conv_v", "A_log", "dt_bias"), by_channel),
        in_src_shardings={
            "x_BSD": dense_activation_placement(tp=_residual_placement(enable_sp)),
            "padding_BS": whole_rows,
            "age_BS": whole_rows,
        },
        in_dst_shardings={"x_BSD": whole, "padding_BS": whole, "age_BS": whole},
    )
    projections = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_b", "in_proj_a")
    for name in projections:
        getattr(delta_net_cfg, name).sharding_config = colwise_config()
    set_gated_delta_rule_local_map(delta_net_cfg.inner)
    by_head = dense_activation_placement(tp=Shard(HEADS))
    delta_net_cfg.norm.sharding_config = ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=Replicate())},
        in_src_shardings={"x": by_head, "gate": by_head},
        in_dst_shardings={"x": by_head, "gate": by_head},
        out_dst_shardings=by_head,
    )
    delta_net_cfg.out_proj.sharding_config = rowwise_config(output_sp=enable_sp)


def set_gated_delta_rule_local_map(rule_cfg: GatedDeltaRule.Config) -> None:
    """Run convolutions and delta rule on local tensors: each rank on its own heads.

    What passes between the stretches of a sequence no placement can say (`context_parallel`).
    """
    by_channel = dense_activation_placement(tp=Shard(CHANNELS))
    parameter = dense_param_placement(tp=Shard(0))
    # Ranks with other rows or tokens compute other parts of a parameter's gradient.
    gradient: NamedPlacement = {axis: Partial() for axis in (*DATA_AXES, MeshAxisName.CP)}
    gradient[MeshAxisName.TP] = Shard(0)
    activations = ("q_BSX", "k_BSX", "v_BSY", "a_BSN", "b_BSN")
    parameters = ("conv_q", "conv_k", "conv_v", "A_log", "dt_bias")
    age = dense_activation_placement(tp=Replicate())
    layout = {**dict.fromkeys(activations, by_channel), **dict.fromkeys(parameters, parameter), "age_BS": age}
    rule_cfg.sharding_config = ShardingConfig(
        in_src_shardings=layout,
        in_dst_shardings=dict(layout),
        out_src_shardings=dense_activation_placement(tp=Shard(HEADS)),
        local_map=LocalMapConfig(
            in_grad_placements=(*[by_channel] * len(activations), *[gradient] * len(parameters), age),
        ),
    )


def _kv_heads(attention_cfg: GQAttention.Config) -> NamedPlacement:
    """Where the key/value heads are between their projections and the copies of them."""
    return dense_activation_placement(tp=Shard(HEADS) if attention_cfg.kv_copies == 1 else Replicate())


def set_dense_ffn_sharding(
    feed_forward_cfg: FeedForward.Config, *, attn_x_placement: Placement, enable_sp: bool
) -> None:
    """A feed-forward block shared by its hidden channels.

    `attn_x_placement` is the layout in which the attention block left the activations.
    """
    feed_forward_cfg.sharding_config = ShardingConfig(
        in_src_shardings={"x_BSD": dense_activation_placement(tp=attn_x_placement)},
        in_dst_shardings={"x_BSD": dense_activation_placement(tp=Replicate())},
    )
    feed_forward_cfg.gate_proj.sharding_config = colwise_config()
    feed_forward_cfg.up_proj.sharding_config = colwise_config()
    feed_forward_cfg.down_proj.sharding_config = rowwise_config(output_sp=enable_sp)


def set_decoder_sharding_config(config: Decoder.Config, *, loss_parallel: bool, enable_sp: bool) -> None:
    """The parts outside the layers: embedding and output projection cut along the vocabulary, final norm.

    With `loss_parallel` the logits stay cut along the vocabulary, otherwise they are gathered.
    """
    whole = dense_activation_placement(tp=Replicate())
    residual = dense_activation_placement(tp=_residual_placement(enable_sp))
    config.embed_tokens.sharding_config = ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=Shard(0))},
        # Token ids come whole: here begins a rank's stretch of the sequence.
        in_src_shardings={"input": dense_activation_placement(tp=Replicate(), cp=Replicate())},
        in_dst_shardings={"input": whole},
        out_dst_shardings=residual,
    )
    config.norm.sharding_config = norm_config(enable_sp=enable_sp)
    config.lm_head.sharding_config = ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=Shard(0))},
        in_src_shardings={"input": residual},
        in_dst_shardings={"input": whole},
        out_dst_shardings=dense_activation_placement(tp=Shard(-1) if loss_parallel else Replicate()),
    )


def _residual_placement(enable_sp: bool) -> Placement:
    return Shard(SEQUENCE) if enable_sp else Replicate()
