"""Meshes given from outside, tensor-parallel parts, sub-groups, replicas and layouts (G12, G13, G16, G18).

In: a rank. Out: what differs, or an assertion that fails on this rank.
"""

from __future__ import annotations

import copy
from typing import Any

import graph_zoo as zoo
import torch
import torch.distributed as dist
from graph_jobs import raises, small, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_compile import GraphTrainer, PassConfig


def in_a_context(rank: int, world: int) -> list[str]:
    """TP 2 × FSDP 2 through a mesh context, against FSDP2 over the same tensor-parallel model."""
    from types import SimpleNamespace

    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def model() -> nn.Module:
        torch.manual_seed(0)
        built = nn.Module()
        built.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6)) for _ in range(2))
        built.head = nn.Linear(6, 5)
        for layer in built.layers:
            parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return built

    def train_fn(model: nn.Module, input: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            input = input + layer(input)
        return torch.nn.functional.cross_entropy(model.head(input), label)

    eager = model()
    for layer in eager.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(eager.head, mesh=mesh["dp"])
    mine = model()
    from hp_compile import FSDPModuleConfig, PassPlan

    plan = PassPlan({"head": FSDPModuleConfig()}, {"layers.*": FSDPModuleConfig()})
    trainer = GraphTrainer(mine, train_fn, PassConfig(), plan, {"lr": 1e-2}, "cpu", SimpleNamespace(device_mesh=mesh))
    optimizer = torch.optim.Adam(eager.parameters(), lr=1e-2, foreach=False)
    wrong = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
        input = torch.randn(4, 6, generator=generator)
        label = torch.randint(5, (4,), generator=generator)
        expected = train_fn(eager, input, label)
        expected.backward()
        if not torch.equal(trainer.train_step(input, label), expected):
            wrong.append(f"loss {step}")
        trainer.optimizer_step()
        optimizer.step()
        optimizer.zero_grad()
    assert trainer.pass_config.fsdp_degree == 2
    theirs = eager.state_dict()
    for name, value in trainer.state_dict()["model"].items():
        if not torch.equal(whole(value), whole(theirs[name])):
            wrong.append(name)
        if isinstance(value, DTensor) and value.placements != theirs[name].placements:
            wrong.append(f"{name}: {value.placements} against {theirs[name].placements}")
    return wrong


class _SumOverRanks(torch.autograd.Function):
    """Megatron's pair: the sum over the tensor-parallel group forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_reduce

        return all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _PlainParallel(nn.Module):
    """A pair of linear layers whose weights are this rank's plain parts."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, group: Any) -> None:
        super().__init__()
        self.up, self.down, self.group = nn.Parameter(up), nn.Parameter(down), group
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(torch.nn.functional.linear(x, self.up).relu(), self.down)
        return (_SumOverRanks.apply(y, self.group) if self.group is not None else y) * self.scale


def plain_shards(rank: int, world: int) -> None:
    """G18: plain tensor-parallel parts with declared placements are clipped and saved as what they are."""
    from types import SimpleNamespace

    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp_shard", "tp"))
    at = mesh["tp"].get_local_rank()
    torch.manual_seed(0)
    up, down = torch.randn(8, 6), torch.randn(6, 8)
    one = _PlainParallel(up.clone(), down.clone(), None)
    x = torch.randn(4, 6)

    def start(declared: Any) -> tuple[nn.Module, GraphTrainer]:
        model = _PlainParallel(up.chunk(2, 0)[at].clone(), down.chunk(2, 1)[at].clone(), mesh["tp"].get_group())
        context = SimpleNamespace(fsdp_non_moe_mesh=mesh, **({"tp_placements": declared} if declared else {}))
        config = {"lr": 1e-2, "grad_clip": 0.1}
        return model, GraphTrainer(model, zoo.square_loss, PassConfig(), None, config, "cpu", context)

    _, silent = start(None)
    silent.train_step(x, None)
    for call in (silent.optimizer_step, silent.state_dict):
        with raises(RuntimeError, "undeclared placement", "tp_placements"):
            call()
    _, trainer = start({"up": Shard(0), "down": Shard(1)})
    optimizer = torch.optim.Adam(one.parameters(), lr=1e-2)
    for _ in range(3):
        zoo.square_loss(one, x, None).backward()
        expected = nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        trainer.train_step(x, None)
        torch.testing.assert_close(trainer.optimizer_step(), expected, rtol=1e-6, atol=0)
    state = trainer.state_dict()["model"]
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(whole(state[name]), parameter.detach(), rtol=1e-4, atol=1e-5)
    kept = {name: whole(value).clone() for name, value in state.items()}
    _, other = start({"up": Shard(0), "down": Shard(1)})
    _ = other.optimizer
    other.model.load_state_dict(kept)
    assert all(torch.equal(whole(value), kept[name]) for name, value in other.state_dict()["model"].items())


def true_norm(rank: int, world: int) -> None:
    """G16: shards, replicas and scalars together: the norm of the whole averaged gradient, the same on all ranks."""
    from hp_compile import FSDPModuleConfig, PassPlan

    one = FSDPModuleConfig()
    modes: list[tuple[dict[str, Any], Any]] = [
        ({}, None),
        ({}, PassPlan({"embed": one}, {})),
        ({"dp_mode": "ddp"}, None),
        ({"dp_mode": "hsdp", "fsdp_degree": world // 2}, None),
    ]
    for options, plan in modes:
        case = zoo.build("uneven")
        whole_model = copy.deepcopy(case.model)
        config = {"grad_clip": 1e9}
        trainer = GraphTrainer(case.model, case.train_fn, PassConfig(**options), plan, config, "cpu")
        trainer.train_step(*case.batch(rank))
        norm = trainer.optimizer_step()
        sum(case.train_fn(whole_model, *case.batch(other)) for other in range(world)).div(world).backward()
        expected = nn.utils.get_total_norm([p.grad for p in whole_model.parameters() if p.grad is not None])
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        norms = [torch.zeros(()) for _ in range(world)]
        dist.all_gather(norms, norm)
        assert all(torch.equal(other, norm) for other in norms)


def writes_to_shards(rank: int, world: int) -> None:
    class Clamping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    from hp_compile import PassPlan

    for config, plan in (
        (PassConfig(), None),
        (PassConfig(param_dtype="bfloat16"), None),
        (PassConfig(), PassPlan({})),
        (PassConfig(dp_mode="ddp"), None),
    ):
        torch.manual_seed(0)
        model = Clamping(4, 4)
        trainer = GraphTrainer(model, zoo.square_loss, config, plan, device="cpu")
        with raises(RuntimeError, "writes to parameter 'weight' in place", "optimizer_step"):
            trainer.train_step(torch.ones(2, 4), None)
        # Nothing has been cut: the model still runs in eager.
        assert zoo.square_loss(model, torch.ones(2, 4), None).isfinite()


def outside_the_plan(rank: int, world: int) -> list[str]:
    """G12: what the plan leaves out is replicated and averaged in one flat buffer, children first."""
    from hp_compile import FSDPModuleConfig, PassPlan

    case, trainer = small(pass_plan=PassPlan({}, {"layers.*": FSDPModuleConfig()}))
    eager = copy.deepcopy(case.model)
    for layer in eager.layers:
        fully_shard(layer)
    rest = [eager.embed.weight, eager.norm.weight, eager.head.weight]
    optimizer = torch.optim.Adam(eager.parameters(), lr=1e-2, foreach=False)
    wrong = []
    for step in range(3):
        input, label = case.batch(step + 10 * rank)
        expected = case.train_fn(eager, input, label)
        expected.backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in rest])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
        for parameter, part in zip(rest, flat.split([parameter.numel() for parameter in rest]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        wrong += [] if torch.equal(trainer.train_step(input, label), expected) else [f"loss {step}"]
        trainer.optimizer_step()
        optimizer.step()
        optimizer.zero_grad()
    theirs = eager.state_dict()
    wrong += [n for n, v in trainer.state_dict()["model"].items() if not torch.equal(whole(v), whole(theirs[n]))]
    with raises(RuntimeError, "already partitioned by another GraphTrainer"):
        GraphTrainer(case.model, case.train_fn, PassConfig(), device="cpu").train_step(*case.batch(0))
    return wrong


def in_groups(rank: int, world: int) -> list[str]:
    """Two sub-groups of the world, a trainer on each: as if each group were alone."""
    from types import SimpleNamespace

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("other", "fsdp_shard"))
    case, trainer = small(mesh_context=SimpleNamespace(fsdp_non_moe_mesh=mesh))
    eager = copy.deepcopy(case.model)
    for layer in eager.layers:
        fully_shard(layer, mesh=mesh["fsdp_shard"])
    fully_shard(eager, mesh=mesh["fsdp_shard"])
    optimizer = torch.optim.Adam(eager.parameters(), lr=1e-2, foreach=False)
    wrong = []
    for step in range(3):
        input, label = case.batch(step + 10 * rank)
        expected = case.train_fn(eager, input, label)
        expected.backward()
        wrong += [] if torch.equal(trainer.train_step(input, label), expected) else [f"loss {step}"]
        trainer.optimizer_step()
        optimizer.step()
        optimizer.zero_grad()
    theirs = eager.state_dict()
    wrong += [n for n, v in trainer.state_dict()["model"].items() if not torch.equal(whole(v), whole(theirs[n]))]
    assert (trainer.pass_config.fsdp_degree, world) == (world // 2, world)
    return wrong


def layouts_agree(rank: int, world: int) -> list[str]:
    """Reshard and overlap never change a bit; on two ranks neither buckets nor plans do."""
    from hp_compile import FSDPModuleConfig, PassPlan

    one = FSDPModuleConfig()
    variants: list[tuple[dict[str, Any], Any]] = [
        ({"enable_overlap": overlap, "fsdp_reshard_after_forward": reshard}, None)
        for overlap in (True, False)
        for reshard in (True, False)
    ]
    if world <= 2:
        variants += [({"bucket_mb": 0}, None), ({"bucket_mb": 0.002}, None)]
        variants += [({}, PassPlan({}, {"layers.*": one})), ({}, PassPlan()), ({}, PassPlan({"embed.weight": one}, {}))]
    states = []
    for options, plan in variants:
        case, trainer = small(pass_plan=plan, **options)
        for step in range(3):
            trainer.train_step(*case.batch(step + 10 * rank))
            trainer.optimizer_step()
        states.append({name: whole(value) for name, value in trainer.state_dict()["model"].items()})
    return [
        f"{variants[at]}: {name}"
        for at, state in enumerate(states)
        for name in state
        if not torch.equal(state[name], states[0][name])
    ]
