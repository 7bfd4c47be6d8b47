"""What a traced graph needs before it gives what eager gives, bit for bit (G6, G8).

In: a freshly traced graph, nodes marked forward or backward. Out: the same graph, mended in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hp_compile import _torch_compat as compat
from hp_compile.tracer.joint_graph import OutputLabel, is_backward, output_node, results_of

aten = torch.ops.aten

_GRAD_MODE_READERS = frozenset({aten.mkldnn_rnn_layer.default})


def refuse_random_numbers_in_backward(graph_module: GraphModule) -> None:
    """Recomputation redraws: checkpoint restores the generator in Python, which a graph does not replay."""
    for node in graph_module.graph.nodes:
        if is_backward(node) and draws_random_numbers(node):
            raise RuntimeError(
                f"module {node.meta.get('hp_module') or '(root)'!r} draws random numbers ({node.target}) inside a "
                "region of torch.utils.checkpoint; the recomputation would draw others than forward did. Move the "
                "dropout out of the checkpointed region, or do not checkpoint it"
            )


def draws_random_numbers(node: Node) -> bool:
    if not compat.is_operation(node.target) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    # Attention kernels are tagged for their dropout, and draw nothing where there is none.
    for index, argument in enumerate(compat.schema_of(node.target).arguments):
        if argument.name == "dropout_p":
            given = node.args[index] if index < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0.0)
    return True


def let_views_meet_real_strides(graph_module: GraphModule) -> None:
    """`view` becomes `reshape`, which is the same (and as fast) wherever a view is possible.

    The meta functions of softplus_backward, elu_backward, hardtanh_backward and others promise contiguous results, and
    their CPU kernels follow the strides of the incoming gradient: a view that the trace found possible may not be.
    """
    for node in graph_module.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default


def grad_mode_on(operation: Any, *args: Any) -> Any:
    """Run a kernel that saves what backward needs only if gradients are on; its inputs need none."""
    with torch.enable_grad():
        return operation(*args)


def keep_grad_mode_where_kernels_read_it(graph_module: GraphModule) -> None:
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target in _GRAD_MODE_READERS:
            node.args = (node.target, *node.args)
            node.target = grad_mode_on


def done(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation of torch.distributed's plain calls, and wait until it is done."""
    result = operation(*args, **kwargs)
    for part in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(part, torch.ScriptObject):
            part.wait()  # type: ignore[attr-defined]
    return result


def wait_for_plain_collectives(graph_module: GraphModule) -> None:
    """`dist.all_reduce` and its like are captured as operations that return a `Work`, and the call that waits is not.

    A graph would read their buffers while they are being filled. Functional collectives have waits of their own.
    """
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "c10d":
            node.args = (node.target, *node.args)
            node.target = done


def cast_parameters(
    graph_module: GraphModule,
    state_fqns: Sequence[str],
    labels: Sequence[OutputLabel],
    masters: dict[str, torch.dtype],
    reduce_dtypes: dict[str, torch.dtype],
) -> None:
    """Where a parameter was traced in another dtype than it is kept in, cast it on the way in, its gradient out.

    The casts are tagged `hp_cast`; the data-parallel pass takes them into its collectives.
    """
    graph = graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for fqn, node in zip(state_fqns, placeholders, strict=False):
        value = node.meta["val"]
        if value.dtype == masters[fqn]:
            continue
        users = sorted(node.users)
        node.meta["val"] = value.to(masters[fqn])
        if users:
            with graph.inserting_before(users[0]):
                cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": value.dtype})
            cast.meta.update(val=value, hp_cast=fqn, hp_module=users[0].meta.get("hp_module", ""))
            node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
    output = output_node(graph_module)
    results = results_of(output)
    for at, (label, node) in enumerate(zip(labels, results, strict=True)):
        if label.kind != "grad":
            continue
        steps = [reduce_dtypes.get(label.fqn, node.meta["val"].dtype), masters[label.fqn]]
        for dtype in steps:
            if results[at].meta["val"].dtype == dtype:
                continue
            with graph.inserting_before(output):
                cast = graph.call_function(aten._to_copy.default, (results[at],), {"dtype": dtype})
            cast.meta.update(val=results[at].meta["val"].to(dtype), hp_cast=label.fqn, hp_backward=True)
            results[at] = cast
    output.args = (results,)


def own_copy(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A copy in the layout of the parameter."""
    copy = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def give_outputs_their_own_storage(
    graph_module: GraphModule, labels: Sequence[OutputLabel], strides: dict[str, tuple[int, ...]]
) -> None:
    """No output shares memory with the state, an input or another output; gradients have their parameter's layout."""
    graph = graph_module.graph
    output = output_node(graph_module)
    taken = {
        compat.storage_id(node.meta["val"])
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr") and isinstance(node.meta.get("val"), torch.Tensor)
    }
    results = results_of(output)
    for at, (label, node) in enumerate(zip(labels, results, strict=True)):
        value = node.meta["val"]
        stride = strides[label.fqn] if label.kind == "grad" and _is_dense(value, strides[label.fqn]) else None
        if stride is None and label.kind == "grad":
            stride = torch.empty(value.shape, device="meta").stride()
        wrong_layout = stride is not None and tuple(value.stride()) != tuple(stride) and value.numel() > 1
        if compat.storage_id(value) in taken or wrong_layout or node.op == "get_attr":
            with graph.inserting_before(output):
                copy = graph.call_function(
                    own_copy, (node, list(value.shape), list(stride if stride is not None else value.stride()))
                )
            copy.meta.update(val=torch.empty_like(value), hp_own=True, hp_backward=is_backward(node))
            results[at] = copy
        else:
            taken.add(compat.storage_id(value))
    output.args = (results,)


def _is_dense(value: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Whether strides cover a block of memory once, without holes."""
    expected = 1
    for step, size in sorted(zip(stride, value.shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True
