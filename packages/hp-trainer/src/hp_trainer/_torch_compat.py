"""The private torch APIs that hp-trainer uses, each with a check that says which torch has it.

In: plain values. Out: the effect; `RuntimeError` where the running torch lacks the API.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

NEEDS = "hp-trainer needs torch >=2.13,<2.15"


def set_collective_timeout(timeout: timedelta, leave: dist.ProcessGroup | None = None) -> None:
    """How long a collective may wait from now on, in every process group of this process but `leave`.

    Public torch sets a timeout only when a group is made (torch 2.13).
    """
    setter = getattr(distributed_c10d, "_set_pg_timeout", None)
    groups = getattr(getattr(distributed_c10d, "_world", None), "pg_map", None)
    if setter is None or groups is None:
        raise RuntimeError(f"torch {torch.__version__} has no distributed_c10d._set_pg_timeout; {NEEDS}")
    if not dist.is_initialized():
        return
    # A rank that is still busy with the old limit must not meet one with the new.
    dist.barrier()
    for group in list(groups):
        if group is not leave:
            setter(timeout, group)


# Steps that are only pretended (hp plan)


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """While entered, tensors have sizes and storages, but no memory; tensors from outside may take part."""
    return _private("torch._subclasses.fake_tensor", "FakeTensorMode")(allow_non_fake_inputs=True)


def number_errors() -> tuple[type[Exception], ...]:
    """What is raised where a program asks a tensor of `fake_tensors` for a number, or for a shape that hangs on one."""
    names = ("DataDependentOutputException", "DynamicOutputShapeException")
    return tuple(_private("torch._subclasses.fake_tensor", name) for name in names)


def watch_operations(watch: Callable[[Any, Any, tuple[type, ...], tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """A context in which `watch(run, operator, types, args, kwargs)` stands for every operation of this thread.

    `run()` computes it. `watch` may return NotImplemented to let a tensor's own class take it apart first.
    """
    base = _private("torch.utils._python_dispatch", "TorchDispatchMode")

    class Watch(base):  # type: ignore[misc, valid-type]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            return watch(lambda: func(*args, **kwargs), func, types, args, kwargs)

    return Watch()


@contextlib.contextmanager
def watch_resizes(watch: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """While entered, `watch` is told of every storage whose size was changed; FSDP2 frees and allocates that way."""
    owner: Any = torch.UntypedStorage
    original = owner.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        watch(storage)
        return result

    owner.resize_ = resize_
    try:
        yield
    finally:
        owner.resize_ = original


@contextlib.contextmanager
def around_sharding_propagation(around: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """While entered, DTensor derives the shape of a result inside `around()`: there it makes tensors of whole size
    that no run has."""
    owner = _private("torch.distributed.tensor._sharding_prop", "ShardingPropagator")
    name = "_propagate_tensor_meta_non_cached"
    original = getattr(owner, name, None)
    if original is None:
        raise RuntimeError(f"torch {torch.__version__} has no ShardingPropagator.{name}; {NEEDS}")

    def propagate(self: Any, op_schema: Any) -> Any:
        with around():
            return original(self, op_schema)

    setattr(owner, name, propagate)
    try:
        yield
    finally:
        setattr(owner, name, original)


def fsdp_copies() -> dict[str, Any]:
    """FSDP2's operators that pack and unpack what is gathered and reduced, by name."""
    importlib.import_module("torch.distributed.fsdp")
    space = torch.ops.fsdp
    names = ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")
    if missing := [name for name in names if not hasattr(space, name)]:
        raise RuntimeError(f"torch {torch.__version__} has no torch.ops.fsdp.{missing[0]}; {NEEDS}")
    return {name: getattr(space, name).default for name in names}


def wait_for_collective() -> Any:
    """The operator that waits for a functional collective; it returns the tensor that it is given."""
    return torch.ops._c10d_functional.wait_tensor.default


def _private(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"torch {torch.__version__} has no {module}.{name}; {NEEDS}") from error
