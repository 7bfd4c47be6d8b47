"""finish_parallelize: the last steps of every model's parallelize function, as a run's sections ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hp_protocols import BaseModel, Module, ModuleList
from hp_protocols.distributed import ParallelDims, canonical_fqn, finish_parallelize
from hp_protocols.errors import ConfigError
from hp_protocols.testing import run_world

Linear = Module.from_nn_module(torch.nn.Linear)


class Block(Module):
    def __init__(self):
        super().__init__()
        self.up = Linear(4, 4)

    def forward(self, x_BD):
        return x_BD + torch.tanh(self.up(x_BD))


class Model(BaseModel):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        pass

    def __init__(self, config):
        super().__init__()
        torch.manual_seed(3)
        self.layers = ModuleList([Block(), Block()])
        self.head = Linear(4, 2)

    def forward(self, x_BD):
        for layer in self.layers:
            x_BD = layer(x_BD)
        return self.head(x_BD)

    def segments(self):
        return [*self.layers, self.head]


def sections(compile_mode="none", recompute="none", param="float32", offload=False):
    return SimpleNamespace(
        training=SimpleNamespace(
            mixed_precision_param=param, mixed_precision_reduce="float32", enable_cpu_offload=offload
        ),
        parallelism=SimpleNamespace(fsdp_reshard_after_forward="default"),
        activation_checkpoint=SimpleNamespace(
            mode=recompute, preserve_rng_state=True, determinism_check="default", early_stop=False, debug=False
        ),
        compile=SimpleNamespace(mode=compile_mode, backend="eager"),
    )


def dims(**degrees):
    given = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "world_size": 1} | degrees
    return ParallelDims(**given)


def finish(parallel_dims, **asked):
    model = Model.Config().build()
    found = finish_parallelize(
        model, blocks=model.layers, parallel_dims=parallel_dims, trainer_config=sections(**asked)
    )
    assert found is model
    return model


def test_what_no_section_asks_for_is_not_done():
    model = finish(dims())
    assert all(type(layer) is Block for layer in model.layers)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


def test_blocks_are_recomputed_and_compiled_and_compute_the_same():
    x_BD, plain = torch.randn(3, 4), finish(dims())
    for asked in ({"recompute": "full"}, {"compile_mode": "blocks"}, {"recompute": "full", "compile_mode": "blocks"}):
        model = finish(dims(), **asked)
        changed = [layer for layer in model.layers if type(layer) is not Block or layer._compiled_call_impl is not None]
        assert len(changed) == 2
        assert [canonical_fqn(name) for name, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert torch.equal(model(x_BD), plain(x_BD))


def on_two_ranks(rank, world_size):
    for recompute in ("none", "full"):
        model = finish(dims(dp_shard=2, world_size=2), param="bfloat16", recompute=recompute)
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        # The wrapper of a recomputed block, and not the block inside it, is what is gathered.
        assert units == [model, *model.layers, model.head]
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert model(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    graph = finish(dims(dp_shard=2, world_size=2), param="bfloat16", compile_mode="graph")
    assert not any(isinstance(module, FSDPModule) for module in graph.modules())
    return True


def test_data_parallelism_comes_last_and_is_left_to_the_graph_in_graph_mode():
    assert run_world(on_two_ranks, 2) == [True, True]


def test_offloading_where_a_layout_only_replicates_is_refused_before_anything_is_changed():
    with pytest.raises(ConfigError, match=r"training.enable_cpu_offload: offloading works on shards"):
        finish(dims(dp_replicate=2, world_size=2), offload=True)
