"""What a compile did, in one line and as a table (G30).

In: a partitioned graph. Out: text.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from hp_compile import _torch_compat as compat
from hp_compile.mesh import DataParallelMesh
from hp_compile.passes.parallel.units import Unit
from hp_compile.tracer.joint_graph import JointGraph
from hp_compile.tracer.state import StateSlot, local_tensor, shard_info


@dataclass(frozen=True)
class UnitRow:
    """One line of the table; bytes are per step and rank."""

    unit: str
    params: int
    sharded: int
    shapes: str
    bytes_whole: int
    bytes_local: int
    gathered: int
    reduced: int


def unit_rows(graph_module: GraphModule, units: list[Unit], slots: list[StateSlot]) -> list[UnitRow]:
    by_name = {slot.fqn: slot for slot in slots if slot.is_param}
    gathered, reduced = Counter[str](), Counter[str]()
    for node in graph_module.graph.nodes:
        tag = node.meta.get("hp_comm")
        if tag is not None and tag.stage == "launch":
            (gathered if tag.kind == "all_gather" else reduced)[tag.unit] += tag.nbytes
    rows = []
    for unit in units:
        own = [by_name[fqn] for fqn in unit.params]
        whole = sum(slot.full_shape.numel() * slot.tensor.element_size() for slot in own)
        local = sum(local_tensor(slot.tensor).nbytes for slot in own)
        cut = [slot for slot in own if (info := shard_info(slot.tensor)) is not None and info.sharded]
        shapes = ", ".join(f"{tuple(slot.full_shape)}→{tuple(slot.tensor.shape)}" for slot in cut[:2])
        shapes += ", …" if len(cut) > 2 else ""
        rows.append(
            UnitRow(
                unit.fqn or "(root)" if unit.planned else "(outside the plan)",
                len(own),
                len(cut),
                shapes or "replicated",
                whole,
                local,
                gathered[unit.fqn],
                reduced[unit.fqn],
            )
        )
    return rows


def peak_estimate(rows: list[UnitRow], graph_module: GraphModule) -> int:
    """Local state (with gradients and two Adam moments), the two largest gathered units, and live activations."""
    local = sum(row.bytes_local for row in rows)
    gathered = sorted((row.bytes_whole for row in rows if row.sharded), reverse=True)
    return 4 * local + 2 * sum(gathered[:2]) + activation_peak(graph_module)


def activation_peak(graph_module: GraphModule) -> int:
    """Peak of live intermediate bytes if each tensor is freed at its last use; views count nothing."""
    nodes = list(graph_module.graph.nodes)
    order = {node: at for at, node in enumerate(nodes)}
    last = {node: max((order[user] for user in node.users), default=order[node]) for node in nodes}
    ends: dict[int, int] = Counter()
    live = peak = 0
    for at, node in enumerate(nodes):
        size = _own_bytes(node)
        live += size
        ends[last[node]] += size
        peak = max(peak, live)
        live -= ends.pop(at, 0)
    return peak


def _own_bytes(node: Node) -> int:
    value = node.meta.get("val")
    if node.op != "call_function" or "hp_comm" in node.meta or not isinstance(value, torch.Tensor):
        return 0
    schema = compat.schema_of(node.target)
    if schema is not None and schema.returns and schema.returns[0].alias_info is not None:
        return 0
    return value.numel() * value.element_size()


def summary_line(
    graph_module: GraphModule,
    joint: JointGraph,
    passes: list[str],
    rows: list[UnitRow],
    slots: list[StateSlot],
    mesh: DataParallelMesh | None,
) -> str:
    params = [slot for slot in slots if slot.is_param]
    sharded = sum(1 for slot in params if (info := shard_info(slot.tensor)) is not None and info.sharded)
    launches = Counter(
        node.meta["hp_comm"].kind
        for node in graph_module.graph.nodes
        if "hp_comm" in node.meta and node.meta["hp_comm"].stage == "launch"
    )
    comm = ", ".join(f"{count} {kind}" for kind, count in sorted(launches.items())) or "none"
    ranks = "1 rank" if mesh is None else f"{mesh.size} ranks ({mesh.mode})"
    return (
        f"compiled: {len(graph_module.graph.nodes)} nodes, captured in {joint.seconds:.2f} s; passes: "
        f"{', '.join(passes)}; {ranks}: {sharded} parameters sharded, {len(params) - sharded} replicated, "
        f"{sum(row.bytes_local for row in rows) / 2**20:.1f} MiB of parameters per rank; collectives per step: {comm}"
    )


def table(rows: list[UnitRow], peak: int) -> str:
    head = ("unit", "params", "sharded", "whole → shard", "MiB whole", "MiB here", "MiB gathered", "MiB reduced")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        sizes = (row.bytes_whole, row.bytes_local, row.gathered, row.reduced)
        mib = [f"{size / 2**20:.3f}" for size in sizes]
        lines.append((row.unit, str(row.params), str(row.sharded), row.shapes, *mib))
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*text, f"peak memory of a step, estimated: {peak / 2**20:.1f} MiB per rank"])
