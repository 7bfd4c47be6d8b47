"""Live bytes of a step, and the order of its collectives (G14, G20).

In: nothing. Out: peaks by configuration; a schedule.
"""

from __future__ import annotations

import copy
from typing import Any

import graph_zoo as zoo
import torch
from graph_jobs import eager_reference, small
from torch import nn

from hp_compile import GraphTrainer, PassConfig


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
