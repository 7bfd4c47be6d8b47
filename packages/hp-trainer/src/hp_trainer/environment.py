"""The processes of a run: device, process group, meshes, determinism, and how ranks agree on faults.

In: the trainer's config and what torchrun put into the process environment. Out: an `Environment` that the later
steps read ranks, device and meshes from.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hp_protocols.distributed import ParallelDims, SequenceAxis
from hp_protocols.errors import ConfigError, Fault
from hp_protocols.platform import get_platform
from hp_trainer._torch_compat import set_collective_timeout
from hp_trainer.faults.activity import activity
from hp_trainer.faults.joining import join
from hp_trainer.faults.watch import Watch

if TYPE_CHECKING:
    from hp_config import CommConfig, DebugConfig, ParallelismConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Environment:
    """This process's place in the run. `dp_rank` counts the ranks that read different data."""

    platform: Any
    device: torch.device
    rank: int
    world_size: int
    parallel_dims: ParallelDims
    watch: Watch | None = None
    """Answers for this rank and finds out about others; None in a run of one process."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def dp_degree(self) -> int:
        return self.parallel_dims.batch

    @property
    def dp_rank(self) -> int:
        mesh = self.parallel_dims.get_optional_mesh("batch")
        return 0 if mesh is None else mesh.get_local_rank()

    @property
    def sequence_axis(self) -> SequenceAxis | None:
        """The ranks that share each row, this one among them (context parallelism); None: a rank has whole rows."""
        mesh = self.parallel_dims.get_optional_mesh("cp")
        return None if mesh is None else SequenceAxis(mesh)

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` in place over the ranks that saw different tokens; every rank gets the same bits."""
        mesh = self.parallel_dims.get_optional_mesh("loss")
        if mesh is not None:
            self.platform.all_reduce(tensor, group=mesh.get_group())
        return tensor

    @property
    def ranks_per_batch(self) -> int:
        """Ranks that compute the loss of the same tokens (they share the weights of a layer or its stages)."""
        return self.world_size // self.parallel_dims.loss

    def sum_over_world(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` in place over all ranks."""
        if self.world_size > 1:
            self.platform.all_reduce(tensor)
        return tensor

    def limit_waiting(self, comm: CommConfig, leave: Any = None, name: str = "comm.train_timeout_seconds") -> None:
        """The first step is done: a collective may take `comm.train_timeout_seconds` from now on. Collective.

        Args:
            leave: a process group that keeps its own limit.
            name: how a message calls the limit.
        """
        seconds = comm.train_timeout_seconds
        set_collective_timeout(timedelta(seconds=seconds), leave=leave)
        if self.watch is not None:
            self.watch.limit_seconds, self.watch.limit_name = seconds, name

    def agree(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if it found faults on any rank, all ranks raise all of them.

        `work` must not communicate. Without this, one rank with a missing file would leave the others waiting.
        """
        result: T | None = None
        found: tuple[Fault, ...] = ()
        try:
            result = work()
        except ConfigError as error:
            found = tuple(error.faults)
        by_fault: dict[Fault, list[int]] = {}
        for rank, faults in enumerate(self.platform.all_gather_object(found)):
            for fault in faults:
                by_fault.setdefault(fault, []).append(rank)
        if by_fault:
            raise ConfigError([self._name_ranks(fault, ranks) for fault, ranks in by_fault.items()])
        return result  # type: ignore[return-value]

    def _name_ranks(self, fault: Fault, ranks: list[int]) -> Fault:
        """Say which ranks found a fault, unless all did, or rank 0, which often looks alone."""
        if len(ranks) == self.world_size or ranks == [0]:
            return fault
        return dataclasses.replace(fault, where=f"rank {', '.join(map(str, ranks))}: {fault.where}")

    def require_same(self, where: str, shown: str, fingerprint: str) -> None:
        """Raise ConfigError if `fingerprint` is not the same on every rank; `shown` describes it to a person."""
        seen: dict[str, list[str]] = {}
        for rank, (text, value) in enumerate(self.platform.all_gather_object((shown, fingerprint))):
            seen.setdefault(value, []).append(f"rank {rank}: {text}")
        if len(seen) > 1:
            differing = "; ".join(ranks[0] for ranks in seen.values())
            hint = "give all machines the same files and the same Python, or a folder that they share"
            raise ConfigError(Fault(where, f"is not the same on every rank ({differing})", hint=hint))

    def main_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone and then on the others, which find in the cache what rank 0 has made."""
        if self.world_size == 1:
            return work()
        result = self.agree(lambda: work() if self.is_main else None)
        return self.agree(lambda: result if self.is_main else work())  # type: ignore[return-value]

    def broadcast(self, value: T) -> T:
        """Rank 0's `value` on every rank."""
        return self.platform.broadcast_object(value, src=0)


def start_environment(
    parallelism: ParallelismConfig, comm: CommConfig, debug: DebugConfig, backend: str | None = None
) -> Environment:
    """Join the process group and build the meshes.

    Args:
        backend: of the process group; None: the device's own.

    Raises:
        ConfigError: the degrees do not multiply to the number of processes.
    """
    platform = get_platform()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    parallel_dims = ParallelDims.from_config(parallelism, world_size)
    device = platform.device(int(os.environ.get("LOCAL_RANK", "0")))
    # Those that do not come are named here, and whatever happens from then on.
    limit = comm.init_timeout_seconds
    watch = Watch(join(limit), limit, "comm.init_timeout_seconds") if world_size > 1 else None
    try:
        platform.init_process_group(timeout=timedelta(seconds=limit), backend=backend)
        activity.withdraw()
    except Exception as error:
        if watch is None:
            raise
        raise watch.explain(error) from error
    # All ranks build the meshes together and now, not when the first of them asks for one.
    parallel_dims.build_meshes()
    set_determinism(debug)
    return Environment(platform, device, platform.rank(), world_size, parallel_dims, watch)


def set_determinism(debug: DebugConfig) -> None:
    """Act on `debug.deterministic` and `debug.detect_anomaly`, for this process."""
    torch.use_deterministic_algorithms(debug.deterministic, warn_only=debug.deterministic_warn_only)
    if debug.deterministic:
        # cuBLAS needs a fixed workspace to repeat its sums in the same order.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.autograd.set_detect_anomaly(debug.detect_anomaly)


def draw_seed() -> int:
    """A fresh seed for a run that gave none."""
    return secrets.randbelow(2**31)


class GarbageSchedule:
    """Collect Python garbage every `every` steps, on all ranks at the same step, so that none waits for another."""

    def __init__(self, every: int) -> None:
        self.every = every

    def __enter__(self) -> GarbageSchedule:
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect(1)
        return self

    def after_step(self, step: int) -> None:
        if step % self.every == 0:
            gc.collect(1)

    def __exit__(self, *exception: object) -> None:
        if self._was_enabled:
            gc.enable()
