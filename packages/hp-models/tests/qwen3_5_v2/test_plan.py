"""The largest published size on 256 pretended ranks, to the byte what its shapes and placements say."""

from types import SimpleNamespace

import pytest
import torch

from hp_models.qwen3_5_v2 import get_model_spec
from hp_protocols.distributed import plan_rank
from hp_protocols.errors import ConfigError


def run_config(**degrees):
    names = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel")
    names += ("pipeline_parallel", "expert_parallel")
    given = {f"{name}_degree": 1 for name in names} | {"data_parallel_shard_degree": -1} | degrees
    return SimpleNamespace(
        training=SimpleNamespace(
            seq_len=4096,
            dtype="float32",
            mixed_precision_param="bfloat16",
            mixed_precision_reduce="float32",
            enable_cpu_offload=False,
        ),
        parallelism=SimpleNamespace(
            **given,
            enable_sequence_parallel=True,
            disable_loss_parallel=False,
            fsdp_reshard_after_forward="default",
        ),
        activation_checkpoint=SimpleNamespace(
            mode="full", preserve_rng_state=True, determinism_check="default", early_stop=False, debug=False
        ),
        compile=SimpleNamespace(mode="none", backend="inductor"),
    )


def counted(tp, fsdp, whole):
    """Elements of the whole model and of its first rank; `whole` are the names that tensor parallelism does not cut."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in get_model_spec("27B").model.build().named_parameters()}
    held = 0
    for name, shape in shapes.items():
        rows, columns = shape[0], shape[1:].numel()
        if "o_proj" in name or "out_proj" in name or "down_proj" in name:
            columns //= tp
        elif not any(part in name for part in whole):
            rows //= tp
        # FSDP cuts rows, the first ranks' parts rounded up.
        held += -(-rows // fsdp) * columns
    return sum(shape.numel() for shape in shapes.values()), held


def test_a_rank_of_256_holds_what_its_placements_say():
    plan = plan_rank(
        get_model_spec("27B"),
        trainer_config=run_config(tensor_parallel_degree=4, context_parallel_degree=2),
        world_size=256,
    )
    assert (plan.parameters, plan.rank_parameters) == counted(4, 64, ("norm",))
    assert plan.rank_bytes.parameters == plan.rank_bytes.gradients == 4 * plan.rank_parameters
    assert plan.rank_bytes.optimizer == 8 * plan.rank_parameters


def test_more_ranks_than_key_value_heads_hold_the_projections_of_these_whole():
    plan = plan_rank(get_model_spec("27B"), trainer_config=run_config(tensor_parallel_degree=8), world_size=256)
    assert (plan.parameters, plan.rank_parameters) == counted(8, 32, ("norm", "self_attn.k_proj", "self_attn.v_proj"))


def test_heads_that_the_ranks_cannot_share_are_refused():
    with pytest.raises(ConfigError, match=r"16 ranks cannot share 24 attention heads evenly; allowed: 1, 2, 4, 8"):
        plan_rank(get_model_spec("27B"), trainer_config=run_config(tensor_parallel_degree=16), world_size=256)
