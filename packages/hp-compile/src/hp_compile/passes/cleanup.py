"""Clean-up before partitioning: dead code, and operations that do nothing.

In: a captured graph. Out: the same computation, to the bit, in fewer nodes.
"""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from hp_compile import _torch_compat as compat
from hp_compile.passes.base import GraphPass
from hp_compile.passes.parallel.collectives import PURE_FUNCTIONS
from hp_compile.tracer.repair import grad_mode_on, own_copy

aten = torch.ops.aten

_ALIASES = frozenset({aten.detach.default, aten.alias.default})
# They update running statistics although their schema does not say so.
_QUIET_WRITERS = frozenset(
    {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}
)
_PURE = PURE_FUNCTIONS | {operator.getitem, own_copy, grad_mode_on}


def has_effect(node: Node) -> bool:
    """Whether removing the node could change anything but time: writes, random draws, communication, unknown code."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr" or node.target in _PURE:
        return False
    if not compat.is_operation(node.target):
        return True
    operation: Any = node.target
    if operation.namespace not in ("aten", "prims", "prim"):
        return True
    if operation in _QUIET_WRITERS or torch.Tag.nondeterministic_seeded in operation.tags:
        return True
    schema = compat.schema_of(operation)
    return schema.is_mutable or not schema.returns


class DeadCodeEliminationPass(GraphPass):
    """Removes what nobody reads, except what writes, draws random numbers or communicates."""

    name: ClassVar[str] = "dead_code_elimination"

    def run(self, graph_module: GraphModule, pass_config: Any, **context: Any) -> GraphModule:
        for node in reversed(graph_module.graph.nodes):
            if not node.users and not has_effect(node):
                graph_module.graph.erase_node(node)
        return graph_module


class CanonicalizeGraphPass(GraphPass):
    """Removes detach and alias, double transposition, and views to the shape that is there."""

    name: ClassVar[str] = "canonicalize_graph"

    def run(self, graph_module: GraphModule, pass_config: Any, **context: Any) -> GraphModule:
        graph = graph_module.graph
        for node in list(graph.nodes):
            replacement = _same_value(node)
            if replacement is not None:
                node.replace_all_uses_with(replacement)
                graph.erase_node(node)
        for node in reversed(graph.nodes):
            if not node.users and not has_effect(node):
                graph.erase_node(node)
        return graph_module


def _same_value(node: Node) -> Node | None:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    source = node.args[0]
    if node.target in _ALIASES:
        return source
    if node.target is aten.t.default and source.target is aten.t.default:
        return source.all_input_nodes[0]
    if node.target in (aten.view.default, aten.reshape.default):
        mine, before = node.meta.get("val"), source.meta.get("val")
        if isinstance(mine, torch.Tensor) and isinstance(before, torch.Tensor) and mine.shape == before.shape:
            return source
    return None
