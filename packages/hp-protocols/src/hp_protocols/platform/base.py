"""What every backend answers to, and how it refuses what it has not.

In: nothing. Out: `Platform`, the list of all members with their meaning. Each member here raises
`CapabilityError`; a backend overrides what it offers and lists it in `capabilities`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

from .capability import Capability, CapabilityError

__all__ = ["Platform"]

# Attributes that are the backend's own types and modules: name → the capability they belong to.
_TYPES = {
    "Module": Capability.NN,
    "Parameter": Capability.NN,
    "Tensor": Capability.NN,
    "Linear": Capability.NN,
    "Embedding": Capability.NN,
    "nn": Capability.NN,
    "F": Capability.NN,
    "ops": Capability.NN,
    "init": Capability.NN,
    "dtype_map": Capability.DTYPES,
    "DTensor": Capability.DTENSOR,
    "DeviceMesh": Capability.DTENSOR,
    "Placement": Capability.DTENSOR,
    "Shard": Capability.DTENSOR,
    "Replicate": Capability.DTENSOR,
    "Partial": Capability.DTENSOR,
    "init_device_mesh": Capability.DTENSOR,
    "distribute_tensor": Capability.DTENSOR,
    "local_map": Capability.DTENSOR,
}


class Platform:
    """One backend. `get_platform()` returns the one of this process.

    Types and modules, each the backend's own object: `Module, Parameter, Tensor, Linear, Embedding`, the
    namespaces `nn, F, init` and `ops` (tensor functions), `dtype_map` (name → dtype), `DTensor, DeviceMesh,
    Placement, Shard, Replicate, Partial, init_device_mesh, distribute_tensor, local_map`.

    A `device` argument is a device type (`"npu"`, `"cuda"`, `"cpu"`); None means `device_type()`.
    A `group` argument is a process group or a one-axis device mesh; None means the whole world. Every
    collective also works before `init_process_group`, as in a world of one process.
    """

    name: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]] = frozenset()

    def __getattr__(self, attribute: str) -> Any:
        # Reached only for what the backend did not define.
        if attribute in _TYPES:
            self._refuse(attribute, _TYPES[attribute])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(sorted(self.capabilities))})"

    def require(self, capability: Capability, feature: str | None = None) -> None:
        """Raise `CapabilityError` unless the backend offers `capability`."""
        if capability not in self.capabilities:
            self._refuse(feature or capability.value, capability)

    def _refuse(self, feature: str, capability: Capability) -> NoReturn:
        raise CapabilityError(feature, capability, self.name)

    # Devices

    def device_type(self, requested: str | None = None) -> str:
        """The device type to run on: `requested`, else HP_DEVICE, else the first present of npu, cuda, cpu.

        Raises:
            ConfigError: the type that was asked for is unknown or not present.
        """
        self._refuse("device_type", Capability.DEVICES)

    def device(self, local_rank: int | None = None, device: str | None = None) -> Any:
        """The device of this process, made current. `local_rank`: index on the host (default LOCAL_RANK, else 0)."""
        self._refuse("device", Capability.DEVICES)

    def device_count(self, device: str | None = None) -> int:
        """Devices of that type on this host; 1 for the cpu."""
        self._refuse("device_count", Capability.DEVICES)

    def device_name(self, device: str | None = None) -> str:
        """The device's product name; the processor architecture for the cpu."""
        self._refuse("device_name", Capability.DEVICES)

    def synchronize(self, device: str | None = None) -> None:
        """Wait until the device has done all queued work; nothing to do on the cpu."""
        self._refuse("synchronize", Capability.DEVICES)

    def empty_cache(self, device: str | None = None) -> None:
        """Give cached device memory back; nothing to do on the cpu."""
        self._refuse("empty_cache", Capability.DEVICES)

    def memory_stats(self, device: str | None = None) -> Mapping[str, Any] | None:
        """The allocator's counters; None on the cpu (a process's RSS is not device memory)."""
        self._refuse("memory_stats", Capability.DEVICES)

    def max_memory(self, device: str | None = None) -> int | None:
        """Peak bytes allocated on the device since the last reset; None on the cpu."""
        self._refuse("max_memory", Capability.DEVICES)

    def total_memory(self, device: str | None = None) -> int | None:
        """Bytes of memory that the device has; None on the cpu."""
        self._refuse("total_memory", Capability.DEVICES)

    def reset_max_memory(self, device: str | None = None) -> None:
        """Start a new peak; nothing to do on the cpu."""
        self._refuse("reset_max_memory", Capability.DEVICES)

    def set_threads(self, count: int) -> None:
        """How many threads one operator may use on the cpu."""
        self._refuse("set_threads", Capability.DEVICES)

    def init_on_device(self, device: Any) -> AbstractContextManager[Any]:
        """Within it, new tensors are made on `device`; `"meta"` gives shapes without memory."""
        self._refuse("init_on_device", Capability.INIT_ON_DEVICE)

    # Random numbers

    def manual_seed(self, seed: int) -> None:
        """Seed the cpu's and the devices' generators."""
        self._refuse("manual_seed", Capability.RNG)

    def initial_seed(self) -> int:
        """The seed of the last `manual_seed`."""
        self._refuse("initial_seed", Capability.RNG)

    def fork_rng(self, seed: int | None = None, device: str | None = None) -> AbstractContextManager[None]:
        """Within it, random numbers are the caller's own (from `seed` if given); outside, nothing has changed."""
        self._refuse("fork_rng", Capability.RNG)

    def get_rng_state(self, device: str | None = None) -> dict[str, Any]:
        """The generators' states by device type: `"cpu"`, and the device's own if it is another."""
        self._refuse("get_rng_state", Capability.RNG)

    def set_rng_state(self, state: Mapping[str, Any], device: str | None = None) -> None:
        """Put back what `get_rng_state` gave.

        Raises:
            ValueError: the state holds other device types than this process has.
        """
        self._refuse("set_rng_state", Capability.RNG)

    # Process groups and collectives

    def init_process_group(
        self, timeout: timedelta | float = 300.0, device: str | None = None, backend: str | None = None
    ) -> None:
        """Join the world that the launcher's variables describe; without them, a world of one process.

        Args:
            timeout: how long a collective may wait for a late rank; a number is in seconds.
            device: chooses the communication backend.
            backend: names the communication backend itself.

        Raises:
            RuntimeError: there is a process group already.
            ConfigError: only some of the launcher's variables are set.
        """
        self._refuse("init_process_group", Capability.COLLECTIVES)

    def pretended_world(self, world_size: int, rank: int = 0) -> AbstractContextManager[None]:
        """Within it, this process is `rank` of a world whose other ranks do not exist: for shapes, not for values.

        Raises:
            RuntimeError: there is a process group.
        """
        self._refuse("pretended_world", Capability.COLLECTIVES)

    def host_store(self) -> Any:
        """The store of a world, served by this process on `port`, for ranks that it starts."""
        self._refuse("host_store", Capability.COLLECTIVES)

    def destroy_process_group(self) -> None:
        """Leave the world; nothing to do without one."""
        self._refuse("destroy_process_group", Capability.COLLECTIVES)

    def is_initialized(self) -> bool:
        """Whether there is a process group."""
        self._refuse("is_initialized", Capability.COLLECTIVES)

    def rank(self, group: Any = None) -> int:
        """This process's rank in the group; 0 without one."""
        self._refuse("rank", Capability.COLLECTIVES)

    def world_size(self, group: Any = None) -> int:
        """The number of processes in the group; 1 without one."""
        self._refuse("world_size", Capability.COLLECTIVES)

    def all_reduce(self, tensor: Any, op: str = "sum", group: Any = None) -> Any:
        """Reduce over the ranks in place, and return the tensor. `op`: sum, max, min or product."""
        self._refuse("all_reduce", Capability.COLLECTIVES)

    def all_gather(self, tensor: Any, group: Any = None) -> list[Any]:
        """Every rank's tensor, by rank. All ranks pass the same shape and dtype."""
        self._refuse("all_gather", Capability.COLLECTIVES)

    def broadcast(self, tensor: Any, src: int = 0, group: Any = None) -> Any:
        """Overwrite the tensor with that of rank `src` of the group, and return it."""
        self._refuse("broadcast", Capability.COLLECTIVES)

    def barrier(self, group: Any = None) -> None:
        """Wait until every rank is here."""
        self._refuse("barrier", Capability.COLLECTIVES)

    def all_gather_object(self, obj: Any, group: Any = None) -> list[Any]:
        """Every rank's object, by rank; objects are pickled."""
        self._refuse("all_gather_object", Capability.COLLECTIVES)

    def broadcast_object(self, obj: Any, src: int = 0, group: Any = None) -> Any:
        """The object of rank `src` of the group; objects are pickled."""
        self._refuse("broadcast_object", Capability.COLLECTIVES)

    # Device meshes; every result shares the root of its source

    def world_mesh(self, device: str | None = None) -> Any:
        """All processes as one axis named `world`."""
        self._refuse("world_mesh", Capability.DTENSOR)

    def split_axis(self, mesh: Any, axis: str, sizes: Sequence[int], names: Sequence[str]) -> Any:
        """The mesh with `axis` split into several, outermost first; the other axes keep their groups."""
        self._refuse("split_axis", Capability.DTENSOR)

    def join_axes(self, mesh: Any, axes: Sequence[str], name: str) -> Any:
        """Neighbouring axes of the mesh as one axis."""
        self._refuse("join_axes", Capability.DTENSOR)

    def stack_meshes(self, meshes: Sequence[Any]) -> Any:
        """Meshes of one root side by side as one mesh, on the groups they have."""
        self._refuse("stack_meshes", Capability.DTENSOR)

    def rename_axis(self, mesh: Any, name: str) -> Any:
        """A one-axis mesh under another name, on the group it has; the result is a root of its own."""
        self._refuse("rename_axis", Capability.DTENSOR)

    # Training

    def is_data_parallel(self, module: Any) -> bool:
        """Whether the module was sharded or replicated before."""
        self._refuse("is_data_parallel", Capability.FSDP)

    def shard_unit(
        self,
        unit: Sequence[Any],
        *,
        mesh: Any,
        param_dtype: Any,
        reduce_dtype: Any,
        cast_forward_inputs: bool,
        reshard_after_forward: bool | None,
        cpu_offload: bool,
        sum_gradients: bool,
    ) -> None:
        """Shard the modules' parameters as one unit of communication (`hp_protocols.distributed.apply_fsdp`)."""
        self._refuse("shard_unit", Capability.FSDP)

    def replicate_unit(
        self,
        unit: Sequence[Any],
        *,
        mesh: Any,
        param_dtype: Any,
        reduce_dtype: Any,
        cast_forward_inputs: bool,
        sum_gradients: bool,
    ) -> None:
        """Keep the modules' parameters whole and reduce their gradients as one unit (`apply_replicate`)."""
        self._refuse("replicate_unit", Capability.FSDP)

    def clip_grad_norm_(
        self,
        parameters: Iterable[Any],
        max_norm: float,
        *,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        """Scale gradients so that their global 2-norm is at most `max_norm`; returns the norm before that."""
        self._refuse("clip_grad_norm_", Capability.GRAD_CLIPPING)

    def lay_out_gradients(self, parameters: Iterable[Any]) -> None:
        """Lay every distributed gradient out as its parameter."""
        self._refuse("lay_out_gradients", Capability.GRAD_CLIPPING)

    def checkpoint_wrapper(
        self,
        module: Any,
        *,
        selective: bool = False,
        preserve_rng_state: bool = True,
        determinism_check: str = "default",
        early_stop: bool = True,
        debug: bool = False,
    ) -> Any:
        """A module that recomputes `module`'s activations in backward. `state_dict` keys do not change.

        Args:
            selective: keep the results that are costly to compute, recompute only the others.
            preserve_rng_state: recompute under the random state of the first pass.
            determinism_check: `default` compares shapes, dtypes and devices of both passes, `none` does not.
            early_stop: end the recomputation when all that backward needs is there.
            debug: record where operators were called; slow.
        """
        self._refuse("checkpoint_wrapper", Capability.ACTIVATION_CHECKPOINT)

    def compilers(self) -> list[str]:
        """The compilers that `compile_module` can use, by name."""
        self._refuse("compilers", Capability.COMPILE)

    def compile_module(
        self, module: Any, *, backend: str = "inductor", fullgraph: bool = True, dynamic: bool | None = None
    ) -> None:
        """Compile the module's forward in place, at its first call. `state_dict` keys do not change."""
        self._refuse("compile_module", Capability.COMPILE)

    def set_activation_memory_budget(self, budget: float) -> None:
        """The share of activations that modules compiled from now on may keep: 0 recomputes all, 1 keeps all."""
        self._refuse("set_activation_memory_budget", Capability.COMPILE)

    # Profiling

    def profiler_module(self, device: str | None = None) -> Any:
        """The module that profiles the device, with the names of torch.profiler: `profile`, `schedule`, …"""
        self._refuse("profiler_module", Capability.PROFILING)

    def profiler_activities(self, device: str | None = None) -> list[Any]:
        """What that module's `profile` records by default: the host, and the device if it is another."""
        self._refuse("profiler_activities", Capability.PROFILING)

    def has_memory_history(self, device: str | None = None) -> bool:
        """Whether the device's allocator can record what it does; not on the cpu."""
        self._refuse("has_memory_history", Capability.PROFILING)

    def start_memory_history(self, max_entries: int, device: str | None = None) -> None:
        """Record every allocation with its stack from now on; the last `max_entries` are kept.

        Raises:
            CapabilityError: the device has no memory history.
        """
        self._refuse("start_memory_history", Capability.PROFILING)

    def memory_history(self, device: str | None = None) -> Any:
        """What lies in the device's memory and what was recorded; pickled, pytorch.org/memory_viz shows it."""
        self._refuse("memory_history", Capability.PROFILING)

    def stop_memory_history(self, device: str | None = None) -> None:
        """Stop recording, and forget what was recorded."""
        self._refuse("stop_memory_history", Capability.PROFILING)
