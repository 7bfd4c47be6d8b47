"""What one rank of a pretended world holds, against numbers counted by hand and against real ranks."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hp_protocols import BaseModel, MeshAxisName, ModelSpec, Module, ShardingConfig
from hp_protocols.distributed import ParallelDims, StateBytes, apply_fsdp, plan_rank, state_bytes
from hp_protocols.errors import ConfigError
from hp_protocols.platform import get_platform
from hp_protocols.testing import run_world


class Layer(nn.Linear, Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        width: int

    def __init__(self, config):
        super().__init__(config.width, config.width)


class Toy(BaseModel):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        width: int = 6
        layer: Layer.Config | None = None

        def update_from_config(self, *, trainer_config):
            axis = MeshAxisName.TP
            states = {"weight": {axis: Shard(0)}, "bias": {axis: Replicate()}}
            self.layer = Layer.Config(width=self.width, sharding_config=ShardingConfig(state_shardings=states))

        def get_nparams_and_flops(self, model, seq_len):
            return sum(p.numel() for p in model.parameters()), seq_len

    def __init__(self, config):
        super().__init__()
        self.first, self.second = config.layer.build(), config.layer.build()
        self.second.weight.requires_grad_(False)


def lay_out(model, *, parallel_dims, trainer_config):
    if parallel_dims.tp_enabled:
        model.parallelize(parallel_dims.get_mesh("tp"))
    return apply_fsdp(model, mesh=parallel_dims.get_mesh("fsdp"), units=[])


def run(**degrees):
    names = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel")
    names += ("pipeline_parallel", "expert_parallel")
    parallelism = {f"{name}_degree": 1 for name in names} | {"data_parallel_shard_degree": -1} | degrees
    return SimpleNamespace(
        parallelism=SimpleNamespace(**parallelism), training=SimpleNamespace(seq_len=5, dtype="float32")
    )


SPEC = ModelSpec(name="toy", flavor="small", model=Toy.Config(), parallelize_fn=lay_out)


def test_a_rank_of_a_pretended_world_holds_what_is_counted_by_hand():
    # TP 2: weights of 3 rows, whole biases; over 2 FSDP ranks of rows 2 and 1, biases of 3.
    for rank, rows in ((0, 2), (2, 1)):
        plan = plan_rank(SPEC, trainer_config=run(tensor_parallel_degree=2), world_size=4, rank=rank)
        weight, bias = rows * 6, 3
        assert (plan.parameters, plan.flops_per_token) == (2 * 42, 5)
        assert plan.parallel_dims == ParallelDims(dp_shard=2, tp=2, world_size=4)
        assert plan.rank_parameters == 2 * (weight + bias)
        # The second weight is frozen: no gradient, no optimizer state.
        trained = 4 * (weight + 2 * bias)
        assert plan.rank_bytes == StateBytes(4 * 2 * (weight + bias), trained, 2 * trained)
    assert plan.rank_bytes.total == 4 * 2 * (weight + bias) + 3 * trained
    assert not dist.is_initialized()
    assert torch.get_default_dtype() == torch.float32
    assert SPEC.model.layer is None


def held(rank, world_size):
    config = Toy.Config()
    config.update_from_config(trainer_config=None)
    model = lay_out(config.build(), parallel_dims=ParallelDims(world_size=world_size), trainer_config=None)
    refused = ""
    try:
        plan_rank(SPEC, trainer_config=run(), world_size=4)
    except RuntimeError as error:
        refused = str(error)
    return state_bytes(model, optimizer_states=1), refused


def test_real_ranks_hold_what_was_planned_for_them():
    for rank, (real, refused) in enumerate(run_world(held, 4)):
        plan = plan_rank(SPEC, trainer_config=run(), world_size=4, rank=rank, optimizer_states=1)
        assert real == plan.rank_bytes
        assert "there is a process group already" in refused


def test_a_large_world_is_planned_in_one_process():
    plan = plan_rank(
        SPEC, trainer_config=run(tensor_parallel_degree=2, data_parallel_replicate_degree=8), world_size=1024
    )
    assert plan.parallel_dims.fsdp == 64


def test_half_precision_states_take_half():
    config = run()
    config.training.dtype = "bfloat16"
    plan = plan_rank(SPEC, trainer_config=config, world_size=1)
    assert plan.rank_bytes.parameters == 2 * 84


def test_a_layout_that_does_not_fit_and_a_rank_that_is_none_are_refused():
    with pytest.raises(ConfigError, match="the world has 4 processes"):
        plan_rank(SPEC, trainer_config=run(tensor_parallel_degree=3), world_size=4)
    with pytest.raises(ValueError, match="rank=4 is no rank of a world of 4"):
        plan_rank(SPEC, trainer_config=run(), world_size=4, rank=4)
    with pytest.raises(ValueError, match="toy has no model config or no parallelize_fn"):
        plan_rank(ModelSpec(name="toy", flavor="small", model=Toy.Config()), trainer_config=run(), world_size=1)


def test_nothing_is_left_of_a_pretended_world():
    with get_platform().pretended_world(8, rank=3):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
    assert not dist.is_initialized()


def test_a_later_world_takes_over_no_mesh_of_an_earlier_one():
    """Ranks of two worlds see equal meshes with other process groups; DTensor keeps what it decided by equality."""
    for rank in (3, 0):
        with get_platform().pretended_world(4, rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            value = distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)])
            for result in (value + value, value @ value.T):
                groups = [group.group_name for group in result.device_mesh.get_all_groups()]
                assert groups == [group.group_name for group in mesh.get_all_groups()]
                assert result.full_tensor().shape == (4, 4)
