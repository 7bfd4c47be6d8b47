"""One training step of one rank, run for real but for the numbers: no world, no memory, no arithmetic.

In: a checked config, a number of processes, the model's config. Out: a `Trace` of what the step holds when. The model,
FSDP's hooks, recomputation, the loss and the optimizer are those of the run, so there is no formula to keep true.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hp_components import OptimizersContainer
from hp_protocols import BaseModel
from hp_protocols.distributed import ParallelDims
from hp_protocols.errors import ConfigError
from hp_protocols.platform import get_platform
from hp_trainer import _torch_compat
from hp_trainer.cross_checks import document_mask_faults
from hp_trainer.environment import Environment
from hp_trainer.plan.held import Held, Interval, Use
from hp_trainer.plan.memory_watch import MemoryWatch
from hp_trainer.training_step import Batch, TrainingStep, count_micro_batches

if TYPE_CHECKING:
    from hp_trainer.hyper_trainer import HyperTrainer

__all__ = ["LocalSizes", "Trace", "local_sizes", "on_cpu", "trace_step"]

DEVICE_VARIABLE = "HP_DEVICE"


@dataclass(frozen=True, slots=True)
class LocalSizes:
    """Elements of a rank's parameters: of each layer, and of the rest."""

    layers: list[int]
    rest: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What one step of one rank holds.

    Attributes:
        intervals: the step, from its batch to the freeing of the gradients.
        sizes: elements of the rank's parameters.
        layer_states: what each layer (see `layers`) holds when the step begins.
        foreach: the optimizer updates many parameters at once.
    """

    intervals: list[Interval]
    sizes: LocalSizes
    layer_states: list[Held]
    foreach: bool


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """While entered, meshes are of the cpu, which every machine has: a pretended step uses no device."""
    before = os.environ.get(DEVICE_VARIABLE)
    os.environ[DEVICE_VARIABLE] = "cpu"
    try:
        yield
    finally:
        if before is None:
            del os.environ[DEVICE_VARIABLE]
        else:
            os.environ[DEVICE_VARIABLE] = before


def local_sizes(
    config: HyperTrainer.Config, model_config: BaseModel.Config, layers: str | None, world_size: int, rank: int
) -> LocalSizes:
    """How many elements one rank of a pretended world holds."""
    with get_platform().pretended_world(world_size, rank):
        environment = _environment(config, world_size, rank)
        return _sizes(_build(config, model_config, environment), layers)


def trace_step(
    config: HyperTrainer.Config, model_config: BaseModel.Config, layers: str | None, world_size: int
) -> Trace:
    """Run a step of rank 0, which holds most where shards are uneven, in the steady state: the optimizer has its
    states, and gradients of an earlier micro-batch are there if a step has several.

    Args:
        model_config: filled in for this run already.
        layers: the name of the model's list of layers, to tell them apart; None: it has none.

    Raises:
        ConfigError: the model, the loss or the optimizer cannot be had in this layout.
    """
    watch = MemoryWatch()
    with get_platform().pretended_world(world_size, 0), contextlib.ExitStack() as stack:
        environment = _environment(config, world_size, 0)
        module = _build(config, model_config, environment)
        sizes = _sizes(module, layers)
        stack.enter_context(_torch_compat.fake_tensors())
        stack.enter_context(watch.watching())
        module.to_empty(device="cpu")
        module.train()
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # Before the optimizer, which may use a gradient up as soon as it is there.
        _name_gradients(watch, module, parameters)
        step = _training_step(config, environment, module)
        _prime(step.optimizer, parameters)
        _name_states(watch, module, step.optimizer)
        if step.micro_batches > 1:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
                watch.hold(parameter.grad, Use.GRADIENTS)
        if layers is not None:
            _mark_layers(watch, list(getattr(module, layers)))
        states = _layer_states(watch, module, step.optimizer, layers)
        with _without_garbage():
            _run(watch, step, step.place(_batch(config)))
        foreach = any(group.get("foreach") for group in step.optimizer.param_groups)
        return Trace(watch.intervals, sizes, states, foreach)


def _run(watch: MemoryWatch, step: TrainingStep, batch: Batch) -> None:
    """The last micro-batch of a step, as `TrainingStep.run` does it, without reading a number."""
    watch.mark("forward")
    watch.forget()
    step.optimizer.begin_backward(last=True)
    step.backward(batch, torch.ones((), dtype=torch.int64))
    watch.mark("clipping")
    step.clip()
    watch.mark("update")
    step.optimizer.step()
    step.optimizer.zero_grad()
    watch.mark("end")


def _environment(config: HyperTrainer.Config, world_size: int, rank: int) -> Environment:
    dims = ParallelDims.from_config(config.parallelism, world_size)
    dims.build_meshes()
    return Environment(get_platform(), torch.device("cpu"), rank, world_size, dims)


def _build(config: HyperTrainer.Config, model_config: BaseModel.Config, environment: Environment) -> nn.Module:
    """The model, laid out; without memory."""
    spec, model = config.model_spec, model_config.build_on_meta(config.training.dtype)
    if spec.parallelize_fn is not None:
        return spec.parallelize_fn(model, parallel_dims=environment.parallel_dims, trainer_config=config)
    return model


def _training_step(config: HyperTrainer.Config, environment: Environment, module: nn.Module) -> TrainingStep:
    loss_fn = config.loss.build()
    loss_fn.check_model(module)
    # What the dataloader would say of itself.
    documents: Any = SimpleNamespace(document_mask=_masks_documents(config))
    if faults := document_mask_faults(documents, module):
        raise ConfigError(faults)
    return TrainingStep(
        environment=environment,
        model=module,
        loss_fn=loss_fn,
        optimizer=config.optimizer.build(model_parts=[module]),
        lr_scheduler=None,  # type: ignore[arg-type]
        max_norm=config.training.max_norm,
        micro_batches=count_micro_batches(config.training, environment.dp_degree),
    )


def _masks_documents(config: HyperTrainer.Config) -> bool:
    """Not every dataloader has the option."""
    return bool(getattr(config.dataloader, "document_mask", False))


def _batch(config: HyperTrainer.Config) -> Batch:
    """A batch as the dataloader gives it; with document boundaries, each row is one document."""
    rows, length = config.training.local_batch_size, config.training.seq_len
    names = ["input", "labels"]
    documents: dict[str, Any] = {}
    if _masks_documents(config):
        names.append("positions")
        documents["cu_seqlens"] = list(range(0, rows * length + 1, length))
    return {name: torch.zeros(rows, length, dtype=torch.int64) for name in names} | documents


# ---- what memory is for ---------------------------------------------------------------------------------------


def _prime(optimizer: OptimizersContainer, parameters: Sequence[nn.Parameter]) -> None:
    """Let the optimizer make its states, by a step of its own."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _name_states(watch: MemoryWatch, module: nn.Module, optimizer: OptimizersContainer) -> None:
    for parameter in module.parameters():
        watch.hold(parameter, Use.PARAMETERS)
    for states in _states(optimizer).values():
        for tensor in states:
            watch.hold(tensor, Use.OPTIMIZER)


def _states(optimizer: OptimizersContainer) -> dict[Any, list[torch.Tensor]]:
    """The tensors that the optimizer keeps for each parameter."""
    return {
        parameter: [value for value in state.values() if isinstance(value, torch.Tensor)]
        for one in optimizer
        for parameter, state in one.state.items()
    }


def _name_gradients(watch: MemoryWatch, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Name gradients when they come: of the rank's shards, and of the whole weights that FSDP puts in their place."""

    def name(use: Use) -> Any:
        return lambda parameter: None if parameter.grad is None else watch.hold(parameter.grad, use)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(name(Use.GRADIENTS))
    known = {id(parameter) for parameter in module.parameters()}

    def name_gathered(unit: nn.Module, _: Any) -> None:
        for parameter in unit.parameters():
            if id(parameter) in known:
                continue
            known.add(id(parameter))
            watch.hold(parameter, Use.GATHERED)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(name(Use.REDUCED))

    for unit in module.modules():
        if get_platform().is_data_parallel(unit):
            unit.register_forward_pre_hook(name_gathered)


def _layer_states(
    watch: MemoryWatch, module: nn.Module, optimizer: OptimizersContainer, layers: str | None
) -> list[Held]:
    kept = _states(optimizer)
    return [
        Held(
            parameters=sum(watch.bytes_of(p) for p in found),
            gradients=sum(watch.bytes_of(p.grad) for p in found if p.grad is not None),
            optimizer=sum(watch.bytes_of(tensor) for p in found for tensor in kept.get(p, ())),
        )
        for found in _by_layer(module, layers)[:-1]
    ]


def _by_layer(module: nn.Module, layers: str | None) -> list[list[nn.Parameter]]:
    """The parameters of each layer, and last those of the rest."""
    found = [list(layer.parameters()) for layer in (getattr(module, layers) if layers is not None else ())]
    within = {id(parameter) for group in found for parameter in group}
    return [*found, [parameter for parameter in module.parameters() if id(parameter) not in within]]


def _sizes(module: nn.Module, layers: str | None) -> LocalSizes:
    *each, rest = (sum(_local(p).numel() for p in found) for found in _by_layer(module, layers))
    return LocalSizes(each, rest)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, get_platform().DTensor) else parameter


# ---- where the step is ----------------------------------------------------------------------------------------


def _mark_layers(watch: MemoryWatch, layers: Sequence[nn.Module]) -> None:
    """Mark when each layer begins forward and backward; first in line, so that its gathering is within its interval
    and that of the next layer is not."""
    last = len(layers) - 1

    def before(index: int) -> Any:
        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            watch.mark("forward", index)
            if index == 0:
                _on_gradient(inputs, lambda _: watch.mark("backward"))

        return hook

    def after(index: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if index == last:
                watch.mark("loss")
            _on_gradient(output, lambda _: watch.mark("backward", index))

        return hook

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(before(index), prepend=True)
        layer.register_forward_hook(after(index), prepend=True)


def _on_gradient(values: Any, hook: Any) -> None:
    """Call `hook` when the gradient of the first tensor that has one is complete."""
    tensors = values if isinstance(values, list | tuple) else [values]
    found = next((t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad), None)
    if found is not None:
        found.register_hook(hook)


@contextlib.contextmanager
def _without_garbage() -> Iterator[None]:
    """Python's garbage, which holds tensors too, is gone before, and not collected at a chance moment within."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
