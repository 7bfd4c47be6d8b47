"""OptimizersContainer against torch's own optimizers, step for step, and its state across layouts."""

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_components import OptimizersContainer
from hp_protocols.errors import ConfigError
from hp_protocols.testing import run_world


class Net(nn.Module):
    """A tied head, a norm, biases, uneven rows, and a parameter that never gets a gradient."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.idle = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.body(self.embed(ids))))


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def train(model, step, steps, offset=0):
    """Deterministic gradients: the same for the same step number."""
    for number in range(offset, offset + steps):
        ids = torch.arange(6).reshape(2, 3) * (number + 1) % 7
        model(ids).square().mean().backward()
        step()
        model.zero_grad()


def assert_same_parameters(left, right):
    for (name, a), (_, b) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def torchs_own(kind, model, **kwargs):
    named = dict(model.named_parameters())
    plain = [named[name] for name in ("body.bias", "norm.weight", "norm.bias")]
    decaying = [named[name] for name in ("embed.weight", "body.weight", "idle.weight")]
    return kind([{"params": decaying, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], **kwargs)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("kernels", [{}, {"foreach": True}, {"fused": True}])
def test_every_step_equals_torchs_own(name, kernels):
    ours, theirs = net(), net()
    opt = OptimizersContainer.Config(name=name, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, **kernels).build(
        model_parts=[ours]
    )
    own_kernels = {"foreach": False, "fused": False} | kernels
    reference = torchs_own(getattr(torch.optim, name), theirs, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, **own_kernels)
    for number in range(5):
        train(ours, opt.step, 1, number)
        train(theirs, reference.step, 1, number)
        assert_same_parameters(ours, theirs)


def test_kernels_are_always_chosen_explicitly():
    for group in OptimizersContainer.Config().build(model_parts=[net()]).param_groups:
        assert group["foreach"] is False
        assert group["fused"] is False


def test_names_with_a_decay_keyword_get_no_weight_decay():
    model = net()
    opt = OptimizersContainer.Config(weight_decay=0.3, decay_keywords=("BIAS", "embed")).build(model_parts=[model])
    names = {id(p): name for name, p in model.named_parameters()}
    by_decay = {g["weight_decay"]: {names[id(p)] for p in g["params"]} for g in opt.param_groups}
    assert by_decay == {
        0.3: {"body.weight", "norm.weight", "idle.weight"},
        0.0: {"body.bias", "norm.bias", "embed.weight"},
    }


def test_a_keyword_of_ones_own_that_matches_nothing_is_an_error():
    with pytest.raises(ConfigError, match="'embedd' matches no parameter"):
        OptimizersContainer.Config(decay_keywords=("bias", "embedd")).build(model_parts=[net()])
    OptimizersContainer.Config().build(model_parts=[nn.Linear(2, 2, bias=False)])  # the defaults need not match


def test_a_tied_weight_is_stepped_and_saved_once():
    model = net()
    opt = OptimizersContainer.Config().build(model_parts=[model])
    assert sum(p is model.embed.weight for g in opt.param_groups for p in g["params"]) == 1
    assert [key for key in opt.state_dict() if key.endswith("exp_avg")].count("state.embed.weight.exp_avg") == 1
    assert not any("head" in key for key in opt.state_dict())


def test_a_frozen_parameter_is_neither_stepped_nor_saved():
    model = net()
    model.body.weight.requires_grad_(False)
    before = model.body.weight.clone()
    opt = OptimizersContainer.Config(lr=0.1).build(model_parts=[model])
    train(model, opt.step, 2)
    assert torch.equal(model.body.weight, before)
    state = opt.state_dict()
    assert not any("body.weight" in key for key in state)
    opt.load_state_dict(state)


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        OptimizersContainer.Config().build(model_parts=[net().requires_grad_(False)])


def test_looking_at_the_state_before_the_first_step_changes_nothing():
    looked, plain = net(), net()
    opt, reference = (OptimizersContainer.Config(lr=1e-2).build(model_parts=[m]) for m in (looked, plain))
    opt.state_dict()
    assert_same_parameters(looked, plain)
    train(looked, opt.step, 3)
    train(plain, reference.step, 3)
    assert_same_parameters(looked, plain)


def test_looking_at_the_state_leaves_gradients_and_rates_alone():
    model = net()
    opt = OptimizersContainer.Config(lr=1e-2).build(model_parts=[model])
    model(torch.arange(3)[None]).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    opt.state_dict()
    assert all(p.grad is gradients[name] for name, p in model.named_parameters())
    assert [group["lr"] for group in opt.param_groups] == [1e-2, 1e-2]


def test_a_saved_state_goes_on_to_the_bit_also_for_parameters_without_gradients():
    whole = net()
    opt = OptimizersContainer.Config(lr=1e-2).build(model_parts=[whole])
    train(whole, opt.step, 3)
    resumed = net(seed=1)
    resumed.load_state_dict(whole.state_dict())
    again = OptimizersContainer.Config(lr=1e-2).build(model_parts=[resumed])
    again.load_state_dict({key: copied(value) for key, value in opt.state_dict().items()})
    train(whole, opt.step, 3, 3)
    train(resumed, again.step, 3, 3)
    assert_same_parameters(whole, resumed)


def copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_distributed_checkpoint_takes_the_container_as_it_is(tmp_path):
    model = net()
    opt = OptimizersContainer.Config(lr=1e-2).build(model_parts=[model])
    train(model, opt.step, 2)
    dcp.save({"optimizer": opt}, checkpoint_id=tmp_path / "saved", no_dist=True)
    fresh = OptimizersContainer.Config(lr=1e-2).build(model_parts=[net()])
    dcp.load({"optimizer": fresh}, checkpoint_id=tmp_path / "saved", no_dist=True)
    saved, loaded = opt.state_dict(), fresh.state_dict()
    assert isinstance(opt, Stateful)
    assert all(torch.equal(loaded[key], saved[key]) for key in saved if key.startswith("state."))


def test_a_resumed_run_follows_its_own_hyperparameters_and_says_so(caplog):
    saved = OptimizersContainer.Config(lr=1e-2, weight_decay=0.1, eps=1e-6).build(model_parts=[net()]).state_dict()
    assert saved["param_groups.body.weight.weight_decay"] == 0.1
    opt = OptimizersContainer.Config(lr=2e-2, weight_decay=0.2, eps=1e-6).build(model_parts=[net()])
    with caplog.at_level(logging.WARNING):
        opt.load_state_dict(saved)
    assert [group["weight_decay"] for group in opt.param_groups] == [0.2, 0.0]
    assert [group["lr"] for group in opt.param_groups] == [2e-2, 2e-2]
    assert "weight_decay was 0.1 when the checkpoint was saved and is 0.2 now" in caplog.text
    assert "lr was 0.01 when the checkpoint was saved and is 0.02 now" in caplog.text
    assert "eps" not in caplog.text


def test_other_decay_keywords_on_resume_regroup_the_parameters_and_say_so(caplog):
    opt = OptimizersContainer.Config(lr=1e-2).build(model_parts=[net()])
    model = net()
    again = OptimizersContainer.Config(lr=1e-2, decay_keywords=("bias", "embed")).build(model_parts=[model])
    with caplog.at_level(logging.WARNING):
        again.load_state_dict(opt.state_dict())
    decaying, plain = again.param_groups
    assert any(p is model.norm.weight for p in decaying["params"])
    assert any(p is model.embed.weight for p in plain["params"])
    assert {record.getMessage().partition(";")[0] for record in caplog.records} == {
        "optimizer: weight_decay was 0.1 when the checkpoint was saved and is 0.0 now",
        "optimizer: weight_decay was 0.0 when the checkpoint was saved and is 0.1 now",
    }


def test_names_are_those_without_wrappers():
    model = net()
    model.body = checkpoint_wrapper(model.body)
    opt = OptimizersContainer.Config(lr=1e-2).build(model_parts=[model])
    for group in opt.param_groups:
        group["lr"] = 5e-3
    state = opt.state_dict()
    assert "state.body.weight.exp_avg" in state
    plain = OptimizersContainer.Config(lr=1e-2).build(model_parts=[net()])
    plain.load_state_dict(state)
    assert [group["lr"] for group in plain.param_groups] == [5e-3, 5e-3]
    with pytest.raises(ConfigError, match="'wrapped' matches no parameter"):
        OptimizersContainer.Config(decay_keywords=("wrapped",)).build(model_parts=[model])


def test_a_state_that_lacks_a_parameter_is_refused_by_name():
    state = OptimizersContainer.Config().build(model_parts=[net()]).state_dict()
    del state["state.body.weight.exp_avg"]
    with pytest.raises(KeyError, match=r"state\.body\.weight\.exp_avg"):
        OptimizersContainer.Config().build(model_parts=[net()]).load_state_dict(state)


def test_the_current_rate_is_taken_over_when_the_base_rate_is_the_same(caplog):
    opt = OptimizersContainer.Config(lr=1e-2).build(model_parts=[net()])
    for group in opt.param_groups:
        group["lr"] = 5e-3
    again = OptimizersContainer.Config(lr=1e-2, foreach=True).build(model_parts=[net()])
    with caplog.at_level(logging.WARNING):
        again.load_state_dict(opt.state_dict())
    assert [(g["lr"], g["foreach"]) for g in again.param_groups] == [(5e-3, True)] * 2
    assert not caplog.records


def test_model_parts_have_one_optimizer_each_and_one_state():
    parts = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    opt = OptimizersContainer.Config().build(model_parts=list(parts.values()))
    assert len(opt) == len(list(opt)) == 2
    with pytest.raises(ValueError, match="two model parts have the same parameter names"):
        opt.state_dict()
    named = [nn.ModuleDict({name: part}) for name, part in parts.items()]
    state = OptimizersContainer.Config().build(model_parts=named).state_dict()
    assert {"state.first.weight.exp_avg", "state.second.weight.exp_avg"} <= state.keys()


def test_every_fault_of_a_config_is_told_at_once():
    config = OptimizersContainer.Config(
        name="adamw", lr=-1.0, betas=(0.9, 1.0), eps=-1.0, weight_decay=float("nan"), foreach=True, fused=True
    )
    with pytest.raises(ConfigError) as caught:
        config.build(model_parts=[net()])
    assert {fault.where.removeprefix("optimizer.") for fault in caught.value.faults} == {
        "name", "lr", "betas", "eps", "weight_decay", "foreach",
    }  # fmt: skip
    assert "did you mean 'AdamW'?" in str(caught.value)


# State across layouts


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train_mlp(model, opt, steps):
    for _ in range(steps):
        model(torch.ones(2, 5)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def sharded_state(rank, world_size, steps):
    """Train under FSDP2; every rank returns the whole state."""
    model = mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",)))
    opt = OptimizersContainer.Config(lr=1e-2).build(model_parts=[model])
    train_mlp(model, opt, steps)
    return {key: gathered(value) for key, value in opt.state_dict().items()}


def gathered(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_the_state_of_two_fsdp_ranks_has_the_names_and_values_of_one_process_and_loads_there():
    sharded = run_world(sharded_state, 2, 3)[0]
    model = mlp()
    opt = OptimizersContainer.Config(lr=1e-2).build(model_parts=[model])
    train_mlp(model, opt, 3)
    single = opt.state_dict()
    assert sharded.keys() == single.keys()
    for key, value in single.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(sharded[key], value, rtol=1e-5, atol=1e-8)
        else:
            assert sharded[key] == value, key
    fresh = OptimizersContainer.Config(lr=1e-2).build(model_parts=[model])
    fresh.load_state_dict(sharded)
    loaded = fresh.state_dict()
    assert all(torch.equal(loaded[key], sharded[key]) for key in loaded if key.startswith("state."))
