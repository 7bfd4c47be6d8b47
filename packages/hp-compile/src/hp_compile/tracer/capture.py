"""Capture: one training step of any module as one FX graph (G1 to G8).

In: a model, a `train_fn(model, input, label) -> loss` and one sample. Out: a `JointGraph`, and a way to run it.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from hp_compile import _torch_compat as compat
from hp_compile.tracer.checks import refuse_what_capture_would_skip, refused_backward, watched_forward_hooks
from hp_compile.tracer.joint_graph import JointGraph, OutputLabel
from hp_compile.tracer.left_behind import AttributeGuard, refuse_kept_tensors, refused_draws_in_python
from hp_compile.tracer.module_record import ModuleRecord, mark_nodes
from hp_compile.tracer.repair import (
    cast_parameters,
    give_outputs_their_own_storage,
    keep_grad_mode_where_kernels_read_it,
    let_views_meet_real_strides,
    refuse_random_numbers_in_backward,
    wait_for_plain_collectives,
)
from hp_compile.tracer.signature import FlatInputs, flatten_inputs
from hp_compile.tracer.state import (
    StateSlot,
    contiguous_stride,
    current_tensor,
    local_tensor,
    scan_state,
    shard_info,
    swapped_state,
)
from hp_compile.tracer.watch import ModelWatch

TrainFn = Callable[[nn.Module, Any, Any], torch.Tensor]


@dataclass(frozen=True)
class CapturePrecision:
    """Mixed precision at capture: parameters are traced in `param_dtype`, inputs of units are cast.

    Attributes:
        param_dtype: by parameter FQN; absent names keep their dtype.
        input_dtype: by module FQN (`""` is the root), the dtype of its float inputs.
        reduce_dtype: by parameter FQN, the dtype of the gradient while it is reduced.
    """

    param_dtype: dict[str, torch.dtype] = field(default_factory=dict)
    input_dtype: dict[str, torch.dtype] = field(default_factory=dict)
    reduce_dtype: dict[str, torch.dtype] = field(default_factory=dict)


def trace_model_graph(model: nn.Module, train_fn: TrainFn, input: Any, label: Any) -> JointGraph:
    """Capture forward, loss and backward of `train_fn(model, input, label)`.

    Raises:
        TypeError: a leaf of input or label is not allowed (named by path).
        ValueError: the loss is not a floating scalar, or needs no gradient.
        RuntimeError: the model cannot be captured; the text names what and where.
    """
    joint = capture(model, train_fn, flatten_inputs(input, label))
    joint.graph_module.graph.lint()
    joint.graph_module.recompile()
    joint.graph_module.meta["hp_model_key"] = _model_key(model)
    return joint


def _model_key(model: nn.Module) -> tuple[Any, ...]:
    """What the trainer compares, and the modules' classes: `run_traced_graph` may be given a copy of the model."""
    return (*ModelWatch(model).key(), tuple(type(module) for module in model.modules()))


def run_traced_graph(
    joint: JointGraph, model: nn.Module, input: Any, label: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Run a captured step on the model's present weights: the loss and each parameter's gradient (or None).

    Raises:
        ValueError: input, label or the model (modes, flags, hooks, attributes) differ from those of the capture.
    """
    flat = flatten_inputs(input, label)
    if not flat.matches(joint.input_spec, joint.graph_module.meta["hp_key"]):
        raise ValueError(
            "input or label differ in structure, shape, dtype, stride, device or value of a primitive from those of "
            "the capture; capture again with trace_model_graph (GraphTrainer does so by itself)"
        )
    slots = scan_state(model)
    if tuple(slot.fqn for slot in slots) != joint.state_fqns:
        raise ValueError("the model's parameters or buffers are not those of the capture; capture again")
    if _model_key(model) != joint.graph_module.meta["hp_model_key"]:
        raise ValueError(
            "the model differs in modes, requires_grad, hooks, kinds of modules or their attributes from that of the "
            "capture; capture again with trace_model_graph (GraphTrainer does so by itself)"
        )
    outputs = call_graph(joint.graph_module, [local_tensor(slot.tensor) for slot in slots], flat)
    loss, grads = outputs[0], dict.fromkeys(slot.fqn for slot in slots if slot.is_param)
    for label_, value in zip(joint.outputs, outputs, strict=True):
        if label_.kind == "grad":
            grads[label_.fqn] = value
        elif label_.kind == "buffer":
            rebind_buffer(slots, label_.fqn, value)
    return loss, grads


def call_graph(graph_module: GraphModule, state: list[torch.Tensor], flat: FlatInputs) -> list[torch.Tensor]:
    with torch.no_grad():
        return graph_module.forward(*state, *flat.tensors)


def rebind_buffer(slots: list[StateSlot], fqn: str, value: torch.Tensor) -> None:
    """Forward assigned a new tensor to a buffer; so does a step."""
    slot = next(slot for slot in slots if slot.fqn == fqn)
    for module, attribute in slot.owners:
        compat.tensor_slots(module)[1][attribute] = value


def capture(
    model: nn.Module,
    train_fn: TrainFn,
    flat: FlatInputs,
    *,
    with_backward: bool = True,
    precision: CapturePrecision | None = None,
) -> JointGraph:
    """The work behind `trace_model_graph`; also for forward alone, and for a model that is already sharded.

    The graph is not compiled yet: passes follow.
    """
    started = time.perf_counter()
    with no_collections():
        joint = _capture(model, train_fn, flat, with_backward, precision or CapturePrecision())
    joint.seconds = time.perf_counter() - started
    return joint


def _capture(
    model: nn.Module, train_fn: TrainFn, flat: FlatInputs, with_backward: bool, precision: CapturePrecision
) -> JointGraph:
    refuse_what_capture_would_skip(model)
    slots = scan_state(model)
    fake_mode = compat.new_fake_mode()
    state = [_fake_state(fake_mode, slot, precision) for slot in slots]
    # Detached: one tensor given as two leaves would become one fake, and the graph would read one of the two only.
    leaves = [tensor.detach() for tensor in flat.tensors]
    inputs = [fake_mode.from_tensor(tensor, static_shapes=True) for tensor in leaves]
    step = _Step(model, train_fn, flat, slots, with_backward)
    modules = ModuleRecord(model)
    guard = AttributeGuard(model)
    try:
        with (
            watched_forward_hooks(model),
            refused_draws_in_python(),
            compat.capturing(fake_mode),
            modules.recording(),
            _cast_inputs(model, precision),
            _named_faults(),
        ):
            graph_module = compat.trace_to_graph(step, [*state, *inputs])
    finally:
        compat.clear_autocast_cache()
        changed = guard.restore()
    if changed:
        raise RuntimeError(
            f"forward stores values in plain attributes ({', '.join(sorted(changed))}); a graph would write them at "
            "capture only. Return them, or register tensors as buffers in __init__"
        )
    refuse_kept_tensors(train_fn)
    mark_nodes(graph_module, step.boundary, modules, with_backward)
    _refuse_foreign_parameters(graph_module)
    refuse_random_numbers_in_backward(graph_module)
    let_views_meet_real_strides(graph_module)
    keep_grad_mode_where_kernels_read_it(graph_module)
    wait_for_plain_collectives(graph_module)
    labels = tuple(step.labels)
    masters = {slot.fqn: slot.tensor.dtype for slot in slots}
    cast_parameters(graph_module, [slot.fqn for slot in slots], labels, masters, precision.reduce_dtype)
    strides = {slot.fqn: _full_stride(slot) for slot in slots}
    give_outputs_their_own_storage(graph_module, labels, strides)
    graph_module.meta["hp_key"] = flat.key
    return JointGraph(
        graph_module=graph_module,
        state_fqns=tuple(slot.fqn for slot in slots),
        state_is_param=tuple(slot.is_param for slot in slots),
        input_spec=flat.spec,
        params={slot.fqn: slot.tensor for slot in slots if slot.is_param},
        outputs=labels,
        trainable=tuple(slot.fqn for slot in slots if slot.trainable),
        is_training=with_backward,
        reduce_dtypes=dict(precision.reduce_dtype),
        aliases={alias: slot.fqn for slot in slots for alias in slot.aliases},
        nodes_captured=len(graph_module.graph.nodes),
    )


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Garbage collection while a graph is made walks the growing graph again and again, and finds nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Step:
    """The function that is traced: state and inputs in, loss, gradients and rebound buffers out."""

    def __init__(
        self, model: nn.Module, train_fn: TrainFn, flat: FlatInputs, slots: list[StateSlot], with_backward: bool
    ) -> None:
        self.model, self.train_fn, self.flat, self.slots = model, train_fn, flat, slots
        self.with_backward = with_backward
        self.labels: list[OutputLabel] = []
        self.boundary = 0

    def __call__(self, *traced: torch.Tensor) -> list[torch.Tensor]:
        state, tensors = traced[: len(self.slots)], iter(traced[len(self.slots) :])
        leaves = [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.flat.leaves]
        input, label = compat.pytree.tree_unflatten(leaves, self.flat.spec)
        placed = [_as_model_sees_it(slot, tensor) for slot, tensor in zip(self.slots, state, strict=True)]
        grad_mode = contextlib.nullcontext() if self.with_backward else torch.no_grad()
        with swapped_state(self.slots, placed), _eager_autocast_cache(), grad_mode:
            with refused_backward():
                loss = self.train_fn(self.model, input, label)
            loss = _checked_loss(loss, self.with_backward)
            rebound = self._rebound_buffers(placed)
            self.boundary = compat.nodes_so_far()
            # Inside the swap: a checkpointed region runs the module again while backward runs.
            grads = self._gradients(loss, state) if self.with_backward else []
        self.labels = [OutputLabel("loss"), *(OutputLabel("grad", fqn) for fqn, _ in grads)]
        self.labels += [OutputLabel("buffer", fqn) for fqn, _ in rebound]
        outputs = [loss, *(grad for _, grad in grads), *(value for _, value in rebound)]
        return [value.detach() for value in outputs]

    def _gradients(self, loss: torch.Tensor, state: tuple[torch.Tensor, ...]) -> list[tuple[str, torch.Tensor]]:
        wanted = [(slot.fqn, leaf) for slot, leaf in zip(self.slots, state, strict=True) if leaf.requires_grad]
        with compat.tagged_backward():
            grads = torch.autograd.grad(loss, [leaf for _, leaf in wanted], allow_unused=True)
        return [(fqn, grad) for (fqn, _), grad in zip(wanted, grads, strict=True) if grad is not None]

    def _rebound_buffers(self, placed: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        rebound = []
        for slot, tensor in zip(self.slots, placed, strict=True):
            now = current_tensor(slot)
            if now is tensor:
                continue
            if slot.is_param or not isinstance(now, torch.Tensor):
                raise RuntimeError(
                    f"forward replaces {slot.fqn!r} by {type(now).__name__}; a graph keeps the parameters that it was "
                    "captured with. Compute on the parameter instead of assigning to it"
                )
            if len(slot.owners) > 1:
                raise RuntimeError(
                    f"forward assigns a new tensor to buffer {slot.fqn!r}, which has other names ({slot.aliases}): in "
                    "eager the other name keeps the old tensor. Write in place (copy_), or register it once"
                )
            rebound.append((slot.fqn, now))
        known = {attribute for slot in self.slots for attribute in slot.owners_ids}
        for name, module in self.model.named_modules():
            for own in compat.tensor_slots(module):
                for attribute, value in own.items():
                    if value is not None and (id(module), attribute) not in known:
                        raise RuntimeError(
                            f"forward registers {attribute!r} on module {name or '(root)'!r}; register it in __init__"
                        )
        return rebound


def _fake_state(fake_mode: Any, slot: StateSlot, precision: CapturePrecision) -> torch.Tensor:
    if not slot.is_param:
        return fake_mode.from_tensor(local_tensor(slot.tensor), static_shapes=True)
    live = slot.tensor
    dtype = precision.param_dtype.get(slot.fqn, live.dtype)
    with fake_mode:
        fake = torch.empty_strided(slot.full_shape, _full_stride(slot), dtype=dtype, device=live.device)
    return fake.requires_grad_(live.requires_grad)


def _full_stride(slot: StateSlot) -> tuple[int, ...]:
    if shard_info(slot.tensor) is None:
        local = local_tensor(slot.tensor)
        # A parameter that is not dense (an expanded one) gets a dense gradient, as in eager.
        return tuple(local.stride())
    return contiguous_stride(slot.full_shape)


def _as_model_sees_it(slot: StateSlot, traced: torch.Tensor) -> torch.Tensor:
    """A tensor-parallel parameter is traced as its local part and seen by the model as the DTensor it is."""
    info = shard_info(slot.tensor)
    if info is not None and info.tp_mesh is not None and not info.plain:
        mesh, placements, shape, stride = info.tp_mesh, info.tp_placements, info.global_shape, info.global_stride
    elif isinstance(slot.tensor, DTensor):
        live = slot.tensor
        mesh, placements, shape, stride = live.device_mesh, live.placements, live.shape, live.stride()
    else:
        return traced
    return DTensor.from_local(traced, mesh, placements, run_check=False, shape=shape, stride=stride)


def _checked_loss(loss: Any, with_backward: bool) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise ValueError(f"train_fn returned {type(loss).__name__}, not a tensor; return the loss as a scalar tensor")
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    if loss.dim() != 0 or not loss.is_floating_point():
        raise ValueError(
            f"train_fn returned a loss of shape {tuple(loss.shape)} and dtype {loss.dtype}; it must be a floating "
            "scalar (0-d): reduce it with .mean() or .sum()"
        )
    if with_backward and not loss.requires_grad:
        raise ValueError(
            "the loss needs no gradient: no trainable parameter takes part in it (all frozen, detached, or computed "
            "under no_grad)"
        )
    return loss


@contextlib.contextmanager
def _eager_autocast_cache() -> Iterator[None]:
    """make_fx turns autocast's weight cache off; with it off a weight used twice is cast twice, unlike in eager."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def _cast_inputs(model: nn.Module, precision: CapturePrecision) -> Iterator[None]:
    """Float inputs of each unit's module are cast, ahead of any other hook, as FSDP2 does."""
    modules = dict(model.named_modules(remove_duplicate=False))
    with contextlib.ExitStack() as stack:
        for name, dtype in precision.input_dtype.items():

            def cast(_module: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype = dtype) -> Any:
                def one(value: Any) -> Any:
                    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

                return compat.pytree.tree_map(one, args), compat.pytree.tree_map(one, kwargs)

            if name in modules:
                handle = modules[name].register_forward_pre_hook(cast, prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
        yield


def _refuse_foreign_parameters(graph_module: GraphModule) -> None:
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(graph_module, node.target, None)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise RuntimeError(
                    f"the step uses a tensor of shape {tuple(value.shape)} that requires a gradient and belongs to no "
                    "parameter of the model; register it in the model, or detach it"
                )


@contextlib.contextmanager
def _named_faults() -> Iterator[None]:
    """A question to a fake tensor's data becomes an error that names the user's line."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, compat.data_dependent_errors()) and ".numpy() is not supported" not in str(error):
            error.add_note(f"while the step was captured, at {_user_line(error)}")
            raise
        raise RuntimeError(
            f"{_user_line(error)}: Python reads the data of a tensor here (a branch, .item(), .tolist(), or a shape "
            "that depends on values), and a graph has one path for all data; compute it with torch.where and the like, "
            "or pass the decision in as a Python value of input or label"
        ) from error


def _user_line(error: BaseException) -> str:
    ours = str(Path(__file__).parents[1])
    torchs = str(Path(torch.__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, torchs, "<"))
    ]
    if not frames:
        return "the step"
    return f"{frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`"
