"""The private torch APIs that this package uses, all in one place, each with a presence check.

In: the installed torch. Out: one function per API, under a public name. A torch that has moved one of them gets an
ImportError that names the API and the version, where it is used.
"""

from __future__ import annotations

import functools
import importlib
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "checkpoint_wrapper",
    "concatenate_meshes",
    "costly_ops",
    "flatten_mesh",
    "forget_sharding_decisions",
    "matrix_products",
    "memory_module",
    "memory_snapshot",
    "one_thread_per_gloo_group",
    "record_memory_history",
    "replicate",
    "set_activation_memory_budget",
    "start_fake_process_group",
    "unflatten_mesh",
]


def _attribute(owner: Any, name: str, full_name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise _missing(full_name) from error


def _private(module: str, name: str) -> Any:
    """`from module import name`, or an ImportError that says which torch lacks it."""
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _missing(f"{module}.{name}") from error
    return _attribute(owner, name, f"{module}.{name}")


def _missing(full_name: str) -> ImportError:
    return ImportError(
        f"torch {torch.__version__} has no {full_name}, which hp-protocols needs; "
        'install a supported torch: pip install "hp-protocols[torch]"'
    )


# Device meshes


def unflatten_mesh(mesh: DeviceMesh, axis: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The mesh with one axis split into several; the other axes keep their process groups."""
    return _attribute(mesh, "_unflatten", "DeviceMesh._unflatten")(axis, sizes, names)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of the mesh as one."""
    return _attribute(mesh, "_flatten", "DeviceMesh._flatten")(name)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Meshes of one root side by side; no new process group."""
    return _attribute(DeviceMesh, "_concatenate", "DeviceMesh._concatenate")(meshes)


# Process groups

_GLOO_TIMEOUT = timedelta(minutes=30)
"""torch's own default."""


def start_fake_process_group(rank: int, world_size: int, timeout: timedelta) -> None:
    """A world of which only this rank exists: collectives return at once and carry nothing."""
    # Importing the module registers the backend "fake".
    store = _private("torch.testing._internal.distributed.fake_pg", "FakeStore")()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size, timeout=timeout)


def one_thread_per_gloo_group() -> None:
    """Make every gloo group from now on with one thread that runs its collectives, instead of two.

    torch 2.13's two threads write down the name of what they finished without a lock. When they do so at the same time
    and it is a name of more than 15 characters (an all-gather's), its memory is freed twice, and whatever gets it next
    is overwritten: an abort in malloc, or wrong numbers. With one, a group's collectives run in the order of their
    calls, other groups beside it. A group that was made before, or with options of its own, keeps its threads.
    """
    if not dist.is_gloo_available():
        return
    group: Any = dist.ProcessGroupGloo
    options_type = _attribute(group, "_Options", "ProcessGroupGloo._Options")
    initialise = group.__init__
    if getattr(initialise, "hp_one_thread", False):
        return

    @functools.wraps(initialise)
    def with_one_thread(
        self: Any, store: Any, rank: int, size: int, options: Any = None, timeout: timedelta = _GLOO_TIMEOUT
    ) -> None:
        if options is None or isinstance(options, timedelta):
            timeout, options = options or timeout, options_type()
            options._threads, options._timeout = 1, timeout
            options._devices = [group.create_default_device()]
        initialise(self, store, rank, size, options)

    with_one_thread.hp_one_thread = True  # type: ignore[attr-defined]
    group.__init__ = with_one_thread


def forget_sharding_decisions() -> None:
    """Let DTensor decide anew how each operation is sharded, as a fresh process does.

    It keeps its decisions by meshes that are equal, which they are if ranks, shape and names are, and the results of
    an operation then lie on the mesh of the first time: on process groups that a later world does not have. Other
    threads' fast path (backward's, on a device) keeps its own and is not reached.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    clear = _private("torch.distributed.tensor.debug", "_clear_fast_path_sharding_prop_cache")
    tensor = _private("torch.distributed.tensor", "DTensor")
    dispatcher = _attribute(tensor, "_op_dispatcher", "DTensor._op_dispatcher")
    propagator = _attribute(dispatcher, "sharding_propagator", "OpDispatcher.sharding_propagator")
    decide = _attribute(propagator, "propagate_op_sharding_non_cached", "ShardingPropagator.propagate_op_sharding")
    cache = _private("torch.distributed.tensor._sharding_prop", "LocalLRUCache")
    clear()
    # A new one instead of a cleared one: each thread has its own cache in it.
    propagator.propagate_op_sharding = cache(decide)


# Data parallelism


def replicate(unit: Any, **options: Any) -> None:
    """FSDP2's machinery without sharding: whole parameters, gradients all-reduced."""
    _private("torch.distributed._composable.replicate_with_fsdp", "replicate")(unit, **options)


# Memory of a device


def memory_module(kind: str) -> ModuleType:
    """`torch.cuda.memory`, `torch.npu.memory`."""
    return _attribute(torch.get_device_module(kind), "memory", f"torch.{kind}.memory")


def record_memory_history(module: ModuleType, max_entries: int | None) -> None:
    """Record what the allocator does, with stacks, in a ring of `max_entries`; None stops it."""
    record = _attribute(module, "_record_memory_history", f"{module.__name__}._record_memory_history")
    if max_entries is None:
        record(enabled=None)
    else:
        record(max_entries=max_entries)


def memory_snapshot(module: ModuleType) -> Any:
    """The allocator's segments and its history, as plain data."""
    return _attribute(module, "_snapshot", f"{module.__name__}._snapshot")()


# Activation checkpointing


def checkpoint_wrapper(module: nn.Module, **options: Any) -> nn.Module:
    """torch's module wrapper that recomputes activations in backward; non-reentrant."""
    return _private("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "checkpoint_wrapper")(
        module, **options
    )


def set_activation_memory_budget(budget: float) -> None:
    """The share of activations that compiled modules may keep, from 0 (recompute all) to 1 (keep all)."""
    config = importlib.import_module("torch._functorch.config")
    _attribute(config, "activation_memory_budget", "torch._functorch.config.activation_memory_budget")
    config.activation_memory_budget = budget  # type: ignore[attr-defined]


@functools.cache
def matrix_products() -> frozenset[Any]:
    """The operators that a linear layer may run as."""
    aten = torch.ops.aten
    return frozenset({aten.mm.default, aten.addmm.default, aten.linear.default})


@functools.cache
def costly_ops() -> frozenset[Any]:
    """Operators other than `matrix_products` whose results selective checkpointing keeps."""
    return frozenset(
        operator
        for namespace, name, required in _COSTLY
        if (operator := _operator(namespace, name, required)) is not None
    )


# namespace, operator, and whether every supported torch has it; the others come with a device or an extension.
_COSTLY = [
    ("aten", "bmm", True),
    ("aten", "baddbmm", True),
    ("aten", "convolution", True),
    ("aten", "_scaled_dot_product_flash_attention", True),
    ("aten", "_scaled_dot_product_efficient_attention", True),
    ("aten", "_scaled_dot_product_cudnn_attention", True),
    ("aten", "_scaled_dot_product_attention_math", True),
    ("aten", "_scaled_dot_product_fused_attention_overrideable", True),
    ("aten", "_scaled_dot_product_flash_attention_for_cpu", True),
    # A tie in top-k may fall otherwise the second time, and would route a token to another expert.
    ("aten", "topk", True),
    ("_c10d_functional", "all_reduce", True),
    ("_c10d_functional", "reduce_scatter_tensor", True),
    ("_c10d_functional", "all_to_all_single", True),
    ("higher_order", "flex_attention", True),
    ("npu", "npu_fusion_attention", False),
    ("npu", "npu_grouped_matmul", False),
]


def _operator(namespace: str, name: str, required: bool) -> Any:
    space = getattr(torch.ops, namespace)
    if not hasattr(space, name):
        if required:
            raise _missing(f"torch.ops.{namespace}.{name}")
        return None
    operator = getattr(space, name)
    return getattr(operator, "default", operator)
