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


# ---- checkpoints ----


def flat_state(state: dict[str, Any]) -> dict[str, Any]:
    """Whole tensors by path: what must be equal on any number of ranks."""
    found = {f"model.{name}": whole(value).clone() for name, value in state["model"].items()}
    for name, values in state["optimizer"]["state"].items():
        for key, value in values.items():
            found[f"{name}.{key}"] = whole(value).clone()
    return found


def train_and_save(rank: int, world: int, name: str, folder: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    case = zoo.build(name)
    trainer = GraphTrainer(case.model, case.train_fn, PassConfig(), optimizer_config={"lr": 1e-2}, device="cpu")
    for step in range(3):
        trainer.train_step(*case.batch(2 * (10 * step + rank)))
        trainer.optimizer_step()
    dcp.save({"trainer": trainer}, checkpoint_id=folder)
    state = flat_state(trainer.state_dict())
    if rank == 0:
        torch.save(state, f"{folder}/whole.pt")
    return {}


def load_and_go_on(rank: int, world: int, name: str, folder: str) -> list[str]:
    """A fresh process, not compiled yet, resumes; it then trains like one that got the same values by hand."""
    import torch.distributed.checkpoint as dcp

    saved = torch.load(f"{folder}/whole.pt")
    trainers = []
    for by_hand in (False, True):
        case = zoo.build(name, seed=7)
        trainer = GraphTrainer(case.model, case.train_fn, PassConfig(), optimizer_config={"lr": 1e-2}, device="cpu")
        if by_hand:
            state = trainer.state_dict()
            state["model"] = {fqn: saved[f"model.{fqn}"] for fqn in state["model"]}
            state["optimizer"]["state"] = {
                fqn: {key: saved[f"{fqn}.{key}"] for key in values}
                for fqn, values in state["optimizer"]["state"].items()
            }
            trainer.load_state_dict(state)
        else:
            dcp.load({"trainer": trainer}, checkpoint_id=folder)
        trainers.append((case, trainer))
    loaded = flat_state(trainers[0][1].state_dict())
    wrong = [f"loaded {key}" for key, value in saved.items() if not torch.equal(loaded[key], value)]
    wrong += [] if set(loaded) == set(saved) else [f"{set(loaded) ^ set(saved)}"]
    for step in range(2):
        losses = []
        for case, trainer in trainers:
            torch.manual_seed(step)
            losses.append(trainer.train_step(*case.batch(2 * step)))
            trainer.optimizer_step()
        wrong += [] if torch.equal(*losses) else [f"loss {step}"]
    first, second = (flat_state(trainer.state_dict()) for _, trainer in trainers)
    return wrong + [f"after {key}" for key in first if not torch.equal(first[key], second[key])]


def misfits(rank: int, world: int) -> None:
    """A state that does not fit changes nothing and is named."""
    _, trainer = small()
    good = trainer.state_dict()
    before = flat_state(good)
    with raises(ValueError, "missing ['norm.weight']"):
        trainer.load_state_dict({**good, "model": {k: v for k, v in good["model"].items() if k != "norm.weight"}})
    with raises(ValueError, "unexpected ['more']"):
        trainer.load_state_dict({**good, "model": {**good["model"], "more": torch.ones(1)}})
    with raises(ValueError, "'norm.weight'", "(17,)", "(16,)"):
        trainer.load_state_dict({**good, "model": {**good["model"], "norm.weight": torch.ones(17)}})
    with raises(ValueError, "parameter groups"):
        trainer.load_state_dict({**good, "optimizer": {**good["optimizer"], "param_groups": []}})
    with raises(ValueError, "{'model': ..., 'optimizer': ...}"):
        trainer.load_state_dict({"model": {}})
    after = flat_state(trainer.state_dict())
    assert all(torch.equal(before[key], after[key]) for key in before)


def model_state_round_trip(rank: int, world: int) -> None:
    """`model.state_dict()` and `model.load_state_dict` speak DTensors and whole tensors."""
    case, trainer = small()
    trainer.train_step(*case.batch(0))
    trainer.optimizer_step()
    kept = {name: whole(value).clone() for name, value in case.model.state_dict().items()}
    other, other_trainer = small()
    _ = other_trainer.optimizer
    other.model.load_state_dict(case.model.state_dict())
    assert all(torch.equal(whole(v), kept[k]) for k, v in other.model.state_dict().items())
    third, third_trainer = small()
    _ = third_trainer.optimizer
    third.model.load_state_dict(kept)
    assert all(torch.equal(whole(v), kept[k]) for k, v in third.model.state_dict().items())


def on_meta(rank: int, world: int) -> None:
    """A model on meta is sharded, then drawn alike on every layout; what cannot be drawn must be loaded."""
    torch.manual_seed(3)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    trainer = GraphTrainer(model, zoo.square_loss, PassConfig(), device="cpu")
    loss = trainer.train_step(torch.ones(2, 5), None)
    assert torch.isfinite(loss)
    values = {name: whole(value) for name, value in model.state_dict().items()}
    assert all(not value.is_meta for value in values.values())
    assert values["0.weight"].std() > 0
    with torch.device("meta"):
        own = zoo.Decoder()
    blank = GraphTrainer(own, zoo.token_loss, PassConfig(), device="cpu")
    batch = zoo._tokens(32)(0)
    with raises(RuntimeError, "layers.0.norm1.weight", "load_state_dict"):
        blank.train_step(*batch)
    _, filled = small()
    blank.load_state_dict(filled.state_dict())
    assert torch.equal(blank.train_step(*batch), filled.train_step(*batch))

    class Turned(nn.Linear):
        """A buffer that is in no state, like the frequencies of a rotary embedding, and drawn the old way."""

        def __init__(self) -> None:
            super().__init__(4, 4, bias=False)
            self.register_buffer("freq", torch.arange(4.0), persistent=False)

        def reset_parameters(self) -> None:
            self.weight.data.normal_()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.freq)

    with torch.device("meta"):
        turned = Turned()
    lacking = GraphTrainer(turned, zoo.square_loss, PassConfig(), device="cpu")
    whole_state = {name: torch.ones(4, 4) for name in ("weight",)}
    for load in (False, True):
        if load:
            lacking.load_state_dict({**lacking.state_dict(), "model": whole_state})
        with raises(RuntimeError, "['freq']", "nothing has filled them"):
            lacking.train_step(torch.ones(2, 4), None)
    turned.freq.copy_(torch.arange(4.0))
    real = Turned()
    nn.init.ones_(real.weight)
    expected = zoo.square_loss(real, torch.ones(2, 4), None)
    assert torch.equal(lacking.train_step(torch.ones(2, 4), None), expected)


# ---- meshes ----


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


# ---- memory and schedule ----


class _Block(nn.Module):
    """Its weight is read through a view, which backward reads too: saved, it keeps the first gather alive."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(2, width, width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, gate = torch.nn.functional.linear(x, self.both.view(-1, x.shape[-1])).chunk(2, -1)
        return x + y * gate.sigmoid()


class _Blocks(nn.Module):
    """Equal blocks in the middle, a small root around them."""

    def __init__(self, width: int = 96, count: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(width) for _ in range(count))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _peak(step: Any, model: nn.Module, *others: Any) -> int:
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, *others)
    with tracker:
        step()
    return max(entry["Total"] for entry in tracker.get_tracker_snapshot("peak").values())


def peaks(rank: int, world: int) -> dict[str, int]:
    """Peak live bytes of a step: eager FSDP2, and the graph with the overlap pass on and off, and without reshard."""
    torch.manual_seed(0)
    model = _Blocks()
    x = torch.randn(8, 96)

    def own_step(trainer: GraphTrainer) -> None:
        trainer.train_step(x, None)
        for parameter in trainer.model.parameters():
            parameter.grad = None

    def fsdp_step(eager: nn.Module) -> None:
        zoo.square_loss(eager, x, None).backward()
        eager.zero_grad()

    eager = eager_reference(copy.deepcopy(model), PassConfig(), world)
    fsdp_step(eager)
    found = {"eager": _peak(lambda: fsdp_step(eager), eager)}
    for name, options in (
        ("graph", {}),
        ("overlap off", {"enable_overlap": False}),
        ("reshard off", {"fsdp_reshard_after_forward": False}),
    ):
        trainer = GraphTrainer(copy.deepcopy(model), zoo.square_loss, PassConfig(**options), device="cpu")
        own_step(trainer)
        found[name] = _peak(lambda trainer=trainer: own_step(trainer), trainer.model)
    blocks = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in model.layers]
    whole_bytes = sum(parameter.nbytes for parameter in model.parameters())
    found.update(unit=blocks[0], whole=whole_bytes, root=whole_bytes - sum(blocks))
    return found


def schedule(rank: int, world: int) -> dict[str, Any]:
    """Positions of launches, waits and first readers in a training graph, with and without the overlap pass."""
    found: dict[str, Any] = {}
    for overlap in (True, False):
        case, trainer = small(enable_overlap=overlap)
        trainer.train_step(*case.batch(0))
        nodes = list(trainer.graph_module.graph.nodes)
        order = {node: at for at, node in enumerate(nodes)}
        buckets: dict[int, dict[str, Any]] = {}
        for node in nodes:
            tag = node.meta.get("hp_comm")
            if tag is None:
                continue
            entry = buckets.setdefault(tag.bucket, {"kind": tag.kind, "unit": tag.unit, "region": tag.region})
            entry.setdefault(tag.stage, order[node])
            if tag.stage == "wait":
                entry["last_wait"] = order[node]
                entry.setdefault("reader", min(order[user] for user in node.users))
        found[str(overlap)] = sorted(buckets.values(), key=lambda entry: entry["launch"])
    return found
