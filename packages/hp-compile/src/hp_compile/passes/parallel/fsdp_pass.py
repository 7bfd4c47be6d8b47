"""The data-parallel pass: gathers before use, reductions after the last gradient of a unit (G10 to G18).

In: a captured graph over whole parameters. Out: the same step over shards (fsdp, hsdp) or replicas (ddp), the live
model partitioned in place. Order of events per unit: gather, forward; gather again, backward; reduce.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch.fx import GraphModule, Node

from hp_compile import _torch_compat as compat
from hp_compile.mesh import DataParallelMesh, MeshAxis, resolve_mesh
from hp_compile.pass_config import PassConfig
from hp_compile.passes.base import GraphPass
from hp_compile.passes.parallel.buckets import (
    ReductionBucket,
    reduction_buckets,
    reduction_layout,
    split_by_size,
)
from hp_compile.passes.parallel.collectives import (
    CommKind,
    CommTag,
    gather_inputs,
    gradient_views,
    reduction_for,
    reduction_input,
)
from hp_compile.passes.parallel.shards import partition_model
from hp_compile.passes.parallel.units import Unit, resolve_units
from hp_compile.passes.parallel.views import is_view_of_first, refuse_writes_to_parameters
from hp_compile.tracer.joint_graph import JointGraph, is_backward, output_node, results_of
from hp_compile.tracer.repair import done, give_outputs_their_own_storage
from hp_compile.tracer.state import StateSlot, contiguous_stride, scan_state, shard_info

c10d = compat.c10d_ops()
Region = Literal["forward", "backward"]


class FSDPPass(GraphPass):
    """Partitions parameters and gradients over the data-parallel mesh. One rank: nothing to do."""

    name: ClassVar[str] = "fsdp"

    def run(
        self,
        graph_module: GraphModule,
        pass_config: PassConfig,
        *,
        model: torch.nn.Module,
        joint_graph: JointGraph,
        pass_plan: Any = None,
        mesh: DataParallelMesh | None = None,
    ) -> GraphModule:
        if mesh is None:
            mesh, pass_config = resolve_mesh(pass_config)
        if mesh is None or mesh.size == 1:
            return graph_module
        units = resolve_units(model, pass_plan, reshard=pass_config.fsdp_reshard_after_forward)
        partition_model(model, units, mesh)
        refuse_writes_to_parameters(graph_module, joint_graph)
        rewrite = _Rewrite(graph_module, joint_graph, pass_config, mesh, scan_state(model))
        for unit in units:
            rewrite.gather(unit)
        if pass_config.reduce_every == "train_step":
            present = joint_graph.gradient_positions()
            for bucket in reduction_buckets(units, present, rewrite.slots, pass_config, rewrite.reduced_dtype):
                rewrite.reduce(bucket)
        else:
            rewrite.keep_local_gradients()
        rewrite.finish()
        if pass_config.reduce_every == "optimizer_step":
            strides = {fqn: contiguous_stride(slot.full_shape) for fqn, slot in rewrite.slots.items()}
            give_outputs_their_own_storage(graph_module, joint_graph.outputs, strides)
        return graph_module


class _Rewrite:
    """Edits one graph; nodes are inserted, never re-ordered."""

    def __init__(
        self,
        graph_module: GraphModule,
        joint: JointGraph,
        config: PassConfig,
        mesh: DataParallelMesh,
        slots: list[StateSlot],
    ) -> None:
        self.graph, self.joint, self.config, self.mesh = graph_module.graph, joint, config, mesh
        self.slots = {slot.fqn: slot for slot in slots if slot.is_param}
        self.state = joint.state_nodes(graph_module)
        self.output = output_node(graph_module)
        self.results = results_of(self.output)
        self.positions = joint.gradient_positions()
        self.order = {node: at for at, node in enumerate(self.graph.nodes)}
        state = next(iter(self.state.values())).meta["val"]
        self._fake_mode, self._device = compat.fake_mode_of(state) or contextlib.nullcontext(), state.device
        self._bucket = 0
        self._sources: dict[str, Node] = {}
        self._strip_gradient_casts()

    # ---- gathers ----

    def gather(self, unit: Unit) -> None:
        params = []
        for fqn in unit.params:
            info = shard_info(self.slots[fqn].tensor)
            if info is not None and info.sharded:
                params.append(fqn)
        groups: dict[torch.dtype, list[str]] = {}
        for fqn in params:
            groups.setdefault(self._source(fqn).meta["val"].dtype, []).append(fqn)
        for fqns in groups.values():
            for part in split_by_size(fqns, self.slots, self.config.bucket_mb):
                self._gather_bucket(unit, part)

    def _source(self, fqn: str) -> Node:
        """What forward computes with: the placeholder, or its cast to the traced dtype."""
        node = self.state[fqn]
        users = list(node.users)
        return users[0] if len(users) == 1 and users[0].meta.get("hp_cast") == fqn else node

    def _gather_bucket(self, unit: Unit, fqns: list[str]) -> None:
        forward: dict[str, list[Node]] = {}
        backward: dict[str, list[tuple[Node, Node]]] = {}
        for fqn in fqns:
            source = self._source_of(fqn)
            uses = [user for user in source.users if not is_backward(user)]
            late = _backward_uses(source)
            if not unit.reshard and (uses or late):
                forward[fqn] = list(source.users)
            elif uses or not late:
                forward.update({fqn: uses} if uses else {})
                backward.update({fqn: late} if late else {})
            else:
                backward[fqn] = late
        early: dict[str, Node] = {}
        if forward:
            first = min((user for users in forward.values() for user in users), key=self._at)
            region: Region = "backward" if is_backward(first) else "forward"
            early = self._insert_gather(unit, list(forward), first, region)
            for fqn, users in forward.items():
                for user in users:
                    user.replace_input_with(self._source_of(fqn), early[fqn])
        if backward:
            first = min((user for pairs in backward.values() for user, _ in pairs), key=self._at)
            gathered = self._insert_gather(unit, list(backward), first, "backward")
            again = {self._source_of(fqn): gathered[fqn] for fqn in backward}
            # Views in forward hang on the first gather by now.
            again.update({early[fqn]: gathered[fqn] for fqn in backward if fqn in early})
            self._rebuild_views(backward, again, first)
        for fqn in fqns:
            source = self._source_of(fqn)
            if source is not self.state[fqn] and not source.users:
                self.graph.erase_node(source)
        self._sources.clear()

    def _source_of(self, fqn: str) -> Node:
        """Like `_source`, remembered: while a bucket is rewritten its users change."""
        return self._sources.setdefault(fqn, self._source(fqn))

    def _insert_gather(self, unit: Unit, fqns: list[str], before: Node, region: Region) -> dict[str, Node]:
        axis = self.mesh.shard
        assert axis is not None
        full = {fqn: self.slots[fqn].full_shape for fqn in fqns}
        dtype = self._source_of(fqns[0]).meta["val"].dtype
        rows = [-(-full[fqn][0] // axis.size) for fqn in fqns]
        numel = sum(count * axis.size * full[fqn][1:].numel() for fqn, count in zip(fqns, rows, strict=True))
        shards: Any = [self.state[fqn] for fqn in fqns]
        whole = all(full[fqn][0] % axis.size == 0 and self.state[fqn].meta["val"].dtype == dtype for fqn in fqns)
        tag = self._tagger("all_gather", unit.fqn, region, axis, dtype, numel)
        gathered = {}
        # What forward computes with; where rows were padded, the gathered tensor has more of them.
        wanted = [self._source_of(fqn).meta["val"] for fqn in fqns]
        padded = [
            value if count * axis.size == value.shape[0] else self._empty((count * axis.size, *value.shape[1:]), dtype)
            for value, count in zip(wanted, rows, strict=True)
        ]
        near = (region, before)
        with self.graph.inserting_before(before):
            if not whole:
                sent = [
                    self._empty((count, *value.shape[1:]), dtype) for value, count in zip(wanted, rows, strict=True)
                ]
                shards = self._call(gather_inputs, (shards, rows, dtype), tag("prepare"), sent, near)
            gather = (shards, axis.size, axis.group_name)
            launch = self._call(c10d.all_gather_into_tensor_coalesced.default, gather, tag("launch"), padded, near)
            for at, fqn in enumerate(fqns):
                item = self._call(operator.getitem, (launch, at), tag("finish"), padded[at], near)
                ready = self._call(c10d.wait_tensor.default, (item,), tag("wait"), padded[at], near)
                if padded[at] is not wanted[at]:
                    cut = (ready, 0, 0, full[fqn][0])
                    ready = self._call(torch.ops.aten.slice.Tensor, cut, tag("finish"), wanted[at], near)
                gathered[fqn] = ready
        return gathered

    def _rebuild_views(self, uses: dict[str, list[tuple[Node, Node]]], rebuilt: dict[Node, Node], before: Node) -> None:
        """Backward reads views that forward made of the parameter: make them again from the second gather."""

        def rebuild(node: Node) -> Node:
            if node not in rebuilt:
                base = rebuild(node.all_input_nodes[0])
                with self.graph.inserting_before(before):
                    copy = self.graph.create_node(node.op, node.target, (base, *node.args[1:]), dict(node.kwargs))
                copy.meta.update(node.meta, hp_backward=True)
                rebuilt[node] = copy
            return rebuilt[node]

        for pairs in uses.values():
            for user, read in pairs:
                user.replace_input_with(read, rebuild(read))

    # ---- reductions ----

    def reduced_dtype(self, fqn: str) -> torch.dtype:
        return self.joint.reduce_dtypes.get(fqn) or self.results[self.positions[fqn]].meta["val"].dtype

    def _strip_gradient_casts(self) -> None:
        """Casts of gradients become part of the reduction, and its result has its own storage anyway."""
        for fqn, at in self.positions.items():
            node = self.results[at]
            while node.meta.get("hp_cast") == fqn or node.meta.get("hp_own"):
                node = node.all_input_nodes[0]
            self.results[at] = node

    def keep_local_gradients(self) -> None:
        """Gradients leave the graph whole, in the dtype in which they accumulate until the optimizer step."""
        for fqn, at in self.positions.items():
            node = self.results[at]
            dtype = self.reduced_dtype(fqn)
            if node.meta["val"].dtype != dtype:
                with self.graph.inserting_before(self.output):
                    cast = self.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
                cast.meta.update(val=node.meta["val"].to(dtype), hp_backward=True)
                self.results[at] = cast

    def reduce(self, bucket: ReductionBucket) -> None:
        chunks, numel, shapes, offsets = reduction_layout(bucket, self.slots, self.mesh)
        how = reduction_for(self.config.grad_reduce, bucket.reduce_dtype, self.mesh.size)
        grads = [self.results[self.positions[fqn]] for fqn in bucket.params]
        last = max(grads, key=self._at)
        mesh, near = self.mesh, ("backward", last)
        dtype = bucket.reduce_dtype
        kind: CommKind = "reduce_scatter" if chunks > 1 else "all_reduce"
        axes = [axis for axis in mesh.axes if axis.size > 1]
        tag = self._tagger(kind, bucket.unit, "backward", axes[-1], dtype, numel)
        cursor = self._after(last)
        with self.graph.inserting_before(cursor):
            filling = (grads, chunks, numel, dtype, how.predivide)
            flat = self._call(reduction_input, filling, tag("prepare"), self._empty((numel,), dtype), near)
            part = flat.meta["val"] if chunks == 1 else self._empty((numel // chunks,), dtype)
            if chunks > 1:
                assert mesh.shard is not None
                scatter = (flat, how.op, chunks, mesh.shard.group_name)
                flat = self._call(c10d.reduce_scatter_tensor.default, scatter, tag("launch"), part, near)
                flat = self._call(c10d.wait_tensor.default, (flat,), tag("wait"), part, near)
            for axis in mesh.axes:
                if axis.size > 1 and not (bucket.sharded and axis is mesh.shard):
                    again = self._tagger("all_reduce", bucket.unit, "backward", axis, dtype, numel // chunks, same=True)
                    reduce = (flat, how.op, axis.group_name)
                    flat = self._call(c10d.all_reduce_.default, reduce, again("launch"), part, near)
                    flat = self._call(c10d.wait_tensor.default, (flat,), again("wait"), part, near)
            args = (flat, shapes, offsets, bucket.master_dtype, how.postdivide)
            local = [self._empty(shape, bucket.master_dtype) for shape in shapes]
            views = self._call(gradient_views, args, tag("finish"), local, near)
            for at, fqn in enumerate(bucket.params):
                item = self._call(operator.getitem, (views, at), tag("finish"), local[at], near)
                self.results[self.positions[fqn]] = item

    # ---- common ----

    def finish(self) -> None:
        self.output.args = (self.results,)
        for node in reversed(self.graph.nodes):
            if not node.users and (node.meta.get("hp_cast") or node.meta.get("hp_own")):
                self.graph.erase_node(node)

    def _at(self, node: Node) -> int:
        return self.order[node]

    def _after(self, node: Node) -> Node:
        """Where a reduction goes: right behind its last gradient (and behind reductions already there)."""
        cursor = node.next
        while "hp_comm" in cursor.meta and cursor not in self.order:
            cursor = cursor.next
        return cursor

    def _call(self, target: Any, args: tuple[Any, ...], tag: CommTag, value: Any, near: tuple[str, Node]) -> Node:
        """`near` is the region, and a node of the module that the collective serves."""
        node = self.graph.call_function(target, args)
        region, served = near
        module = served.meta.get("hp_module", "")
        node.meta.update(val=value, hp_comm=tag, hp_backward=region == "backward", hp_module=module)
        return node

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The value of a node of ours: as fake as those of the capture."""
        with self._fake_mode:
            return torch.empty(shape, dtype=dtype, device=self._device)

    def _tagger(
        self,
        kind: CommKind,
        unit: str,
        region: Any,
        axis: MeshAxis,
        dtype: torch.dtype,
        numel: int,
        same: bool = False,
    ) -> Callable[[Any], CommTag]:
        """Tags for a new bucket, or (`same`) for a second collective of the bucket before."""
        self._bucket += not same
        bucket = self._bucket
        nbytes = numel * dtype.itemsize

        def tag(stage: Any) -> CommTag:
            return CommTag(kind, stage, unit, region, bucket, axis.name, str(dtype), numel, nbytes)

        return tag


def _backward_uses(source: Node) -> list[tuple[Node, Node]]:
    """(user, what it reads) for each backward node that reads the parameter or a forward view of it."""
    found, pending = [], [source]
    while pending:
        node = pending.pop()
        for user in node.users:
            if is_backward(user) or user.op == "output":
                found.append((user, node))
            elif is_view_of_first(user, node):
                pending.append(user)
    return found


def collective_schedule(graph_module: GraphModule) -> list[tuple[Any, ...]]:
    """The collectives of a graph in order, without names that differ between ranks (G7)."""
    schedule: list[tuple[Any, ...]] = []
    for node in graph_module.graph.nodes:
        tag = node.meta.get("hp_comm")
        if tag is not None and tag.stage == "launch":
            schedule.append((tag.kind, tag.axis, tag.dtype, tag.numel, tag.unit))
        elif node.target is done:
            schedule.append((str(node.args[0]), _shapes(node)))
        elif tag is None and compat.is_functional_collective(node.target):
            schedule.append((str(node.target), _shapes(node)))
    return schedule


def _shapes(node: Node) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(value.shape) for value in compat.tensors_in(node.meta.get("val")))
