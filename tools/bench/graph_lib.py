"""What the benchmarks of Graph Mode share: a decoder, eager and graph steps of it, timing in turns, worlds of ranks.

In: sizes. Out: medians and paired ratios. Not a benchmark itself: run graph_step, graph_ranks, graph_delayed,
graph_memory or graph_capture.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_compile import GraphTrainer, PassConfig  # here: gloo groups made before it is imported are refused

Step = Callable[[], torch.Tensor]


class Block(nn.Module):
    """One head of attention without a mask, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x_BSD)).chunk(3, -1)
        weights_BSS = (q @ k.transpose(-1, -2) / x_BSD.shape[-1] ** 0.5).softmax(-1)
        x_BSD = x_BSD + self.out(weights_BSS @ v)
        return x_BSD + self.down(F.gelu(self.up(self.norm2(x_BSD))))


class Decoder(nn.Module):
    """Embedding, equal blocks in a ModuleList (each is a unit), head."""

    def __init__(self, layers: int, width: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.embed(ids_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(x_BSD)


@dataclass(frozen=True)
class Work:
    """What one step computes."""

    layers: int
    width: int
    vocab: int
    rows: int
    length: int

    def model(self) -> Decoder:
        torch.manual_seed(0)
        return Decoder(self.layers, self.width, self.vocab)

    def batch(self, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(rank)
        ids = torch.randint(self.vocab, (self.rows, self.length + 1), generator=draw)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def __str__(self) -> str:
        return f"{self.layers} blocks, width {self.width}, batch {self.rows} × {self.length}"


def train_fn(model: nn.Module, ids_BS: torch.Tensor, next_BS: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids_BS).flatten(0, 1), next_BS.flatten())


# ---- contestants: forward, backward and reduction; gradients stand on the parameters afterwards ----------------


def eager_step(model: nn.Module, batch: tuple[Any, Any]) -> Step:
    def step() -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        loss = train_fn(model, *batch)
        loss.backward()
        return loss.detach()

    step.model = model  # type: ignore[attr-defined]
    return step


def fsdp2_step(model: nn.Module, batch: tuple[Any, Any], mesh: Any, *, async_unshard: bool = False) -> Step:
    """FSDP2 on the units that GraphTrainer takes without a plan: every block, and the root."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if async_unshard:
        model._set_unshard_async_op(True)  # by default FSDP2 blocks in every gather on CPU
    return eager_step(model, batch)


def graph_step(model: nn.Module, batch: tuple[Any, Any], **options: Any) -> Step:
    trainer = GraphTrainer(model, train_fn, PassConfig(**options), device="cpu")

    def step() -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        return trainer.train_step(*batch)

    step.model = model  # type: ignore[attr-defined]
    step.trainer = trainer  # type: ignore[attr-defined]
    return step


def distributed_contestants(work: Work, mesh: Any, rank: int) -> dict[str, Step]:
    model, batch = work.model(), work.batch(rank)
    return {
        "fsdp2": fsdp2_step(copy.deepcopy(model), batch, mesh),
        "fsdp2, async unshard": fsdp2_step(copy.deepcopy(model), batch, mesh, async_unshard=True),
        "graph": graph_step(copy.deepcopy(model), batch),
        "graph, overlap off": graph_step(model, batch, enable_overlap=False),
    }


def check_equal(steps: dict[str, Step]) -> None:
    """All contestants give one loss and one set of gradients, bit for bit: the times are of the same work."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, step in steps.items():
        loss = step()
        grads = [parameter.grad for parameter in step.model.parameters()]  # type: ignore[attr-defined]
        found[name] = [loss, *(grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads)]
    first, *others = found
    for name in others:
        if not all(torch.equal(a, b) for a, b in zip(found[first], found[name], strict=True)):
            raise SystemExit(f"{name!r} and {first!r} differ in loss or gradients; their times cannot be compared")


# ---- timing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    wall: list[float]
    cpu: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.wall)


def in_turns(steps: dict[str, Step], turns: int, warmup: int = 2) -> dict[str, Times]:
    """Each turn times every contestant once, in alternating order: a busy machine is busy for all of them."""
    times = {name: Times([], []) for name in steps}
    for turn in range(turns + warmup):
        names = list(steps) if turn % 2 else list(reversed(steps))
        for name in names:
            _barrier()
            start, worked = time.perf_counter(), time.process_time()
            steps[name]()
            _barrier()
            if turn >= warmup:
                times[name].wall.append(time.perf_counter() - start)
                times[name].cpu.append(time.process_time() - worked)
    return times


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def paired_ratio(times: dict[str, Times], name: str, base: str, field: str = "wall") -> float:
    """Median over turns of the ratio within a turn."""
    mine, theirs = getattr(times[name], field), getattr(times[base], field)
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def show(title: str, times: dict[str, Times], base: str, goal: tuple[str, float] | None = None) -> None:
    """A line per contestant; then whether the goal (a contestant and its largest ratio) is met."""
    turns = len(times[base].wall)
    print(f"{title}   ({turns} turns; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)")
    for name, found in times.items():
        wall, cpu = paired_ratio(times, name, base), paired_ratio(times, name, base, "cpu")
        print(
            f"  {name:22s} median {found.median * 1e3:9.2f} ms wall {statistics.median(found.cpu) * 1e3:9.2f} ms cpu"
            f"   paired ratio to {base}: wall {wall:.3f}  cpu {cpu:.3f}"
        )
    if goal is not None:
        judge(goal[0], paired_ratio(times, goal[0], base), goal[1], base)


def judge(name: str, ratio: float, most: float, base: str) -> None:
    print(
        f"  → {name} / {base} = {ratio:.3f}; goal at most {most:.2f}: {'met' if ratio <= most else 'NOT met'}",
        flush=True,
    )


# ---- worlds ---------------------------------------------------------------------------------------------------


def in_world(function: Callable[..., None], world: int, *args: Any) -> None:
    """`function(rank, world, *args)` on every rank, each with one thread; it makes its own process group.

    The first rank that fails ends the others, which may wait for it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "graph_lib"])
    # Here, so that the system picks a port which nobody can take before the ranks come.
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(target=_rank_main, args=(function, rank, world, store.port, args), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    while running := [process for process in ranks if process.exitcode is None]:
        connection.wait([process.sentinel for process in running])
        if any(process.exitcode for process in ranks):
            break
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.terminate()
        process.join()
    if any(codes):
        raise SystemExit(f"exit codes by rank: {codes} (None: ended because another had failed)")


def _rank_main(function: Callable[..., None], rank: int, world: int, port: int, args: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")  # all are clients
    torch.set_num_threads(1)
    function(rank, world, *args)
    dist.barrier()
    dist.destroy_process_group()
