"""Optimizers across layouts: state saved under one loads under every other; steps in backward equal steps after it."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_components import OptimizersContainer, OptimizersInBackwardContainer, ParamGroupConfig
from hp_components.optimizer_kinds import kind_names
from hp_protocols import MeshAxisName, Module, ShardingConfig
from hp_protocols.distributed import apply_fsdp, apply_replicate, canonical_named_parameters
from hp_protocols.errors import ConfigError
from hp_protocols.testing import run_world

Linear = Module.from_nn_module(nn.Linear)
TP = MeshAxisName.TP
GROUPS = [ParamGroupConfig(pattern=r"^first", lr=3e-2), ParamGroupConfig(pattern="norm", betas=(0.5, 0.6))]
NAMES = ("AdamW", "SGD", "RMSprop")
KWARGS = {"SGD": {"momentum": 0.9}}


class Model(Module):
    """Uneven rows (11 over 4 ranks), projections that tensor parallelism shares, a norm, a layer without gradient."""

    def __init__(self, tied=False):
        super().__init__()
        cut, whole = {TP: Shard(0)}, {TP: Replicate()}
        columns = ShardingConfig(
            state_shardings={"weight": cut, "bias": cut},
            in_src_shardings={"input": whole},
            in_dst_shardings={"input": whole},
            out_dst_shardings={TP: Shard(-1)},
        )
        rows = ShardingConfig(
            state_shardings={"weight": {TP: Shard(1)}, "bias": whole},
            in_src_shardings={"input": {TP: Shard(-1)}},
            in_dst_shardings={"input": {TP: Shard(-1)}},
            out_dst_shardings=whole,
        )
        torch.manual_seed(0)
        self.first = Linear.Config(sharding_config=columns).build(in_features=11, out_features=8)
        self.second = Linear.Config(sharding_config=rows).build(in_features=8, out_features=11)
        self.norm = Module.from_nn_module(nn.LayerNorm)(11)
        self.idle = Module.from_nn_module(nn.Linear)(3, 5)
        self.last = Module.from_nn_module(nn.Linear)(11, 11)
        if tied:
            self.last.weight = self.idle.weight = nn.Parameter(torch.randn(11, 11))

    def forward(self, x):
        hidden = self.second(torch.tanh(self.first(x)))
        hidden = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        return self.last(self.norm(x + hidden))


def laid_out(kind, world_size):
    """The model on this world, and this rank's place among those that read different rows."""
    model = Model()
    tp = 2 if kind.startswith("tp") else 1
    mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("fsdp", "tp"))
    if tp > 1:
        model.parallelize(mesh["tp"])
    if kind == "replicated":
        apply_replicate(model, mesh=mesh["fsdp"], units=[model.first, model.second])
    elif world_size > tp:
        apply_fsdp(model, mesh=mesh["fsdp"], units=[model.first, model.second])
    return model, mesh.get_local_rank("fsdp"), world_size // tp


def build(model, name="AdamW", **changes):
    groups = [ParamGroupConfig(pattern=r"^first", lr=3e-2)] if name != "AdamW" else GROUPS
    config = OptimizersContainer.Config(name=name, lr=1e-2, kwargs=KWARGS.get(name, {}), param_groups=groups)
    return config.replace(**changes).build(model_parts=[model])


def train(model, opt, rank, ranks, steps, offset=0, micro_batches=1):
    """Each rank takes its share of the same eight rows."""
    for number in range(offset, offset + steps):
        rows = torch.sin(torch.arange(8 * 11.0).reshape(8, 11) * (number + 1))
        mine = rows[rank * 8 // ranks : (rank + 1) * 8 // ranks].chunk(micro_batches)
        for index, part in enumerate(mine):
            opt.begin_backward(last=index == len(mine) - 1)
            (model(part).square().sum() / 88).backward()
        opt.step()
        opt.zero_grad()


def whole(value):
    return value.full_tensor().clone() if isinstance(value, DTensor) else value


def contents(model, opt):
    found = {name: whole(p.detach()).clone() for name, p in canonical_named_parameters(model)}
    return found | {key: whole(value) for key, value in opt.state_dict().items()}


def save(rank, world_size, folder):
    """Train under FSDP with each optimizer; what was saved, gathered."""
    saved = {}
    for name in NAMES:
        model, place, ranks = laid_out("fsdp", world_size)
        opt = build(model, name)
        train(model, opt, place, ranks, 2)
        dcp.save({"optimizer": opt}, checkpoint_id=f"{folder}/{name}")
        saved[name] = contents(model, opt)
    return saved


def load(rank, world_size, folder, kind):
    loaded = {}
    for name in NAMES:
        model, _, _ = laid_out(kind, world_size)
        opt = build(model, name)
        dcp.load({"optimizer": opt}, checkpoint_id=f"{folder}/{name}")
        loaded[name] = contents(model, opt)
    return loaded


def assert_same_states(left, right):
    assert left.keys() == right.keys()
    for key, value in left.items():
        if key.startswith("state."):
            assert torch.equal(value, right[key]), key
        elif key.startswith("param_groups."):
            assert value == right[key], key


def test_state_saved_under_fsdp_8_loads_under_tp_2_x_fsdp_2_and_in_one_process(tmp_path):
    saved = run_world(save, 8, str(tmp_path))[0]
    assert "state.idle.weight.exp_avg" in saved["AdamW"]
    for layout in (run_world(load, 4, str(tmp_path), "tp x fsdp"), run_world(load, 1, str(tmp_path), "alone")):
        for loaded in layout:
            for name in NAMES:
                assert_same_states(saved[name], loaded[name])


def every_optimizer(rank, world_size):
    """Weights after three steps of every optimizer whose step torch can compute on shards, or why it is refused."""
    found = {}
    # Muon is left out: it works in bfloat16, where another order of sums shows in the third digit.
    for name in (name for name in kind_names() if name != "Muon"):
        model, place, ranks = laid_out("tp x fsdp" if world_size > 1 else "alone", world_size)
        try:
            opt = build(model, name)
        except ConfigError as error:
            found[name] = str(error)
            continue
        train(model, opt, place, ranks, 3)
        found[name] = {name: whole(p.detach()).clone() for name, p in canonical_named_parameters(model)}
    return found


def test_every_optimizer_trains_shards_as_whole_tensors_or_is_refused():
    (alone,) = run_world(every_optimizer, 1)
    for sharded in run_world(every_optimizer, 4):
        for name, weights in sharded.items():
            if name in ("Adafactor", "Rprop"):
                assert f"{name} steps whole tensors only, and first.weight is sharded" in weights
                continue
            for parameter, value in weights.items():
                assert torch.allclose(value, alone[name][parameter], rtol=1e-5, atol=1e-6), (name, parameter)


# Steps in backward


def both_ways(rank, world_size, kind, micro_batches):
    """What training leaves behind when steps come after backward, and when they come within it."""
    ends = []
    for in_backward in (False, True):
        model, place, ranks = laid_out(kind, world_size)
        opt = build(model, in_backward=in_backward)
        train(model, opt, place, ranks, 3, micro_batches=micro_batches)
        assert all(parameter.grad is None for parameter in model.parameters())
        ends.append(contents(model, opt))
    return ends


def every_kind(rank, world_size):
    return {
        (kind, micro_batches): both_ways(rank, world_size, kind, micro_batches)
        for kind in ("fsdp", "tp x fsdp", "replicated")
        for micro_batches in (1, 2)
    }


def assert_all_equal(left, right):
    assert left.keys() == right.keys()
    for key, value in left.items():
        equal = torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]
        assert equal, key


def test_steps_in_backward_equal_steps_after_it_in_every_layout_to_the_bit():
    for results in run_world(every_kind, 4):
        for after, within in results.values():
            assert_all_equal(after, within)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adafactor"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_in_backward_equal_steps_after_it_in_one_process_to_the_bit(name, micro_batches):
    ends = []
    for in_backward in (False, True):
        model = Model(tied=True)
        opt = build(model, name, in_backward=in_backward)
        train(model, opt, 0, 1, 3, micro_batches=micro_batches)
        ends.append(contents(model, opt))
    assert_all_equal(*ends)


def test_gradients_are_freed_one_by_one_while_backward_runs():
    model = Model()
    build(model, in_backward=True)
    alive = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: alive.append(sum(p.grad is not None for p in model.parameters())))
    model(torch.ones(2, 11)).sum().backward()
    assert len(alive) == 8
    assert max(alive) == 0


def test_either_container_loads_what_the_other_has_saved():
    for first, second in ((False, True), (True, False)):
        model, again = Model(), Model()
        saver, loader = build(model, in_backward=first), build(again, in_backward=second)
        train(model, saver, 0, 1, 2)
        again.load_state_dict(model.state_dict())
        loader.load_state_dict(
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in saver.state_dict().items()}
        )
        for trained, opt in ((model, saver), (again, loader)):
            train(trained, opt, 0, 1, 2, offset=2)
        assert_all_equal(contents(model, saver), contents(again, loader))


def test_the_field_and_the_class_make_the_same_thing():
    by_field = OptimizersContainer.Config(in_backward=True).build(model_parts=[Model()])
    by_class = OptimizersInBackwardContainer.Config().build(model_parts=[Model()])
    assert type(by_field) is type(by_class) is OptimizersInBackwardContainer
    assert by_field.steps_in_backward
    assert not OptimizersContainer.Config().build(model_parts=[Model()]).steps_in_backward
    assert len(by_field) == len(list(Model().parameters()))
    for config in (
        OptimizersInBackwardContainer.Config(in_backward=False),
        OptimizersContainer.Config(in_backward=True, foreach=True),
    ):
        with pytest.raises(ConfigError, match=r"optimizer\.(in_backward|foreach)"):
            config.build(model_parts=[Model()])


def test_a_gradient_that_comes_in_two_parts_is_refused_instead_of_stepped_twice():
    model = Model()
    opt = build(model, in_backward=True)
    model(torch.ones(2, 11)).sum().backward()
    with pytest.raises(RuntimeError, match=r"the gradient of .* came in two parts within one step"):
        model(torch.ones(2, 11)).sum().backward()
    opt.step()
    model(torch.ones(2, 11)).sum().backward()


def test_several_micro_batches_say_that_gradients_stay(caplog):
    model = Model()
    with caplog.at_level("WARNING"):
        train(model, build(model, in_backward=True), 0, 1, 2, micro_batches=2)
    assert [record.getMessage() for record in caplog.records] == [
        "optimizer.in_backward with several micro-batches per step: gradients stay in memory between them"
    ]
