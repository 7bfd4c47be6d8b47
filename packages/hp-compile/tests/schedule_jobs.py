"""Random models, plans and passes, scheduled with and without overlap: the order changes, the bits do not.

In: seeds. Out: a list of what is wrong, for each rank.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce

from hp_compile import FSDPModuleConfig, GraphPass, GraphTrainer, PassConfig, PassPlan, insert_call

WIDTH = 6


class SumOverRanks(torch.autograd.Function):
    """A collective of the user's own in forward, as tensor parallelism has it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Piece(nn.Module):
    """A unit: some linear maps, one of them read through a view, a scalar, maybe a sum over ranks."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5) for _ in range(draw.randint(1, 3)))
        self.flat = nn.Parameter(torch.randn(WIDTH * WIDTH) / WIDTH) if draw.random() < 0.4 else None
        self.scale = nn.Parameter(torch.tensor(0.5)) if draw.random() < 0.3 else None
        self.summed = draw.random() < 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.maps:
            x = one(x).tanh()
        if self.flat is not None:
            x = x @ self.flat.view(WIDTH, WIDTH)
        if self.summed:
            x = SumOverRanks.apply(x) / 8
        return x * self.scale if self.scale is not None else x


class Net(nn.Module):
    """Pieces in a random order, some used twice, one tied to another, with connections that skip."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Piece(draw) for _ in range(draw.randint(2, 5)))
        if draw.random() < 0.3:
            self.layers[-1].maps[0].weight = self.layers[0].maps[0].weight
        self.head = nn.Linear(WIDTH, 3)
        self.path = [draw.randrange(len(self.layers)) for _ in range(draw.randint(2, 7))]
        self.skips = [draw.random() < 0.4 for _ in self.path]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, skip in zip(self.path, self.skips, strict=True):
            y = self.layers[at](x)
            x = x + y if skip else y
        return self.head(x)


class Meddling(GraphPass):
    """A user's pass behind fsdp: something before gathers, and something that reads reduced gradients at once."""

    name = "meddling"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def run(self, graph_module: Any, pass_config: Any, **context: Any) -> Any:
        draw, graph = random.Random(self.seed), graph_module.graph
        for node in list(graph.nodes):
            tag = node.meta.get("hp_comm")
            if tag is None:
                continue
            if tag.kind == "all_gather" and node.all_input_nodes[0].op == "placeholder" and draw.random() < 0.5:
                source = node.all_input_nodes[0]
                with graph.inserting_before(node):
                    node.replace_input_with(source, insert_call(graph, torch.ops.aten.mul.Tensor, source, 1.0))
            elif tag.kind != "all_gather" and graph.output_node() in node.users and draw.random() < 0.5:
                with graph.inserting_after(node):
                    doubled = insert_call(graph, torch.ops.aten.mul.Tensor, node, 2.0)
                graph.output_node().replace_input_with(node, doubled)
        return graph_module


def options_of(draw: random.Random, world: int) -> tuple[dict[str, Any], PassPlan | None]:
    mode = draw.choice(["fsdp", "fsdp", "hsdp" if world % 2 == 0 else "fsdp", "ddp"])
    options: dict[str, Any] = {"dp_mode": mode, "bucket_mb": draw.choice([None, None, 0, 0.0002])}
    if mode == "hsdp":
        options["fsdp_degree"] = world // 2
    options["fsdp_reshard_after_forward"] = draw.random() < 0.7
    one = FSDPModuleConfig()
    plan = draw.choice(
        [
            None,
            None,
            PassPlan({}, {"layers.*": one}),
            PassPlan({"head": one, "layers.0": one}, {}),
            PassPlan({"head.weight": one}, {"layers.*.maps": one}),
        ]
    )
    if plan is None and draw.random() < 0.3:
        options.update(param_dtype="bfloat16", reduce_dtype=draw.choice([None, "float32"]))
    return options, plan


def wrong_in_order(nodes: list[Any], places: dict[Any, int]) -> list[str]:
    """Waits between their launches and their first readers; at most two units' gathers on their way."""
    wrong = []
    moments: list[tuple[int, int]] = []
    buckets: dict[int, list[Any]] = {}
    for node in nodes:
        if (tag := node.meta.get("hp_comm")) is not None:
            buckets.setdefault(tag.bucket, []).append(node)
        # A wait of the user's own: behind its launch, before its readers.
        if any(places[user] <= places[node] for user in node.users):
            wrong.append(f"{node} is read before it stands")
    units: dict[tuple[str, str, int], list[int]] = {}
    run, last = 0, None
    for node in nodes:
        tag = node.meta.get("hp_comm")
        if tag is not None and tag.kind == "all_gather" and tag.stage == "launch":
            run += (tag.unit, tag.region) != last
            last = (tag.unit, tag.region)
            units.setdefault((*last, run), []).append(tag.bucket)
    for members in units.values():
        own = [node for bucket in members for node in buckets[bucket]]
        waits = [places[node] for node in own if node.meta["hp_comm"].stage == "wait"]
        moments.append((min(places[node] for node in own if node.meta["hp_comm"].stage == "launch"), min(waits)))
    for start, _ in moments:
        flying = sum(launch <= start < wait for launch, wait in moments)
        if flying > 2:
            wrong.append(f"{flying} units are gathered ahead of use")
    return wrong


def random_schedules(rank: int, world: int, seeds: list[int]) -> list[str]:
    wrong = []
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        model = Net(draw)
        options, plan = options_of(draw, world)
        meddle = draw.random() < 0.5
        found: dict[bool, list[torch.Tensor]] = {}
        for overlap in (True, False):
            mine = copy.deepcopy(model)
            config = PassConfig(enable_overlap=overlap, **options)
            trainer = GraphTrainer(mine, _loss, config, plan, device="cpu", optimizer_config={"lr": 1e-2})
            if meddle:
                trainer.pipeline.insert_after("fsdp", Meddling(seed))
            found[overlap] = []
            for step in range(2):
                x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
                found[overlap].append(trainer.train_step(x, None))
                found[overlap] += [p.grad.clone() for p in mine.parameters() if p.grad is not None]
                trainer.optimizer_step()
            found[overlap].append(trainer.eval_step(x, None))
            nodes = list(trainer.graph_module.graph.nodes)
            places = {node: at for at, node in enumerate(nodes)}
            launches = [
                (tag.kind, tag.unit, tag.region, tag.axis, tag.numel)
                for node in nodes
                if (tag := node.meta.get("hp_comm")) is not None and tag.stage == "launch"
            ]
            everyones: list[Any] = [None] * world
            dist.all_gather_object(everyones, launches)
            if any(other != launches for other in everyones):
                wrong.append(f"seed {seed}: launches in another order")
            if overlap:
                wrong += [f"seed {seed}: {text}" for text in wrong_in_order(nodes, places)]
        if not all(torch.equal(a, b) for a, b in zip(found[True], found[False], strict=True)):
            wrong.append(f"seed {seed}: other bits with overlap ({options}, {plan}, meddling {meddle})")
    return wrong


def _loss(model: nn.Module, x: torch.Tensor, _: None) -> torch.Tensor:
    return model(x).float().square().mean()
