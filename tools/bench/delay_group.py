"""A process group whose collectives take a set time without using the CPU (G21), to measure what is overlapped.

In: seconds per byte and per collective. Out: a backend "delay" for torch.distributed: every collective runs over gloo
and is done only when its time on a simulated wire has passed; waiting sleeps. One wire per group: a collective
starts when the one before it has passed, as on a network card. Barriers and objects are not delayed.

    python tools/bench/delay_group.py        checks the group itself: results, time, CPU
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Wire:
    """Set on all ranks alike. `busy` and `launched` count what has been sent since they were last set to 0."""

    seconds_per_byte = 0.0
    seconds_per_collective = 0.0
    busy = 0.0
    nbytes = 0
    launched = 0


class DelayedWork(dist.Work):
    """Done when the real work is done and its time on the wire has passed."""

    def __init__(self, inner: Any, until: float) -> None:
        super().__init__()
        self._inner, self._until = inner, until

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._inner.wait()
        left = self._until - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return True

    def is_completed(self) -> bool:
        return self._inner.is_completed() and time.perf_counter() >= self._until

    def get_future(self) -> Any:
        return self._inner.get_future()


class DelayGroup(dist.ProcessGroup):
    """Functional collectives arrive at the `*_coalesced` methods, FSDP2's at the `*_single` ones."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # A whole group: gloo's backend alone does not show its coalesced collectives to Python.
        self._gloo = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._gloo._set_default_backend(kind)
        self._gloo._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size, timeout))
        self._free_at = 0.0

    # torch asks a group for these; the base class keeps them in its backends, and this group has none.
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

    def getBackendName(self) -> str:
        return "delay"

    def _on_the_wire(self, work: Any, nbytes: int) -> DelayedWork:
        cost = nbytes * Wire.seconds_per_byte + Wire.seconds_per_collective
        Wire.busy += cost
        Wire.nbytes += nbytes
        Wire.launched += 1
        self._free_at = max(self._free_at, time.perf_counter()) + cost
        return DelayedWork(work, self._free_at)

    # ---- what Graph Mode issues ----

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        work = self._gloo.allgather_into_tensor_coalesced(outputs, inputs, opts or dist.AllgatherOptions())
        return self._on_the_wire(work, sum(output.nbytes for output in outputs))

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        work = self._gloo.reduce_scatter_tensor_coalesced(outputs, inputs, opts or dist.ReduceScatterOptions())
        return self._on_the_wire(work, sum(value.nbytes for value in inputs))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        work = self._gloo.allreduce_coalesced(tensors, opts or dist.AllreduceCoalescedOptions())
        return self._on_the_wire(work, sum(tensor.nbytes for tensor in tensors))

    # ---- what FSDP2 issues ----

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        work = self._gloo._allgather_base(output, input, opts or dist.AllgatherOptions())
        return self._on_the_wire(work, output.nbytes)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        work = self._gloo._reduce_scatter_base(output, input, opts or dist.ReduceScatterOptions())
        return self._on_the_wire(work, input.nbytes)

    _reduce_scatter_base = reduce_scatter_single

    # ---- both, and torch itself ----

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        work = self._gloo.allreduce(tensors, opts or dist.AllreduceOptions())
        return self._on_the_wire(work, sum(tensor.nbytes for tensor in tensors))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._gloo.allgather(outputs, inputs, opts or dist.AllgatherOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._gloo.broadcast(tensors, opts or dist.BroadcastOptions())

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier(opts or dist.BarrierOptions())


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> DelayGroup:
    return DelayGroup(store, rank, size, timeout)


def init_delay_group(rank: int, world: int) -> None:
    """Make the world's default process group a delaying one."""
    dist.Backend.register_backend("delay", _make, devices=["cpu"])
    dist.init_process_group("cpu:delay", rank=rank, world_size=world)


# ---- the check ------------------------------------------------------------------------------------------------


def _check(rank: int, world: int) -> None:
    init_delay_group(rank, world)
    functional = torch.ops._c10d_functional
    group = dist.group.WORLD.group_name
    shard = torch.full((1 << 18,), float(rank))
    Wire.seconds_per_byte = 0.1 / (world * shard.nbytes)  # 0.1 s for one gather of everybody's shard
    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    first = functional.all_gather_into_tensor(shard, world, group)
    second = functional.reduce_scatter_tensor(torch.ones(world * shard.numel()), "sum", world, group)
    launched = time.perf_counter() - start
    first, second = functional.wait_tensor(first), functional.wait_tensor(second)
    took, used = time.perf_counter() - start, time.process_time() - worked
    assert torch.equal(first, torch.arange(float(world)).repeat_interleave(shard.numel())), "gathered values"
    assert torch.equal(second, torch.full_like(shard, float(world))), "reduced values"
    assert Wire.launched == 2, f"{Wire.launched} collectives seen"
    assert 0.19 < Wire.busy < 0.21, f"{Wire.busy:.3f} s on the wire"
    assert took >= 0.19, f"two collectives on one wire took {took:.3f} s"
    assert launched < 0.1, f"launching took {launched:.3f} s: it waited"
    if rank == 0:
        print(f"2 collectives of 0.1 s: launched in {launched:.3f} s, done in {took:.3f} s, {used:.3f} s of CPU: good")


def main() -> None:
    from graph_lib import in_world

    in_world(_check, 2)


if __name__ == "__main__":
    main()
