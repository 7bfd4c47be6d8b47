"""Gradients that accumulate whole on each rank and are reduced once per optimizer step (`reduce_every`).

In: whole gradients of one step after the other. Out: reduced gradients on the parameters, in the same buckets and
layout as the in-graph reduction.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from hp_compile.mesh import DataParallelMesh
from hp_compile.pass_config import PassConfig
from hp_compile.passes.parallel.buckets import ReductionBucket, reduction_buckets, reduction_layout
from hp_compile.passes.parallel.collectives import gradient_views, reduction_for, reduction_input
from hp_compile.passes.parallel.units import Unit
from hp_compile.tracer.joint_graph import JointGraph
from hp_compile.tracer.state import scan_state
from hp_compile.training.agreement import HIT, Agreement, schedule_hash


class LocalGradients:
    """Accumulators by parameter name; equal to FSDP2 with gradient sync off until the last micro-batch."""

    def __init__(self, model: nn.Module, units: list[Unit], config: PassConfig, mesh: DataParallelMesh | None) -> None:
        self._slots = {slot.fqn: slot for slot in scan_state(model) if slot.is_param}
        self._units, self._config, self._mesh = units, config, mesh
        self._held: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, joint: JointGraph, outputs: list[torch.Tensor]) -> None:
        grads = {label.fqn: grad for label, grad in zip(joint.outputs, outputs, strict=True) if label.kind == "grad"}
        for fqn, grad in grads.items():
            if grad.shape != self._slots[fqn].full_shape:
                raise RuntimeError(
                    f"the gradient of {fqn!r} has shape {tuple(grad.shape)}, not {tuple(self._slots[fqn].full_shape)}; "
                    "nothing was accumulated"
                )
        for fqn, grad in grads.items():
            held = self._held.get(fqn)
            if held is None:
                self._held[fqn] = grad
            else:
                held += grad

    @torch.no_grad()
    def reduce_into_parameters(self, agreement: Agreement) -> None:
        assert self._mesh is not None
        buckets = reduction_buckets(
            self._units, self._held, self._slots, self._config, lambda fqn: self._held[fqn].dtype
        )
        schedule: list[tuple[object, ...]] = [
            ("reduce", bucket.params, str(bucket.reduce_dtype), bucket.unit) for bucket in buckets
        ]
        _, verdict = agreement.compare("reducing gradients", lambda: schedule, lambda made: (HIT, schedule_hash(made)))
        if not verdict.same_schedule:
            agreement.schedules_differ(schedule)
        for bucket in reversed(buckets):
            self._reduce(bucket)
        self._held.clear()

    def _reduce(self, bucket: ReductionBucket) -> None:
        mesh = self._mesh
        assert mesh is not None
        chunks, numel, shapes, offsets = reduction_layout(bucket, self._slots, mesh)
        how = reduction_for(self._config.grad_reduce, bucket.reduce_dtype, mesh.size)
        op = dist.ReduceOp.AVG if how.op == "avg" else dist.ReduceOp.SUM
        grads = [self._held[fqn] for fqn in bucket.params]
        flat = reduction_input(grads, chunks, numel, bucket.reduce_dtype, how.predivide)
        if chunks > 1:
            assert mesh.shard is not None
            part = flat.new_empty(numel // chunks)
            dist.reduce_scatter_tensor(part, flat, op=op, group=mesh.shard.group)
            flat = part
        for axis in mesh.axes:
            if axis.size > 1 and not (bucket.sharded and axis is mesh.shard):
                dist.all_reduce(flat, op=op, group=axis.group)
        views = gradient_views(flat, shapes, offsets, bucket.master_dtype, how.postdivide)
        for fqn, grad in zip(bucket.params, views, strict=True):
            parameter = self._slots[fqn].tensor
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad += grad
