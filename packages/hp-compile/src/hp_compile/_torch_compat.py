"""Every torch API that torch calls private, behind one door (G3).

In: nothing. Out: plain functions with our own names. Each looks its torch API up when it is needed and, where
it is missing, raises an error that names the API and the torch version that has it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

TORCH_NEEDED = ">=2.13,<2.15"


def lookup(path: str) -> Any:
    """The object at a dotted path, or an error that says which torch is needed."""
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        try:
            for name in parts[cut:]:
                found = getattr(found, name)
        except AttributeError:
            break
        return found
    raise RuntimeError(
        f"torch {torch.__version__} has no {path}, which Graph Mode is built on; install torch{TORCH_NEEDED}"
    )


def c10d_ops() -> Any:
    """The namespace of the functional collectives."""
    return lookup("torch.ops._c10d_functional")


def is_functional_collective(target: object) -> bool:
    """Whether a node's target is a functional collective, or the wait for one."""
    return getattr(target, "namespace", "") == "_c10d_functional"


def is_wait(target: object) -> bool:
    """Whether a node's target waits for a functional collective."""
    return target in (c10d_ops().wait_tensor, c10d_ops().wait_tensor.default)


_GLOO_TIMEOUT = timedelta(minutes=30)
"""torch's own default."""


def one_thread_per_gloo_group() -> None:
    """Make every gloo group from now on with one thread that runs its collectives, instead of two.

    torch 2.13's two threads write down the name of what they finished without a lock. When they do so at the same time
    and it is a name of more than 15 characters (an all-gather's), its memory is freed twice, and whatever gets it next
    is overwritten: an abort in malloc, or wrong numbers. With one, a group's collectives run in the order of their
    calls, other groups beside it. A group that was made before, or with options of its own, keeps its threads.
    """
    if not lookup("torch.distributed.is_gloo_available")():
        return
    group = lookup("torch.distributed.ProcessGroupGloo")
    options_type = lookup("torch.distributed.ProcessGroupGloo._Options")
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


def gloo_threads(group: Any) -> int:
    """How many threads run a process group's collectives on the cpu; 1 where that is not gloo's."""
    cpu = torch.device("cpu")
    return getattr(group._get_backend(cpu).options, "_threads", 1) if cpu in group._device_types else 1


def saved_name(fqn: str) -> str:
    """A name as state dicts have it: torch's activation-checkpoint wrapper takes itself out of them."""
    wrapper = lookup("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return fqn.replace(wrapper._CHECKPOINT_PREFIX, "")


pytree = importlib.import_module("torch.utils._pytree")


def new_fake_mode() -> Any:
    """A fake mode with static shapes that lets real constants in."""
    return lookup("torch._subclasses.FakeTensorMode")(allow_non_fake_inputs=True)


def is_fake(value: object) -> bool:
    return isinstance(value, lookup("torch._subclasses.FakeTensor"))


def fake_mode_of(value: object) -> Any:
    """The mode that a fake tensor belongs to; None for anything else."""
    return value.fake_mode if is_fake(value) else None  # type: ignore[attr-defined]


@contextlib.contextmanager
def capturing(fake_mode: Any) -> Iterator[None]:
    """Everything that must be on while the step is traced: fake tensors, node meta, one autograd thread."""
    tracing = lookup("torch._guards.tracing")
    context = lookup("torch._guards.TracingContext")
    preserve = lookup("torch.fx.traceback.preserve_node_meta")
    non_strict = lookup("torch.compiler._non_strict_tracing_context")
    # A torch.compile'd function inside the step is traced through instead of refused.
    nested = lookup("torch._dynamo.config").patch(error_on_nested_fx_trace=False)
    with (
        fake_mode,
        tracing(context(fake_mode)),
        preserve(),
        nested,
        torch.autograd.set_multithreading_enabled(False),
        non_strict(),
    ):
        yield


@contextlib.contextmanager
def works_numbered_apart() -> Iterator[None]:
    """torch numbers the handles of traced collectives by draws from Python's generator, which is the user's."""
    home = lookup("torch.distributed._meta_registrations")
    plain = lookup("torch.distributed._meta_registrations.random")
    home.random = random.Random()
    try:
        yield
    finally:
        home.random = plain


def tagged_backward() -> contextlib.AbstractContextManager[None]:
    """Within it the autograd engine tags the nodes that it produces."""
    return lookup("torch.compiler._patch_engine_backward")()


def trace_to_graph(function: Callable[..., Any], args: Sequence[Any]) -> GraphModule:
    make_fx = lookup("torch.fx.experimental.proxy_tensor.make_fx")
    return make_fx(function, record_stack_traces=False)(*args)


def nodes_so_far() -> int:
    """The number of nodes of the graph that is being traced."""
    mode = lookup("torch.fx.experimental.proxy_tensor.get_proxy_mode")()
    return len(mode.tracer.graph.nodes)


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """What torch raises when Python asks a fake tensor for its data."""
    return (
        lookup("torch._subclasses.fake_tensor.DataDependentOutputException"),
        lookup("torch._subclasses.fake_tensor.DynamicOutputShapeException"),
        lookup("torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode"),
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a node's value, which may be a list of them."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def storage_id(tensor: torch.Tensor) -> int:
    """A number that is equal for tensors that share a storage."""
    return tensor.untyped_storage()._cdata


def eager_wrappers() -> dict[type, str]:
    """Wrapper classes that own the parameters' communication already."""
    return {
        lookup("torch.nn.parallel.DistributedDataParallel"): "DistributedDataParallel",
        lookup("torch.nn.DataParallel"): "DataParallel",
        lookup("torch.distributed.fsdp.FullyShardedDataParallel"): "FullyShardedDataParallel",
        lookup("torch.distributed.fsdp.FSDPModule"): "fully_shard (or replicate)",
    }


def tensor_hooks(parameter: torch.Tensor) -> list[str]:
    """The kinds of hooks that sit on a tensor."""
    kinds = {"_backward_hooks": "register_hook", "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook"}
    return [name for attribute, name in kinds.items() if getattr(parameter, attribute, None)]


def backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return module._forward_pre_hooks, module._forward_hooks


def global_backward_hooks() -> bool:
    home = lookup("torch.nn.modules.module")
    return bool(home._global_backward_hooks or home._global_backward_pre_hooks)


def hook_tables(module: nn.Module) -> tuple[Any, ...]:
    """The module's own dictionaries of hooks; keys are numbers that torch gives to each registration."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks


def global_hook_tables() -> tuple[Any, ...]:
    """Of backward only: those of forward belong to observers (profilers, memory trackers), which come and go."""
    home = lookup("torch.nn.modules.module")
    return home._global_backward_pre_hooks, home._global_backward_hooks


def tensor_hook_tables(tensor: torch.Tensor) -> tuple[Any, Any]:
    """None until the first registration."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def is_torchs_own(attribute: str) -> bool:
    """Attributes that every nn.Module has, which are watched by other means."""
    return attribute in _MODULE_ATTRIBUTES


_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)


def tensor_slots(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's own dictionaries of parameters and buffers."""
    return module._parameters, module._buffers


def child_slots(module: nn.Module) -> dict[str, Any]:
    return module._modules


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of a dim that the tensor-parallel axis has cut before the data-parallel axis."""
    return lookup("torch.distributed.tensor.placement_types._StridedShard")(dim, split_factor=split_factor)


def shards_of(spec: Any, dim: int) -> int:
    return spec.num_shards_map[dim]


def dtensor_spec(tensor: Any) -> Any:
    return tensor._spec


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    return lookup("torch.distributed.device_mesh.DeviceMesh._concatenate")(meshes)


def writes_to(tensor: torch.Tensor) -> int:
    """How often the tensor has been written to in place."""
    return tensor._version


def default_store() -> Any:
    """The key-value store that torch.distributed was initialised with."""
    return lookup("torch.distributed.distributed_c10d._get_default_store")()


def chunk_cat(tensors: list[torch.Tensor], chunks: int, out: torch.Tensor) -> None:
    """Cut each tensor's dim 0 into padded chunks; row r of `out` is chunk r of all tensors."""
    torch._chunk_cat(tensors, 0, chunks, out=out)


def clear_autocast_cache() -> None:
    torch.clear_autocast_cache()


def is_operation(target: Any) -> TypeGuard[Any]:
    """Whether a node's target is one overload of an operator."""
    return isinstance(target, _operation_class())


@functools.cache
def _operation_class() -> type:
    """Asked for at every node."""
    return lookup("torch._ops.OpOverload")


def schema_of(target: Any) -> Any:
    """The schema of an operation; None for other targets of a node."""
    return target._schema if is_operation(target) else None


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    lookup("torch._foreach_copy_")(targets, sources)


def entry_of(operation: Any) -> Any:
    """What calling an operation calls, without the Python frame between."""
    entry = getattr(operation, "_op", None)
    if entry is None:
        raise RuntimeError(
            f"{type(operation).__name__} of torch {torch.__version__} has no _op, which Graph Mode calls; install "
            f"torch{TORCH_NEEDED}"
        )
    return entry
