"""`compile.mode = graph`: the same training step, run by hp-compile as one graph (M52).

In: a model on the meta device, laid out but not sharded over data-parallel ranks, and the trainer's sections. Out: a
`GraphMode` with the optimizers on the shards, a `TrainingStep`, and optimizer state that eager runs load, and the
other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from hp_components import BaseLoss, OptimizersContainer
from hp_protocols import BaseModel
from hp_protocols.distributed import canonical_fqn, clip_grad_norm_, data_parallel_mode
from hp_protocols.errors import ConfigError, Fault
from hp_trainer.environment import Environment
from hp_trainer.training_step import Batch, TrainingStep, document_arguments

if TYPE_CHECKING:
    from hp_compile import GraphTrainer, PassConfig, PassPlan
    from hp_trainer.hyper_trainer import HyperTrainer
    from hp_trainer.model_building import BuiltModel

__all__ = ["GraphMode", "GraphOptimizerState", "GraphTrainingStep", "start_graph_mode"]


@dataclass(frozen=True, slots=True)
class GraphMode:
    """What the trainer holds in place of an eagerly sharded model."""

    trainer: GraphTrainer
    optimizer: OptimizersContainer

    def training_step(self, **parts: Any) -> GraphTrainingStep:
        """The step of these parts that runs the graph."""
        return GraphTrainingStep(graph=self.trainer, **parts)

    @property
    def optimizer_state(self) -> GraphOptimizerState:
        """What a checkpoint saves of the optimizers."""
        return GraphOptimizerState(self.optimizer)


def start_graph_mode(
    model: BuiltModel, config: HyperTrainer.Config, environment: Environment, loss_fn: BaseLoss
) -> GraphMode:
    """Shard the model's parameters, and make its optimizers on the shards. Nothing is captured before the first step.

    Raises:
        ConfigError: hp-compile is not installed, or the layout cannot be had in Graph Mode.
    """
    hp_compile = _import_hp_compile()
    module = model.module
    made: list[OptimizersContainer] = []

    def make_optimizer(_: Any) -> torch.optim.Optimizer:
        made.append(config.optimizer.build(model_parts=[module]))
        return made[0].optimizers[0]

    def train_fn(model: torch.nn.Module, batch: dict[str, Any], divisor: torch.Tensor) -> torch.Tensor:
        documents = {"position_ids": batch["positions"]} if "positions" in batch else {}
        return loss_fn.run_model(model, batch["labels"], batch["input"], **documents) / divisor

    trainer = hp_compile.GraphTrainer(
        module,
        train_fn,
        _pass_config(hp_compile.PassConfig, config, environment),
        _pass_plan(hp_compile, module),
        device=environment.device,
        mesh_context=_mesh_context(environment),
        optimizer_factory=make_optimizer,
        init_fn=lambda _: model.initialise(),
    )
    _ = trainer.optimizer  # shards the parameters, and fills them
    return GraphMode(trainer, made[0])


@dataclass(frozen=True, slots=True)
class GraphTrainingStep(TrainingStep):
    """A `TrainingStep` whose forward and backward are a graph."""

    graph: GraphTrainer

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        return self.graph.eval_step(_graph_inputs(batch), torch.ones((), device=self.environment.device))

    def backward(self, batch: Batch, divisor: torch.Tensor) -> torch.Tensor:
        return self.graph.train_step(_graph_inputs(batch), divisor)

    def clip(self) -> torch.Tensor:
        from hp_compile import distributed_view

        # As the distributed tensors that they are part of, so that the norm is the eager one to the last bit.
        holders = [
            SimpleNamespace(grad=distributed_view(parameter, parameter.grad))
            for parameter in self.model.parameters()
            if parameter.grad is not None
        ]
        return clip_grad_norm_(holders, self.max_norm)  # type: ignore[arg-type]


def _graph_inputs(batch: Batch) -> Batch:
    """What the graph reads of a batch.

    Host-side boundaries of documents would be numbers to a graph, other ones in every batch. Positions that start anew
    with each document say the same as a tensor.
    """
    names = ("input", "labels", "positions") if document_arguments(batch) else ("input", "labels")
    return {name: batch[name] for name in names}


class GraphOptimizerState:
    """The optimizers' state as a checkpoint holds it: shards become part of the whole tensors, as in eager runs."""

    def __init__(self, optimizer: OptimizersContainer) -> None:
        self.optimizer = optimizer
        self._parameters = {
            canonical_fqn(name): parameter
            for part in optimizer.model_parts
            for name, parameter in part.named_parameters(remove_duplicate=False)
        }

    def state_dict(self) -> dict[str, Any]:
        from hp_compile import distributed_view

        flat = self.optimizer.state_dict()
        return {key: self._convert(key, value, distributed_view) for key, value in flat.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict({key: _local(value) for key, value in state_dict.items()})

    def _convert(self, key: str, value: Any, view: Any) -> Any:
        kind, _, rest = key.partition(".")
        parameter = self._parameters.get(rest.rpartition(".")[0])
        if kind != "state" or parameter is None or not isinstance(value, torch.Tensor):
            return value
        return view(parameter, value)


def _local(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value


def _import_hp_compile() -> Any:
    try:
        import hp_compile
    except ImportError as error:
        raise ConfigError(
            Fault("compile.mode", f"graph needs hp-compile ({error})", hint='pip install "hp-trainer[graph]"')
        ) from error
    return hp_compile


def _pass_config(make: type[PassConfig], config: HyperTrainer.Config, environment: Environment) -> PassConfig:
    dims, training = environment.parallel_dims, config.training
    mixed = training.mixed_precision_param != training.dtype
    return make(
        dp_mode=data_parallel_mode(dims),
        fsdp_reshard_after_forward=config.parallelism.fsdp_reshard_after_forward != "never",
        grad_reduce="sum",
        param_dtype=training.mixed_precision_param if mixed else None,
        reduce_dtype=training.mixed_precision_reduce if mixed or dims.dp_cp_enabled else None,
    )


def _pass_plan(hp_compile: Any, module: torch.nn.Module) -> PassPlan:
    """What eager data parallelism shards together, as a plan: modules by name, and one list of modules as the rest."""
    units = module.segments() if isinstance(module, BaseModel) else []
    names = {id(found): name for name, found in module.named_modules()}
    alone = [unit for unit in units if isinstance(unit, torch.nn.Module)]
    joint = [unit for unit in units if not isinstance(unit, torch.nn.Module)]
    if len(joint) > 1:
        listed = ", ".join("+".join(names[id(found)] for found in unit) for unit in joint)
        raise ConfigError(
            Fault("compile.mode", f"graph can shard one group of modules together, this model has {listed}")
        )
    marks = {names[id(unit)]: hp_compile.FSDPModuleConfig() for unit in alone}
    return hp_compile.PassPlan(fsdp_modules=marks, fsdp_rest=True)


def _mesh_context(environment: Environment) -> Any:
    dims = environment.parallel_dims
    axes = ["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"]
    return SimpleNamespace(fsdp_non_moe_mesh=dims.get_mesh(axes), fsdp_dims=("fsdp", "dp_replicate"))
