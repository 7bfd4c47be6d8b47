"""What ranks do in tests: the graph trainer beside an eager reference that knows nothing of it.

In: a case name and options. Out: a list of differences, empty if every bit is the same.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import graph_zoo as zoo
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hp_compile import GraphTrainer, PassConfig


def containers(model: nn.Module) -> list[nn.Module]:
    """Children of the outermost module lists: the units of a trainer without a plan."""
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList):
                if child not in found:
                    found.append(child)
            else:
                walk(child)

    walk(model)
    return found


def eager_reference(model: nn.Module, config: PassConfig, world: int) -> nn.Module:
    """fully_shard, replicate or 2-D fully_shard on the units, with FSDP2's own settings."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype) if config.param_dtype else None,
        reduce_dtype=getattr(torch, config.reduce_dtype) if config.reduce_dtype else None,
    )
    scalars = {parameter for parameter in model.parameters() if parameter.dim() == 0}
    options: dict[str, Any] = {"mp_policy": policy}
    if config.dp_mode == "hsdp":
        shards = config.fsdp_degree or world
        options["mesh"] = init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("r", "s"))
    else:
        options["mesh"] = init_device_mesh("cpu", (world,))
    wrap = replicate if config.dp_mode == "ddp" else fully_shard
    if scalars:
        options["ignored_params"] = scalars
    for module in containers(model):
        if any(True for _ in module.parameters()):
            wrap(module, **options)
    wrap(model, **options)
    if config.grad_reduce == "sum":
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    return model


def averaged_by_hand(model: nn.Module) -> None:
    """DDP without a wrapper: one flat buffer per unit, children first, averaged over the world.

    torch's `replicate` refuses 0-d parameters ("Shard on 0-d tensors is not supported"), so a model with scalars has
    this for a reference. Which elements share a buffer matters on three and more ranks, where a sum has an order.
    """
    units = containers(model)
    inside = {id(parameter) for unit in units for parameter in unit.parameters()}
    groups = [list(_children_first(unit)) for unit in units]
    groups.append([parameter for parameter in _children_first(model) if id(parameter) not in inside])
    for group in groups:
        grads = [parameter.grad for parameter in group if parameter.grad is not None]
        if grads:
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, op=dist.ReduceOp.AVG)
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))


def _children_first(module: nn.Module) -> Iterator[nn.Parameter]:
    for child in module.children():
        yield from _children_first(child)
    yield from module.parameters(recurse=False)


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def compare_with_eager(
    rank: int,
    world: int,
    name: str,
    options: dict[str, Any],
    steps: int = 5,
    accumulation: int = 1,
    clip: float | None = None,
) -> list[str]:
    """Train both, each rank on its own batches, and list every difference."""
    config = PassConfig(**options)
    case = zoo.build(name)
    eager = copy.deepcopy(case.model)
    by_hand = world == 1 or (config.dp_mode == "ddp" and any(p.dim() == 0 for p in eager.parameters()))
    if not by_hand:
        eager = eager_reference(eager, config, world)
    scalars = [parameter for parameter in eager.parameters() if not by_hand and not isinstance(parameter, DTensor)]
    trainer = GraphTrainer(
        case.model, case.train_fn, config, optimizer_config={"lr": 1e-2, "grad_clip": clip}, device="cpu"
    )
    optimizer = torch.optim.Adam(eager.parameters(), lr=1e-2, foreach=False)
    differences: list[str] = []
    for step in range(steps):
        for micro in range(accumulation):
            # All ranks need the same flags; data differ.
            number = step + 100 * (micro + 1) * 2 + 1000 * 2 * rank
            input, label = case.batch(number)
            torch.manual_seed(number)
            if hasattr(eager, "set_requires_gradient_sync"):
                last = micro == accumulation - 1
                eager.set_requires_gradient_sync(last or config.reduce_every == "train_step")
            expected = case.train_fn(eager, input, label)
            expected.backward()
            torch.manual_seed(number)
            loss = trainer.train_step(input, label)
            if not torch.equal(loss, expected) or loss.dtype != expected.dtype:
                differences.append(f"step {step}: loss {loss} against {expected}")
        if by_hand and world > 1:
            averaged_by_hand(eager)
        for parameter in scalars:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(eager.parameters(), clip)
            expected_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        norm = trainer.optimizer_step()
        if clip is not None and not torch.equal(norm, expected_norm):
            differences.append(f"step {step}: norm {norm} against {expected_norm}")
        mine, theirs = trainer.state_dict()["model"], eager.state_dict()
        if list(mine) != list(theirs):
            differences.append(f"names {list(mine)} against {list(theirs)}")
            break
        for fqn, value in theirs.items():
            if not torch.equal(whole(mine[fqn]), whole(value)):
                differences.append(f"step {step}: {fqn}")
        if differences:
            break
    return differences


def many(rank: int, world: int, jobs: list[tuple[Any, ...]]) -> dict[str, list[str]]:
    """Several comparisons in one world."""
    found = {}
    for name, options, *rest in jobs:
        extra = rest[0] if rest else {}
        try:
            found[f"{name} {options} {extra}"] = compare_with_eager(rank, world, name, options, **extra)
        except Exception as error:
            error.add_note(f"in {name} {options} {extra}")
            raise
    return {key: value for key, value in found.items() if value}


@contextlib.contextmanager
def raises(kind: type[BaseException], *parts: str):
    """Like pytest.raises, for ranks."""
    try:
        yield
    except kind as error:
        lacking = [part for part in parts if part not in str(error)]
        if lacking:
            raise AssertionError(f"{lacking} not in: {error}") from error
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


# ---- jobs about behaviour, each a list of checks in one world ----


def small(vocab: int = 32, **options: Any) -> tuple[zoo.Case, GraphTrainer]:
    case = zoo.build("decoder")
    config = PassConfig(**{key: value for key, value in options.items() if key in PassConfig.__dataclass_fields__})
    rest = {key: value for key, value in options.items() if key not in PassConfig.__dataclass_fields__}
    rest.setdefault("optimizer_config", {"lr": 1e-2})
    return case, GraphTrainer(case.model, case.train_fn, config, device="cpu", **rest)


def sharded_model_behaves(rank: int, world: int) -> None:
    """G10: shards, eager calls, eval_step, full_params, state_dict."""
    case, trainer = small()
    before = copy.deepcopy(case.model)
    identities = {name: id(parameter) for name, parameter in case.model.named_parameters()}
    input, label = case.batch(rank)
    expected = case.train_fn(before, input, label)
    assert torch.equal(trainer.eval_step(input, label), expected)
    trainer.train_step(input, label)
    rows = {name: parameter.shape[0] for name, parameter in before.named_parameters()}
    for name, parameter in case.model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert id(parameter) == identities[name]
        chunk = -(-rows[name] // world)
        assert parameter.shape[0] == max(0, min(chunk, rows[name] - rank * chunk)), name
        assert parameter.grad.shape == parameter.shape
        assert parameter.shard_info.global_shape == dict(before.named_parameters())[name].shape
    for call in (lambda: case.model(input), lambda: case.model.layers[0].down(torch.ones(1, 32))):
        with raises(RuntimeError, "eval_step", "full_params"):
            call()
    with trainer.full_params() as model:
        for name, parameter in before.named_parameters():
            assert torch.equal(dict(model.named_parameters())[name], parameter)
        assert torch.equal(case.train_fn(model, input, label), expected)
        assert all(type(value) is torch.Tensor for value in model.state_dict().values())
    for name, value in case.model.state_dict().items():
        assert isinstance(value, DTensor)
        assert torch.equal(value.full_tensor(), before.state_dict()[name]), name
    optimizer_params = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimizer_params == set(identities.values())
    assert trainer.optimizer_step() is None
    with raises(RuntimeError, "without gradients"):
        trainer.optimizer_step()


def ranks_agree(rank: int, world: int) -> None:
    """G7: different schedules and faults of one rank stop all; different lengths do not."""
    case = zoo.build("sometimes_unused")
    trainer = GraphTrainer(case.model, case.train_fn, PassConfig(), device="cpu")
    input, label = case.batch(0)
    trainer.train_step(input, label)
    with raises(RuntimeError, "issue different collectives", f"rank {rank}"):
        trainer.train_step({**input, "use": rank == 0}, label)
    # The fault of one rank is quoted on the others, and nobody is stuck.
    bad = {**input, "extra": object()} if rank == world - 1 else input
    if rank == world - 1:
        with raises(TypeError, "input['extra']"):
            trainer.train_step(bad, label)
    else:
        with raises(RuntimeError, f"rank {world - 1}", "input['extra']"):
            trainer.train_step(bad, label)
    trainer.train_step({**input, "use": False}, label)
    trainer.train_step(input, label)


def lengths_may_differ(rank: int, world: int) -> list[str]:
    """G7: one schedule, unequal shapes: as in eager."""
    case, trainer = small()
    eager = eager_reference(copy.deepcopy(case.model), PassConfig(), world)
    optimizer = torch.optim.Adam(eager.parameters(), lr=1e-2, foreach=False)
    wrong = []
    for step in range(4):
        input, label = zoo._tokens(32, rows=1 + (rank + step) % 2, length=4 + rank)(step)
        expected = case.train_fn(eager, input, label)
        expected.backward()
        if not torch.equal(trainer.train_step(input, label), expected):
            wrong.append(f"loss {step}")
        optimizer.step()
        optimizer.zero_grad()
        trainer.optimizer_step()
    theirs = eager.state_dict()
    wrong += [
        name
        for name, value in trainer.state_dict()["model"].items()
        if not torch.equal(whole(value), whole(theirs[name]))
    ]
    return wrong


def bad_starts(rank: int, world: int) -> None:
    """What is refused before anything has been cut."""
    from torch.nn.parallel import DistributedDataParallel

    def start(model: nn.Module, config: PassConfig, plan: Any = None, context: Any = None) -> None:
        GraphTrainer(model, zoo.square_loss, config, plan, device="cpu", mesh_context=context).train_step(
            torch.ones(2, 4), None
        )

    with raises(ValueError, f"fsdp_degree={world + 1} is not the world size {world}", "dp_mode='hsdp'"):
        start(nn.Linear(4, 4), PassConfig(fsdp_degree=world + 1))
    with raises(ValueError, "is not the world size", "product"):
        start(nn.Linear(4, 4), PassConfig(dp_mode="hsdp", fsdp_degree=world + 1))
    from types import SimpleNamespace

    from hp_compile import FSDPModuleConfig, PassPlan

    with raises(ValueError, "'layer'", "match no parameter"):
        start(nn.ModuleDict({"layers": nn.Linear(4, 4)}), PassConfig(), PassPlan({"layer": FSDPModuleConfig()}))
    with raises(ValueError, "has neither fsdp_non_moe_mesh"):
        start(nn.Linear(4, 4), PassConfig(), None, SimpleNamespace())
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("x",))
    with raises(ValueError, "('x',)", "'dp'"):
        start(nn.Linear(4, 4), PassConfig(), None, SimpleNamespace(device_mesh=mesh))
    with raises(ValueError, "('x',)", "'fsdp_shard'"):
        start(nn.Linear(4, 4), PassConfig(), None, SimpleNamespace(fsdp_non_moe_mesh=mesh))
    wrapped = nn.Sequential(nn.Linear(4, 4))
    fully_shard(wrapped[0])
    with raises(RuntimeError, "'0' is already wrapped by fully_shard"):
        start(wrapped, PassConfig())
    with raises(RuntimeError, "already wrapped by DistributedDataParallel"):
        start(DistributedDataParallel(nn.Linear(4, 4)), PassConfig())
    base = torch.ones(8, 4)
    viewing = nn.Linear(4, 4, bias=False)
    viewing.other = nn.Parameter(base[4:])
    viewing.weight = nn.Parameter(base[:4])
    with raises(ValueError, "'weight' and 'other' are views of one storage", "clone"):
        start(viewing, PassConfig())
    torch.manual_seed(rank)
    with raises(RuntimeError, "start from different weights", "sync_module_states=True"):
        start(nn.Linear(4, 4), PassConfig())
    torch.manual_seed(0)
    ulp = nn.Linear(4, 16500)
    with torch.no_grad():
        if rank == 1:
            ulp.weight.view(-1)[65520] += 1
    with raises(RuntimeError, "start from different weights (weight"):
        start(ulp, PassConfig(dp_mode="ddp"))
    torch.manual_seed(rank)
    synced = nn.Linear(4, 4)
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    trainer = GraphTrainer(synced, zoo.square_loss, PassConfig(), device="cpu", sync_module_states=True)
    with trainer.full_params() as model:
        assert torch.equal(model.weight, first.weight)


def two_trainers(rank: int, world: int) -> list[str]:
    """G15: two trainers in one process, steps interleaved, each as if alone."""
    pairs = [small(), small(fsdp_reshard_after_forward=False)]
    alone = small()
    for step in range(3):
        for case, trainer in [*pairs, alone]:
            trainer.train_step(*case.batch(step))
        for _, trainer in [*pairs, alone]:
            trainer.optimizer_step()
    states = [trainer.state_dict()["model"] for _, trainer in [*pairs, alone]]
    return [name for state in states for name in state if not torch.equal(whole(state[name]), whole(states[-1][name]))]
