"""Which nodes only re-describe a tensor, and which write to it through such a description.

In: a node and the tensor it may be a view of, or a graph. Out: yes or no, by the operator's schema; or an error.
"""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from hp_compile import _torch_compat as compat
from hp_compile.tracer.joint_graph import JointGraph


def is_view_of_first(node: Node, base: Node) -> bool:
    """Whether the node only re-describes `base`: cheap to make again, and it keeps the storage of `base` alive."""
    if node.op != "call_function" or not node.args or node.args[0] is not base or len(node.all_input_nodes) != 1:
        return False
    if node.target is operator.getitem:
        return True
    if not compat.is_operation(node.target) or node.target.namespace != "aten":
        return False
    schema = compat.schema_of(node.target)
    if schema.is_mutable or not schema.returns:
        return False
    alias = schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def refuse_writes_to_parameters(graph_module: GraphModule, joint: JointGraph) -> None:
    """On several ranks a write goes to a gathered copy and is lost with it, or follows one rank's data alone.

    Raises:
        RuntimeError: names the parameter, the operation and the module.
    """
    for fqn, node in joint.state_nodes(graph_module).items():
        if fqn in joint.params:
            _refuse_writes(fqn, node)


def _refuse_writes(fqn: str, source: Node) -> None:
    pending = [source]
    while pending:
        node = pending.pop()
        for user in node.users:
            if _writes_to(user, node):
                where = user.meta.get("hp_module") or "(root)"
                raise RuntimeError(
                    f"forward writes to parameter {fqn!r} in place ({user.target}, in module {where!r}), which is not "
                    "possible on several ranks: shards would lose the write, and replicas drift apart; move it behind "
                    "optimizer_step, or write to a buffer"
                )
            if is_view_of_first(user, node) or user.meta.get("hp_cast") == fqn:
                pending.append(user)


def _writes_to(user: Node, node: Node) -> bool:
    schema = compat.schema_of(user.target)
    return schema is not None and any(
        argument.alias_info is not None and argument.alias_info.is_write and given is node
        for argument, given in zip(schema.arguments, user.args, strict=False)
    )
