"""Which nodes only re-describe a tensor.

In: a node and the tensor it may be a view of. Out: yes or no, by the operator's schema.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node


def is_view_of_first(node: Node, base: Node) -> bool:
    """Whether the node only re-describes `base`: cheap to make again, and it keeps the storage of `base` alive."""
    if node.op != "call_function" or not node.args or node.args[0] is not base or len(node.all_input_nodes) != 1:
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    schema = node.target._schema
    if schema.is_mutable or not schema.returns:
        return False
    alias = schema.returns[0].alias_info
    return alias is not None and not alias.is_write
