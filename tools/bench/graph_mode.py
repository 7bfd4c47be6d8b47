"""Benchmarks of hp-compile's Graph Mode, all as ratios measured in one run (medians, interleaved).

    python tools/bench/graph_mode.py step            one process against plain eager
    python tools/bench/graph_mode.py ranks           8 gloo ranks against eager FSDP2, same units
    python tools/bench/graph_mode.py delayed         2 ranks whose collectives take a set time without the CPU
    python tools/bench/graph_mode.py memory          peak live bytes against eager FSDP2, 8 equal blocks
    python tools/bench/graph_mode.py capture         capture and passes, by number of layers; with --titan against
                                                     torchtitan's tracer alone (a checkout or an installed package)

In: nothing. Out: a line per measurement, last the ratio. Needs torch and hp-compile, nothing else of ours.
"""

from __future__ import annotations

import argparse
import copy
import gc
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out(weights @ v)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int, width: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train_fn(model: nn.Module, input: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(input).flatten(0, 1), label.flatten())


def batch(vocab: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(vocab, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def fsdp2(model: nn.Module, mesh: Any, *, asynchronous: bool = False) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if asynchronous:
        model._set_unshard_async_op(True)
    return model


def graph_step(model: nn.Module, input: Any, label: Any, **options: Any) -> Callable[[], None]:
    from hp_compile import GraphTrainer, PassConfig

    trainer = GraphTrainer(model, train_fn, PassConfig(**options), device="cpu")

    def step() -> None:
        trainer.train_step(input, label)
        for parameter in model.parameters():
            parameter.grad = None

    step()
    return step


def eager_step(model: nn.Module, input: Any, label: Any) -> Callable[[], None]:
    def step() -> None:
        train_fn(model, input, label).backward()
        for parameter in model.parameters():
            parameter.grad = None

    step()
    return step


def interleaved(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, tuple[float, float]]:
    """Median wall and CPU seconds of each, taken in turns so that a busy machine is busy for all."""
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 2):
        for name, step in steps.items():
            if dist.is_initialized():
                dist.barrier()
            start, worked = time.perf_counter(), time.process_time()
            step()
            if dist.is_initialized():
                dist.barrier()
            if turn >= 2:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - worked)
    return {name: (statistics.median(wall[name]), statistics.median(cpu[name])) for name in steps}


def show(title: str, times: dict[str, tuple[float, float]], base: str) -> None:
    print(title)
    for name, (wall, cpu) in times.items():
        ratio = f"wall {wall / times[base][0]:.3f}  cpu {cpu / times[base][1]:.3f}"
        print(f"  {name:28s} {wall * 1e3:9.2f} ms wall {cpu * 1e3:9.2f} ms cpu   ratio to {base}: {ratio}")


# ---- one process ----


def bench_step(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for width, rows, length in ((64, 2, 32), (256, 4, 64)):
        torch.manual_seed(0)
        model = Model(4, width, 512)
        eager = copy.deepcopy(model)
        input, label = batch(512, rows, length)
        steps = {"eager": eager_step(eager, input, label), "graph": graph_step(model, input, label)}
        show(f"step, 1 process, width {width}", interleaved(steps, arguments.repeats), "eager")


# ---- many processes ----


def in_world(function: Callable[..., Any], world: int, *args: Any) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_rank, args=(function, rank, world, port, args), daemon=True) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"a rank failed: {[process.exitcode for process in processes]}")


def _rank(function: Callable[..., Any], rank: int, world: int, port: int, args: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    function(rank, world, *args)
    dist.destroy_process_group()


def _ranks(rank: int, world: int, repeats: int, width: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Model(6, width, 512)
    input, label = batch(512, 2, 32)
    steps = {
        "fsdp2": eager_step(fsdp2(copy.deepcopy(model), mesh), input, label),
        "fsdp2 async unshard": eager_step(fsdp2(copy.deepcopy(model), mesh, asynchronous=True), input, label),
        "graph": graph_step(copy.deepcopy(model), input, label),
        "graph, overlap off": graph_step(model, input, label, enable_overlap=False),
    }
    times = interleaved(steps, repeats)
    if rank == 0:
        show(f"step, {world} ranks gloo, fsdp, width {width}", times, "fsdp2")


def bench_ranks(arguments: argparse.Namespace) -> None:
    in_world(_ranks, arguments.world, arguments.repeats, arguments.width)


# ---- collectives that take a set time ----


class DelayedWork(dist.Work):
    """Done when the real work is done and its time on the wire has passed; waiting sleeps."""

    def __init__(self, inner: Any, until: float) -> None:
        super().__init__()
        self.inner, self.until = inner, until

    def wait(self, timeout: timedelta = timedelta(seconds=0)) -> bool:
        self.inner.wait()
        left = self.until - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return True

    def is_completed(self) -> bool:
        return self.inner.is_completed() and time.perf_counter() >= self.until

    def get_future(self) -> Any:
        return self.inner.get_future()


class DelayedGroup(dist.ProcessGroup):
    """Forwards to gloo. Collectives queue on one wire: each starts when the one before has passed."""

    seconds_per_byte = 0.0
    spent = 0.0

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # A whole group, since the backend alone does not show its coalesced collectives to Python.
        self.gloo = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.gloo._set_default_backend(kind)
        self.gloo._register_backend(torch.device("cpu"), kind, backend)
        self._free_at = 0.0

    # The base class keeps the name in its backends, and this group has none.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getBackendName(self) -> str:  # torch's own spelling
        return "delayed"

    def _delayed(self, work: Any, nbytes: int) -> DelayedWork:
        cost = nbytes * DelayedGroup.seconds_per_byte
        DelayedGroup.spent += cost
        self._free_at = max(self._free_at, time.perf_counter()) + cost
        return DelayedWork(work, self._free_at)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        work = self.gloo.allgather_into_tensor_coalesced(outputs, inputs, opts or dist.AllgatherOptions())
        return self._delayed(work, sum(output.nbytes for output in outputs))

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        work = self.gloo.reduce_scatter_tensor_coalesced(outputs, inputs, opts or dist.ReduceScatterOptions())
        return self._delayed(work, sum(value.nbytes for value in inputs))

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        work = self.gloo._allgather_base(output, input, opts or dist.AllgatherOptions())
        return self._delayed(work, output.nbytes)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        work = self.gloo._reduce_scatter_base(output, input, opts or dist.ReduceScatterOptions())
        return self._delayed(work, input.nbytes)

    _reduce_scatter_base = reduce_scatter_single

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self.gloo.allreduce(tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        work = self.gloo.allreduce_coalesced(tensors, opts or dist.AllreduceCoalescedOptions())
        return self._delayed(work, sum(tensor.nbytes for tensor in tensors))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.gloo.allgather(outputs, inputs, opts or dist.AllgatherOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self.gloo.broadcast(tensors, opts or dist.BroadcastOptions())

    def barrier(self, opts: Any = None) -> Any:
        return self.gloo.barrier(opts or dist.BarrierOptions())


def _make_delayed(store: Any, rank: int, size: int, timeout: timedelta) -> DelayedGroup:
    return DelayedGroup(store, rank, size, timeout)


def _delayed(rank: int, world: int, repeats: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    dist.Backend.register_backend("delayed", _make_delayed, devices=["cpu"])
    dist.init_process_group("cpu:delayed", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Model(8, 192, 512)
    input, label = batch(512, 2, 64)
    # A float: the wire's speed is set per ratio below, after compute has been measured without it.
    steps = {
        "fsdp2": eager_step(fsdp2(copy.deepcopy(model), mesh), input, label),
        "fsdp2 async unshard": eager_step(fsdp2(copy.deepcopy(model), mesh, asynchronous=True), input, label),
        "graph": graph_step(copy.deepcopy(model), input, label),
        "graph, overlap off": graph_step(model, input, label, enable_overlap=False),
    }
    alone = interleaved({"fsdp2": steps["fsdp2"]}, repeats)["fsdp2"][0]
    DelayedGroup.seconds_per_byte, DelayedGroup.spent = 1e-12, 0.0
    steps["fsdp2"]()
    nbytes = DelayedGroup.spent / 1e-12
    for factor in (0.5, 2.0):
        agreed = torch.tensor(factor * alone / nbytes, dtype=torch.float64)
        dist.broadcast(agreed, 0)
        DelayedGroup.seconds_per_byte = float(agreed)
        times = interleaved(steps, repeats)
        if rank == 0:
            show(f"{world} ranks, delays totalling {factor} × compute ({alone * 1e3:.1f} ms)", times, "fsdp2")


def bench_delayed(arguments: argparse.Namespace) -> None:
    in_world(_delayed, 2, arguments.repeats)


# ---- memory ----


def peak_bytes(step: Callable[[], None], model: nn.Module) -> int:
    from torch.distributed._tools.mem_tracker import MemTracker

    gc.collect()
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        step()
    return max(entry["Total"] for entry in tracker.get_tracker_snapshot("peak").values())


def _memory(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    width, rows, length = 192, 2, 96
    model = Model(8, width, 256)
    input, label = batch(256, rows, length)
    made = {
        "fsdp2": (lambda m: eager_step(fsdp2(m, mesh), input, label), {}),
        "graph": (lambda m: graph_step(m, input, label), {}),
        "graph, overlap off": (lambda m: graph_step(m, input, label, enable_overlap=False), {}),
    }
    peaks = {}
    for name, (make, _) in made.items():
        own = copy.deepcopy(model)
        step = make(own)
        peaks[name] = peak_bytes(step, own)
        del step, own
    if rank == 0:
        whole = sum(parameter.nbytes for parameter in model.parameters())
        print(f"peak live bytes of a step, {world} ranks, 8 blocks, {whole / 2**20:.2f} MiB of parameters")
        for name, peak in peaks.items():
            print(f"  {name:28s} {peak / 2**20:9.3f} MiB   ratio to fsdp2: {peak / peaks['fsdp2']:.3f}")


def bench_memory(arguments: argparse.Namespace) -> None:
    in_world(_memory, 2)


# ---- capture ----


def bench_capture(arguments: argparse.Namespace) -> None:
    from hp_compile import GraphTrainer, PassConfig, trace_model_graph

    torch.set_num_threads(1)
    titan = None
    if arguments.titan:
        sys.path.insert(0, arguments.titan)
        from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer as titan
    for layers in (2, 8, 32, 128):
        model = Model(layers, 32, 64)
        input, label = batch(64, 2, 8)
        trace_model_graph(model, train_fn, input, label)
        start = time.process_time()
        GraphTrainer(model, train_fn, PassConfig(), device="cpu").compile(input, label)
        ours = time.process_time() - start
        line = f"capture and passes, {layers:3d} layers: {ours:7.3f} s cpu, {ours / layers * 1e3:7.2f} ms per layer"
        if titan is not None:

            def step(input: Any, label: Any, model: nn.Module = model) -> Any:
                loss = train_fn(model, input, label)
                return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

            start = time.process_time()
            titan(step, model)(input, label)
            theirs = time.process_time() - start
            line += f"; torchtitan's tracer alone {theirs:7.3f} s, ratio {ours / theirs:.3f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "ranks", "delayed", "memory", "capture"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--titan", help="folder of a torchtitan checkout, for `capture`")
    arguments = parser.parse_args()
    globals()[f"bench_{arguments.what}"](arguments)


if __name__ == "__main__":
    main()
