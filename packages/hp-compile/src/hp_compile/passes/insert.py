"""New nodes for passes: a call with the meta that later passes read.

In: a graph at its insertion point, an operation and its arguments. Out: the node, its value's shape and dtype known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from hp_compile import _torch_compat as compat
from hp_compile.tracer.joint_graph import is_backward


def insert_call(graph: Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """`graph.call_function(target, args, kwargs)`, with `meta["val"]` computed from the arguments' values.

    Nothing is computed for real: values are fake tensors. A node with an argument from backward belongs to backward.

    Raises:
        RuntimeError: an argument has no value, or the operation refuses such arguments; both are named.
    """
    node = graph.call_function(target, args, kwargs)
    sources = node.all_input_nodes
    for source in sources:
        if "val" not in source.meta:
            graph.erase_node(node)
            raise RuntimeError(f"{target} reads node {source.name!r}, which has no meta['val']; set it first")
    values = compat.pytree.tree_map(
        lambda given: given.meta["val"] if isinstance(given, Node) else given, (args, kwargs)
    )
    try:
        with torch.no_grad(), _fake_mode(graph):
            node.meta["val"] = target(*values[0], **values[1])
    except Exception as error:
        graph.erase_node(node)
        shapes = ", ".join(f"{source.name} {_shape(source.meta['val'])}" for source in sources)
        raise RuntimeError(f"{target} cannot be computed from {shapes or 'these arguments'}: {error}") from error
    node.meta["hp_backward"] = any(is_backward(source) for source in sources)
    return node


def _fake_mode(graph: Graph) -> Any:
    """That of the capture: what makes tensors out of nothing must make fake ones."""
    for node in graph.nodes:
        mode = compat.fake_mode_of(node.meta.get("val"))
        if mode is not None:
            return mode
    return contextlib.nullcontext()


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
