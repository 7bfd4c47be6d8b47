"""Declarations by axis name; what they do on real processes is in qwen3_5_v2/test_parallelize.py."""

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from hp_models.common import decoder_sharding as sharding
from hp_models.common.attention import ScaledDotProductAttention
from hp_models.qwen3_5_v2 import debugmodel, qwen3_5_config, set_qwen3_5_sharding_config
from hp_protocols.sharding import resolve_placements

AXES = ("dp_replicate", "fsdp", "cp", "tp")


def on_mesh(named, axes=AXES):
    return resolve_placements(named, axes)


def test_a_parameter_is_cut_by_tensor_parallelism_only():
    named = sharding.dense_param_placement(tp=Shard(0))
    assert on_mesh(named) == (Replicate(), Replicate(), Replicate(), Shard(0))
    assert on_mesh(named, ("tp",)) == (Shard(0),)
    assert on_mesh(named, ("dp_replicate", "dp_shard", "tp")) == (Replicate(), Replicate(), Shard(0))


def test_an_activation_is_cut_by_rows_and_under_context_parallelism_by_tokens():
    assert on_mesh(sharding.dense_activation_placement(tp=Replicate())) == (Shard(0), Shard(0), Shard(1), Replicate())
    gathered = sharding.dense_activation_placement(tp=Shard(2), cp=Replicate())
    assert on_mesh(gathered, ("cp", "tp")) == (Replicate(), Shard(2))


def test_a_linear_is_cut_by_its_outputs_or_by_its_inputs():
    column, row = sharding.colwise_config(), sharding.rowwise_config(output_sp=True)
    states = [on_mesh(c.state_shardings[s], ("tp",)) for c in (column, row) for s in ("weight", "bias")]
    assert states == [(Shard(0),), (Shard(0),), (Shard(1),), (Replicate(),)]
    assert on_mesh(column.out_dst_shardings, ("tp",)) == (Shard(-1),)
    assert on_mesh(row.out_dst_shardings, ("tp",)) == (Shard(1),)
    assert on_mesh(sharding.rowwise_config().out_dst_shardings, ("tp",)) == (Replicate(),)


def test_under_context_parallelism_keys_and_values_are_gathered_and_their_gradients_summed():
    config = ScaledDotProductAttention.Config()
    sharding.set_gqa_inner_attention_local_map(config)
    declared = config.sharding_config
    axes = ("cp", "tp")
    inputs = {name: on_mesh(named, axes) for name, named in declared.in_dst_shardings.items()}
    assert inputs == {
        "q_BSNE": (Shard(1), Shard(2)),
        "k_BSKE": (Replicate(), Shard(2)),
        "v_BSKE": (Replicate(), Shard(2)),
        "mask_B1SS": (Shard(2), Replicate()),
    }
    gradients = [on_mesh(named, axes) for named in declared.local_map.in_grad_placements]
    assert gradients[:3] == [(Shard(1), Shard(2)), (Partial(), Shard(2)), (Partial(), Shard(2))]
    assert on_mesh(declared.out_src_shardings, axes) == (Shard(1), Shard(2))


def test_linear_attention_is_cut_by_heads_and_its_rule_runs_on_local_tensors():
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "layer_types": ["linear_attention"]}
    config = qwen3_5_config(vocab_size=61, hidden_size=32, intermediate_size=48, mrope_section=(1, 1, 0), **sizes)
    layer = config.layers[0].linear_attn
    sharding.set_gated_delta_net_sharding(layer, enable_sp=True)
    assert all(on_mesh(named, ("tp",)) == (Shard(0),) for named in layer.sharding_config.state_shardings.values())
    projections = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_a", "in_proj_b")
    weights = [getattr(layer, name).sharding_config.state_shardings["weight"] for name in projections]
    assert [on_mesh(named, ("tp",)) for named in weights] == [(Shard(0),)] * 6
    assert on_mesh(layer.out_proj.sharding_config.state_shardings["weight"], ("tp",)) == (Shard(1),)
    # Whole rows of padding and ages come in; each rank's stretch of them is used.
    for name in ("padding_BS", "age_BS"):
        assert on_mesh(layer.sharding_config.in_src_shardings[name], ("cp", "tp")) == (Replicate(), Replicate())
        assert on_mesh(layer.sharding_config.in_dst_shardings[name], ("cp", "tp")) == (Shard(1), Replicate())
    rule = layer.inner.sharding_config
    gradients = [on_mesh(named, ("fsdp", "cp", "tp")) for named in rule.local_map.in_grad_placements]
    assert gradients[5:10] == [(Partial(), Partial(), Shard(0))] * 5
    assert on_mesh(rule.out_src_shardings, ("cp", "tp")) == (Shard(1), Shard(2))


def test_key_value_heads_fewer_than_the_ranks_are_computed_by_every_rank():
    attention = next(layer.self_attn for layer in debugmodel().layers if layer.self_attn is not None)
    for tp_degree, copies, placement in ((2, 1, Shard(0)), (4, 2, Replicate())):
        sharding.set_gqa_attention_sharding(attention, enable_sp=True, tp_degree=tp_degree)
        assert attention.kv_copies == copies
        weight = attention.k_proj.sharding_config.state_shardings["weight"]
        assert on_mesh(weight, ("tp",)) == (placement,)


@pytest.mark.parametrize("enable_sp", [False, True])
def test_every_layer_of_the_model_has_its_declaration(enable_sp):
    config = debugmodel()
    set_qwen3_5_sharding_config(config, loss_parallel=True, enable_sp=enable_sp)
    model = config.build()
    undeclared = [name for name, module in model.named_modules() if module._sharding_config is None]
    # Containers and the blocks around declared parts; RoPE computes the same angles on every rank.
    assert [name for name in undeclared if not name.startswith("layers")] == ["", "rotary_emb"]
    assert {name for name in undeclared if name.startswith("layers")} == {"layers", *(f"layers.{i}" for i in range(4))}


def test_another_kind_of_attention_is_refused_by_name():
    config = debugmodel()
    config.layers[-1].self_attn = ScaledDotProductAttention.Config()  # The one that attends fully.
    with pytest.raises(TypeError, match=r"no sharding is known for .*ScaledDotProductAttention"):
        set_qwen3_5_sharding_config(config, loss_parallel=True, enable_sp=True)
