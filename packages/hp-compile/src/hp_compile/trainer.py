"""GraphTrainer: compile a whole training step once, then run it.

In: a model, a `train_fn`, a `PassConfig` and maybe a `PassPlan`. Out: losses, an optimizer on local shards, and state
that can be checkpointed. Order of events in a compile: capture → agree → partition → passes → agree → run.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from hp_compile import _torch_compat as compat
from hp_compile.mesh import DataParallelMesh
from hp_compile.pass_config import PassConfig
from hp_compile.pass_plan import PassPlan
from hp_compile.passes.parallel.fsdp_pass import collective_schedule
from hp_compile.passes.parallel.reducer import LocalGradients
from hp_compile.passes.parallel.shards import (
    PlainTensorParallel,
    partition_model,
    plain_tensor_parallel,
    refuse_what_cannot_be_cut,
)
from hp_compile.passes.parallel.views import refuse_writes_to_parameters
from hp_compile.passes.pipeline import PassPipeline
from hp_compile.tracer.capture import TrainFn, capture, no_collections
from hp_compile.tracer.checks import refuse_open_autocast
from hp_compile.tracer.joint_graph import JointGraph
from hp_compile.tracer.signature import FlatInputs, flatten_inputs
from hp_compile.tracer.state import local_tensor, scan_state
from hp_compile.tracer.watch import ModelWatch
from hp_compile.training import checkpoint, report
from hp_compile.training.agreement import HIT, MISS, Agreement, schedule_hash
from hp_compile.training.device import resolve_device
from hp_compile.training.graph_cache import CompiledStep, GraphCache
from hp_compile.training.loop import check_counts, run_loop, shared_batches
from hp_compile.training.meta_init import InitFn, Unready, check_init_fn, common_seed, fill_meta
from hp_compile.training.optimizer import OptimizerConfig, OptimizerFactory, build_optimizer, clip_gradients
from hp_compile.training.shard_guard import ShardGuard
from hp_compile.training.start import start_of

log = logging.getLogger("hp_compile")


class GraphTrainer:
    """Captures, partitions and runs whole training steps of one model.

    Args:
        model: any `nn.Module`, on any device or on meta.
        train_fn: `train_fn(model, input, label) -> loss`, a floating scalar; input and label are any pytrees.
        pass_config: how to partition. It is copied, never changed.
        pass_plan: what to shard; None makes a unit of each child of every outermost ModuleList or ModuleDict.
        optimizer_config: keys of the built-in Adam (`lr`, `betas`, `eps`, `weight_decay`) and `grad_clip`.
        device: None tries npu, cuda, cpu.
        mesh_context: anything with `fsdp_non_moe_mesh` or `device_mesh`; its groups are used.
        optimizer_factory: `factory(params) -> Optimizer` in place of Adam.
        max_graphs: how many signatures are kept compiled.
        sync_module_states: take the first rank's weights instead of comparing them.
        init_fn: `init_fn(model)` fills a model from meta in place, in place of `reset_parameters`; sharded parameters
            are DTensors there, as under FSDP2. It must not communicate.
    """

    def __init__(
        self,
        model: nn.Module,
        train_fn: TrainFn,
        pass_config: PassConfig,
        pass_plan: PassPlan | None = None,
        optimizer_config: dict[str, Any] | None = None,
        device: str | torch.device | None = None,
        mesh_context: Any = None,
        *,
        optimizer_factory: OptimizerFactory | None = None,
        max_graphs: int = 8,
        sync_module_states: bool = False,
        init_fn: InitFn | None = None,
    ) -> None:
        self.model, self.train_fn = model, train_fn
        self._plan, self._mesh_context, self._sync = pass_plan, mesh_context, sync_module_states
        self._optimizer_factory, self._init_fn = optimizer_factory, init_fn
        self._pre_hook: Callable[[], None] | None = None
        self._hook_called = False
        self._mesh_known = self._cut = self._partitioned = False
        self._mesh: DataParallelMesh | None = None
        self._guard: ShardGuard | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._local_gradients: LocalGradients | None = None
        self._agreement = Agreement()
        self._agreement.agree(
            "reading the trainer's arguments",
            lambda: self._read_arguments(pass_config, optimizer_config, device, max_graphs),
        )

    def _read_arguments(
        self, pass_config: PassConfig, optimizer_config: Any, device: str | torch.device | None, max_graphs: int
    ) -> None:
        for value, wanted, name in (
            (self.model, nn.Module, "model"),
            (pass_config, PassConfig, "pass_config"),
            (self._plan, (PassPlan, type(None)), "pass_plan"),
        ):
            if not isinstance(value, wanted):
                raise TypeError(f"{name} is a {type(value).__name__}; see the signature of GraphTrainer")
        if not callable(self.train_fn):
            raise TypeError(
                f"train_fn is a {type(self.train_fn).__name__}; it must be train_fn(model, input, label) -> loss"
            )
        check_init_fn(self._init_fn, self.model)
        self._config = copy.copy(pass_config)
        self.pipeline = PassPipeline.from_config(self._config, self._plan)
        self._optimizer_config = OptimizerConfig.read(optimizer_config, self._optimizer_factory)
        self._graphs = GraphCache(max_graphs)
        self.device = resolve_device(device)
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            self.model.to(self.device)

    # ---- what a user calls ----

    def compile(self, sample_input: Any, sample_label: Any) -> None:
        """Compile for these inputs now instead of in the first step. A second call does nothing but say so."""
        if self._graphs.newest() is not None:
            log.info("compile: already compiled; further signatures are compiled when a step brings them")
            return
        self._step_for("train", sample_input, sample_label)

    def train_step(self, input: Any, label: Any) -> torch.Tensor:
        """Forward, backward and reduction; adds to the gradients. Returns this rank's own loss, 0-d and detached.

        Raises:
            TypeError, ValueError: input, label or loss are not what a graph can take (named by path).
            RuntimeError: the model changed, or the ranks would issue different collectives.
        """
        step, flat = self._step_for("train", input, label)
        outputs = self._run(step, flat)
        if self._local_gradients is not None and self._mesh is not None and self._mesh.size > 1:
            self._local_gradients.add(step.joint, outputs)
        else:
            self._add_gradients(step.joint, outputs)
        return outputs[0]

    def eval_step(self, input: Any, label: Any) -> torch.Tensor:
        """The loss alone: forward over the shards, in the model's present mode, without gradients."""
        step, flat = self._step_for("eval", input, label)
        return self._run(step, flat)[0]

    def optimizer_step(self) -> torch.Tensor | None:
        """Clip, step, zero the gradients. Returns the norm before clipping if `grad_clip` is set.

        Raises:
            RuntimeError: there are no gradients.
        """
        self._refuse_inside_full_params("optimizer_step()")
        optimizer = self._optimizer
        if optimizer is None:
            raise RuntimeError("optimizer_step before any train_step: there are no gradients to apply")
        if self._local_gradients is not None and self._mesh is not None and self._mesh.size > 1:
            self._local_gradients.reduce_into_parameters(self._agreement)
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if all(parameter.grad is None for parameter in params):
            raise RuntimeError("optimizer_step without gradients: call train_step at least once since the last one")
        norm = None
        if self._optimizer_config.grad_clip is not None:
            norm = clip_gradients(self.model.parameters(), self._optimizer_config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def train(
        self,
        dataloader: Iterable[tuple[Any, Any]],
        max_steps: int | None = None,
        log_interval: int | None = None,
        log_fn: Callable[[int, dict[str, Any]], None] | None = None,
        accumulation_steps: int = 1,
    ) -> list[float]:
        """One optimizer step per `accumulation_steps` batches `(input, label)`; returns the mean loss of each.

        `max_steps` counts optimizer steps. Every `log_interval` of them (1 if only `log_fn` is given)
        `log_fn(step, {"loss", "grad_norm"})` is called, or a line logged. Batches at the end that fill no step raise,
        and so does, on every rank, a loader that ends on one rank before the others.
        """
        check_counts(max_steps, log_interval, accumulation_steps)
        batches = shared_batches(dataloader, self._agreement, self._resolve_once)
        return run_loop(
            self.train_step, self.optimizer_step, batches, max_steps, log_interval, log_fn, accumulation_steps
        )

    @contextlib.contextmanager
    def full_params(self) -> Any:
        """Within it `model`'s parameters are whole, for export or inspection; changes to them are dropped."""
        self._partition()
        assert self._guard is not None
        with self._guard.full_params() as model:
            yield model

    def set_pytree_pre_hook(self, hook: Callable[[], None] | None) -> None:
        """`hook()` is called once, before the first inputs are read: the place to register pytree nodes."""
        if hook is not None and not callable(hook):
            raise TypeError(f"the hook is a {type(hook).__name__}; it is called without arguments")
        self._pre_hook, self._hook_called = hook, False

    def to(self, device: str | torch.device) -> GraphTrainer:
        """Move model and later batches; before the first step only."""
        if self._partitioned:
            raise RuntimeError(
                "to() after compile: graphs, shards and optimizer live on the old device; call it before"
            )
        self.device = resolve_device(device)
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            self.model.to(self.device)
        return self

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """On the local shards; made (and the model partitioned) when first asked for."""
        self._partition()
        assert self._optimizer is not None
        return self._optimizer

    @property
    def pass_config(self) -> PassConfig:
        """The trainer's own copy, with resolved degrees once compiled."""
        return self._config

    @property
    def graph_module(self) -> GraphModule:
        """The newest training graph, after all passes."""
        return self._newest().graph_module

    @property
    def joint_graph(self) -> JointGraph:
        """What the newest training graph was captured as."""
        return self._newest().joint

    def explain(self) -> str:
        """Units, shapes, shards, bytes gathered and reduced, and an estimate of peak memory, as a table."""
        step = self._newest()
        rows = report.unit_rows(step.graph_module, self._units, scan_state(self.model))
        head = report.summary_line(
            step.graph_module, step.joint, self.pipeline.names(), rows, scan_state(self.model), self._mesh
        )
        return f"{head}\n{report.table(rows, report.peak_estimate(rows, step.graph_module))}"

    def state_dict(self) -> dict[str, Any]:
        """`{"model": ..., "optimizer": ...}` by name, in true global shapes; works before compile, too."""
        self._partition()
        self._refuse_inside_full_params("trainer.state_dict()")
        assert self._optimizer is not None
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": checkpoint.optimizer_state_dict(self.model, self._optimizer),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state of the same model, saved on any number of ranks. Nothing changes if it does not fit.

        Raises:
            ValueError: names, shapes or parameter groups differ; they are listed.
        """
        self._partition()
        self._refuse_inside_full_params("load_state_dict()")
        optimizer = self.optimizer
        self._agreement.agree(
            "checking the state to load", lambda: checkpoint.check_state(self.model, optimizer, state_dict)
        )
        checkpoint.load_optimizer_state_dict(self.model, optimizer, state_dict["optimizer"])
        self.model.load_state_dict(state_dict["model"])

    # ---- how it works ----

    def _placed(self, input: Any, label: Any) -> FlatInputs:
        flat = flatten_inputs(input, label)
        if any(tensor.device != self.device for tensor in flat.tensors):
            leaves = [leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]
            flat = flatten_inputs(*compat.pytree.tree_unflatten(leaves, flat.spec))
        return flat

    def _step_for(self, kind: str, input: Any, label: Any) -> tuple[CompiledStep, FlatInputs]:
        """The graph for these inputs, on every rank, or an error on every rank."""
        self._refuse_inside_full_params(f"a {kind} step")
        self._resolve_once()
        if not self._partitioned and any(slot.tensor.is_meta for slot in self._watch.slots):
            self._partition()
        (found, flat), verdict = self._agreement.compare(
            "reading the inputs",
            lambda: self._find(kind, input, label),
            lambda both: (HIT, both[0].schedule_hash) if both[0] else (MISS, 0),
        )
        if found is not None and verdict.status == HIT and verdict.same_schedule:
            return found, flat
        with no_collections():
            joint = self._agreement.agree("capturing the step", lambda: None if found else self._capture(kind, flat))
            self._partition()
            step, verdict = self._agreement.compare(
                "running the passes",
                lambda: found or self._finish_step(kind, flat, joint),
                lambda step: (HIT, step.schedule_hash),
            )
            if not verdict.same_schedule:
                self._agreement.schedules_differ(step.schedule)
            if step is not found:
                self._graphs.add(step)
                self._report(step)
        return step, flat

    def _refuse_inside_full_params(self, what: str) -> None:
        if self._guard is not None:
            self._guard.refuse_inside(what)

    def _find(self, kind: str, input: Any, label: Any) -> tuple[CompiledStep | None, FlatInputs]:
        if self._pre_hook is not None and not self._hook_called:
            self._hook_called = True
            self._pre_hook()
        flat = self._placed(input, label)
        refuse_open_autocast()
        return self._graphs.find(kind, flat, self._key()), flat

    def _key(self) -> tuple[Any, ...]:
        """A graph is made by the passes, too: one that joins them after compile makes new graphs."""
        return *self._watch.key(), *map(id, self.pipeline)

    def _resolve_once(self) -> None:
        if not self._mesh_known:
            self._resolve()

    def _resolve(self) -> None:
        """What needs no communication, on every rank; then the mesh is built."""
        start = self._agreement.agree(
            "resolving plan and mesh",
            lambda: start_of(self.model, self._config, self._plan, self._mesh_context, sync_module_states=self._sync),
        )
        self._agreement.meet(start)
        if start.layout is not None:
            self._mesh, self._config = start.layout.build(self.device.type), start.layout.config
        self._agreement.over(self._mesh, start.others, self.device)
        self.pipeline.pass_config = self._config
        self._units, self._precision = start.units, start.precision
        self._watch = ModelWatch(self.model)
        self._unready = Unready({})
        self._mesh_known = True

    def _capture(self, kind: str, flat: FlatInputs) -> JointGraph:
        waiting = self._unready.names()
        if waiting:
            raise RuntimeError(
                f"{waiting[:5]} came on the meta device and nothing has filled them: their modules' reset_parameters() "
                "does not, or there is none. Load a state that has them (trainer.load_state_dict), or write to them in "
                "place after trainer.optimizer has been asked for"
            )
        self._graphs.warn_of_captures(kind, flat, self._key())
        with self._guard.open() if self._guard else contextlib.nullcontext():
            train = kind == "train"
            joint = capture(self.model, self.train_fn, flat, with_backward=train, precision=self._precision)
        # Here, not only in the pass: the first capture comes before anything is sharded.
        if self._mesh is not None and self._mesh.size > 1:
            refuse_writes_to_parameters(joint.graph_module, joint)
        return joint

    def _partition(self) -> None:
        """Shard the live parameters, once; then the optimizer on the shards."""
        if self._partitioned:
            return
        self._resolve_once()
        if self._cut:
            raise RuntimeError(
                "this trainer failed after it had sharded its model; build a fresh model and a new GraphTrainer"
            )
        on_meta = [slot.fqn for slot in scan_state(self.model) if slot.tensor.is_meta]
        if self._mesh is not None and self._mesh.size > 1:
            self._shard(self._mesh)
        if on_meta:
            seed = common_seed(self._mesh, self.device)
            self._unready = self._agreement.agree(
                "initialising parameters", lambda: fill_meta(self.model, self.device, seed, self._init_fn)
            )
        self._guard = ShardGuard(self.model, self._mesh)
        params = list(self.model.parameters())
        self._optimizer = self._agreement.agree(
            "building the optimizer", lambda: build_optimizer(params, self._optimizer_config, self._optimizer_factory)
        )
        if self._config.reduce_every == "optimizer_step":
            self._local_gradients = LocalGradients(self.model, self._units, self._config, self._mesh)
        self._watch = ModelWatch(self.model)
        self._partitioned = True

    def _shard(self, mesh: DataParallelMesh) -> None:
        slots = scan_state(self.model)
        if self._sync:
            self._agreement.broadcast(slots)
        different = [] if self._sync else self._agreement.differing_weights(slots)
        plain = self._agreement.agree(
            "checking what is to be sharded", lambda: self._checked_for_sharding(mesh, different)
        )
        self._cut = True
        partition_model(self.model, self._units, mesh, plain)

    def _checked_for_sharding(self, mesh: DataParallelMesh, different: list[str]) -> PlainTensorParallel | None:
        if different:
            raise RuntimeError(
                f"the ranks start from different weights ({', '.join(different[:5])}; this is rank {mesh.rank} of the "
                "data-parallel group); seed every rank alike, or pass sync_module_states=True"
            )
        refuse_what_cannot_be_cut(self.model, self._units, mesh)
        return plain_tensor_parallel(self.model, self._mesh_context)

    def _finish_step(self, kind: str, flat: FlatInputs, joint: JointGraph | None) -> CompiledStep:
        assert joint is not None
        graph_module = self.pipeline.run(joint.graph_module, model=self.model, joint_graph=joint, mesh=self._mesh)
        joint.params = dict(self._watch.by_name)
        schedule = collective_schedule(graph_module)
        return CompiledStep(
            kind, flat.without_data(), self._key(), joint, graph_module, schedule, schedule_hash(schedule)
        )

    def _report(self, step: CompiledStep) -> None:
        rows = report.unit_rows(step.graph_module, self._units, scan_state(self.model))
        names = self.pipeline.names()
        line = report.summary_line(step.graph_module, step.joint, names, rows, scan_state(self.model), self._mesh)
        again = (
            "" if len(self._graphs) == 1 else f" (signature {len(self._graphs)} of at most {self._graphs.max_graphs})"
        )
        log.info("%s%s", line, again)

    def _run(self, step: CompiledStep, flat: FlatInputs) -> list[torch.Tensor]:
        with torch.no_grad():
            state = [local_tensor(parameter) for parameter in self._watch.params]
            outputs = step.forward(*state, *self._watch.buffers(), *flat.tensors)
        if len(outputs) != len(step.joint.outputs):
            raise RuntimeError(
                f"the graph gave {len(outputs)} values for {len(step.joint.outputs)} outputs; a pass of the pipeline "
                "changed the number of outputs"
            )
        for label, value in zip(step.joint.outputs, outputs, strict=True):
            if label.kind == "buffer":
                self._watch.rebind(label.fqn, value)
        return outputs

    def _add_gradients(self, joint: JointGraph, outputs: list[torch.Tensor]) -> None:
        params = self._watch.by_name
        pairs = [
            (params[label.fqn], grad, label.fqn)
            for label, grad in zip(joint.outputs, outputs, strict=True)
            if label.kind == "grad"
        ]
        for parameter, grad, fqn in pairs:
            if grad.shape != local_tensor(parameter).shape:
                raise RuntimeError(
                    f"the gradient of {fqn!r} has shape {tuple(grad.shape)}, the parameter here has "
                    f"{tuple(local_tensor(parameter).shape)}; nothing was assigned"
                )
        with torch.no_grad():
            for parameter, grad, _ in pairs:
                if isinstance(parameter, DTensor):
                    grad = DTensor.from_local(
                        grad,
                        parameter.device_mesh,
                        parameter.placements,
                        run_check=False,
                        shape=parameter.shape,
                        stride=parameter.stride(),
                    )
                if parameter.grad is None:
                    parameter.grad = grad
                else:
                    parameter.grad += grad

    def _newest(self) -> CompiledStep:
        step = self._graphs.newest()
        if step is None:
            raise RuntimeError("nothing is compiled yet: call compile(input, label) or train_step first")
        return step
