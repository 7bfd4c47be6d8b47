"""Faults that one rank alone meets while a trainer is built: every rank must end with an error that names it.

In: which rank fails. Out: a list of stages in which a rank got another error than it should, or got it late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import graph_zoo as zoo
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_compile import FSDPModuleConfig, GraphPass, GraphTrainer, PassConfig, PassPlan

# Later than this is a hang; a world ends one, too.
SECONDS = 60


class Stumbling(GraphPass):
    name = "stumbling"

    def run(self, graph_module: Any, pass_config: Any, **context: Any) -> Any:
        raise LookupError("the pass found no node")


class Undrawable(nn.Linear):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            raise ArithmeticError("no random numbers here")


def stumble(*_: Any) -> Any:
    raise LookupError("stumbled")


def step(bad: bool, model: Any = None, train_fn: Any = zoo.square_loss, config: Any = None, **options: Any) -> None:
    torch.manual_seed(0)
    start(model or nn.Linear(4, 4), train_fn, config, **options).train_step(torch.ones(2, 4), None)


def start(model: nn.Module, train_fn: Any = zoo.square_loss, config: Any = None, **options: Any) -> GraphTrainer:
    return GraphTrainer(model, train_fn, config or PassConfig(), device="cpu", **options)


def seeded(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, size) for size in sizes))


def strided() -> nn.Module:
    model = seeded(4)
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    return model


def used_before() -> nn.Module:
    model = seeded(4)
    model(torch.ones(2, 4)).sum().backward()
    return model


def with_pass(bad: bool, before: str) -> None:
    trainer = start(seeded(4))
    if bad:
        trainer.pipeline.insert_before(before, Stumbling())
    trainer.train_step(torch.ones(2, 4), None)


def with_hook(bad: bool) -> None:
    trainer = start(seeded(4))
    trainer.set_pytree_pre_hook(stumble if bad else None)
    trainer.train_step(torch.ones(2, 4), None)


def loading(bad: bool) -> None:
    trainer = start(seeded(4))
    state = trainer.state_dict()
    if bad:
        state["model"] = {name: value for name, value in state["model"].items() if name != "0.bias"}
    trainer.load_state_dict(state)


def on_meta(bad: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Undrawable(4, 4) if bad else nn.Linear(4, 4))
    step(bad, model)


def in_a_context(bad: bool, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("x" if bad else "dp",))
    step(bad, mesh_context=SimpleNamespace(device_mesh=mesh))


def stages(world: int) -> list[tuple[str, type[Exception], str, Callable[[bool], None]]]:
    """What fails, the bad rank's own error, what every rank must be told."""
    other_plan = PassPlan({"layer": FSDPModuleConfig()})
    return [
        ("arguments", ValueError, "'momentum'", lambda bad: step(bad, optimizer_config={"momentum": 1} if bad else {})),
        ("plan", ValueError, "'layer'", lambda bad: step(bad, pass_plan=other_plan if bad else None)),
        (
            "degree",
            ValueError,
            f"fsdp_degree={world + 1}",
            lambda bad: step(bad, config=PassConfig(fsdp_degree=world + bad)),
        ),
        ("context", ValueError, "('x',)", lambda bad: in_a_context(bad, world)),
        (
            "settings",
            RuntimeError,
            "grad_reduce='sum'",
            lambda bad: step(bad, config=PassConfig(grad_reduce="sum" if bad else "avg")),
        ),
        ("model", RuntimeError, "'1.weight' (4, 4)", lambda bad: step(bad, seeded(4, 4) if bad else seeded(4))),
        ("strides", ValueError, "strides (1, 4)", lambda bad: step(bad, strided() if bad else seeded(4))),
        (
            "gradients",
            ValueError,
            "0.weight, 0.bias: 2 param",
            lambda bad: step(bad, used_before() if bad else seeded(4)),
        ),
        ("initialisation", ArithmeticError, "no random numbers here", on_meta),
        ("optimizer", LookupError, "stumbled", lambda bad: step(bad, optimizer_factory=stumble if bad else None)),
        ("capture", LookupError, "stumbled", lambda bad: step(bad, train_fn=stumble if bad else zoo.square_loss)),
        ("pass before fsdp", LookupError, "found no node", lambda bad: with_pass(bad, "fsdp")),
        ("pass after fsdp", LookupError, "found no node", lambda bad: with_pass(bad, "auto_overlap")),
        ("hook", LookupError, "stumbled", with_hook),
        ("loading", ValueError, "missing ['0.bias']", loading),
    ]


def told(action: Callable[[], Any], own: bool, kind: type[Exception], text: str, culprit: int) -> str | None:
    """What is wrong with the error that `action` ends in; None if it is as it should be."""
    started = time.monotonic()
    try:
        action()
    except Exception as error:
        said = "\n".join([str(error), *getattr(error, "__notes__", [])])
        if time.monotonic() - started > SECONDS:
            return f"late: {said}"
        wanted = kind if own else RuntimeError
        good = type(error) is wanted and text in said and f"rank {culprit}" in said
        return None if good else f"{type(error).__name__}: {said}"
    return "no error"


def one_rank_fails(rank: int, world: int) -> list[str]:
    """Stage after stage in one world: nothing of a failed build may be left behind for the next one."""
    wrong = []
    for number, (stage, kind, text, action) in enumerate(stages(world)):
        culprit = number % world
        bad = rank == culprit
        # Where ranks differ, the measure is the one that came first, which may be the bad one.
        symmetric = kind is RuntimeError
        found = told(lambda action=action, bad=bad: action(bad), bad, kind, "" if symmetric else text, culprit)
        if found and not (symmetric and text in found):
            wrong.append(f"{stage}: {found}")
    trainer = start(seeded(4))
    trainer.train_step(torch.ones(2, 4), None)
    trainer.optimizer_step()
    return wrong


def one_tensor_parallel_rank_fails(rank: int, world: int) -> list[str]:
    """TP 2 × FSDP 2: ranks outside the culprit's data-parallel group hear of it too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    context = SimpleNamespace(device_mesh=mesh)
    wrong = []
    for culprit, options in (
        (3, {"pass_plan": PassPlan({"layer": FSDPModuleConfig()})}),
        (1, {"optimizer_factory": stumble}),
        (2, {"train_fn": stumble}),
    ):
        bad = rank == culprit
        kind, text = (ValueError, "'layer'") if "pass_plan" in options else (LookupError, "stumbled")

        def action(bad: bool = bad, options: Any = options) -> None:
            step(bad, mesh_context=context, **(options if bad else {}))

        found = told(action, bad, kind, text, culprit)
        wrong += [f"{list(options)}: {found}"] if found else []
    step(False, mesh_context=context)
    return wrong


def loaders_end_apart(rank: int, world: int) -> list[str]:
    """The last rank has a batch less (also none at all), or its loader fails: an error everywhere, never a hang."""
    culprit = world - 1
    batch = (torch.ones(2, 4), None)

    def batches(count: int, fault: bool = False) -> Any:
        yield from [batch] * count
        if fault:
            raise OSError("the disk is gone")

    def loader(count: int, fault: bool) -> Any:
        return batches(count - (rank == culprit), fault and rank == culprit)

    wrong = []
    for count, fault in ((3, False), (1, False), (3, True)):
        kind, text = (OSError, "the disk is gone") if fault else (RuntimeError, f"ended after {count - 1} batches")
        trainer = start(seeded(4))
        found = told(lambda t=trainer, c=count, f=fault: t.train(loader(c, f)), rank == culprit, kind, text, culprit)
        wrong += [f"{count} {fault}: {found}"] if found else []
    trainer = start(seeded(4))
    if len(trainer.train([batch] * 3)) != 3 or len(trainer.train([batch] * (2 + rank), max_steps=2)) != 2:
        wrong.append("even loaders")
    return wrong
