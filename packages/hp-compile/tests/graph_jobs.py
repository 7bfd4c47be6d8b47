"""What ranks do in tests: the graph trainer beside an eager reference that knows nothing of it.

In: a case name and options. Out: a list of differences, empty if every bit is the same.
"""

from __future__ import annotations

import contextlib
import copy
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


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def compare_with_eager(
    rank: int, world: int, name: str, options: dict[str, Any], steps: int = 5, accumulation: int = 1,
    clip: float | None = None,
) -> list[str]:
    """Train both, each rank on its own batches, and list every difference."""
    config = PassConfig(**options)
    case = zoo.build(name)
    eager = eager_reference(copy.deepcopy(case.model), config, world)
    scalars = [parameter for parameter in eager.parameters() if not isinstance(parameter, DTensor)]
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
    """Several comparisons in one world; what raises is reported under its own name."""
    found = {}
    for name, options, *rest in jobs:
        extra = rest[0] if rest else {}
        found[f"{name} {options} {extra}"] = compare_with_eager(rank, world, name, options, **extra)
    return {key: value for key, value in found.items() if value}


@contextlib.contextmanager
def raises(kind: type[BaseException], *parts: str):
    """Like pytest.raises, for ranks."""
    try:
        yield
    except kind as error:
        for part in parts:
            assert part in str(error), f"{part!r} is not in {error}"
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
