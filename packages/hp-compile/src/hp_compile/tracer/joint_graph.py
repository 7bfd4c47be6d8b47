"""What a capture gives: the graph, and what each of its inputs and outputs is.

In: nothing. Out: `JointGraph`, read by the passes, the trainer and `run_traced_graph`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

OutputKind = Literal["loss", "grad", "buffer"]


@dataclass(frozen=True, slots=True)
class OutputLabel:
    """What one output of the graph is: the loss, the gradient of a parameter, or a rebound buffer."""

    kind: OutputKind
    fqn: str = ""


@dataclass
class JointGraph:
    """A captured step. Placeholders are the state in `state_fqns` order, then the tensor leaves of the inputs.

    Attributes:
        graph_module: forward, loss and backward as one graph.
        state_fqns: name of each state placeholder; a tied tensor occurs once, under its first name.
        state_is_param: whether it is a parameter (else a buffer).
        input_spec: pytree structure of `(input, label)`.
        params: live parameters by FQN (first names).
        outputs: one label per output of the graph.
        trainable: parameters that required a gradient at capture.
        is_training: False for a forward-only graph.
        aliases: further names of tied tensors to the first one.
        reduce_dtypes: dtype of a gradient while it is reduced, where that was asked for.
    """

    graph_module: GraphModule
    state_fqns: tuple[str, ...]
    state_is_param: tuple[bool, ...]
    input_spec: Any
    params: dict[str, torch.Tensor]
    outputs: tuple[OutputLabel, ...]
    trainable: tuple[str, ...]
    is_training: bool = True
    aliases: dict[str, str] = field(default_factory=dict)
    reduce_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    nodes_captured: int = 0
    seconds: float = 0.0

    def state_nodes(self, graph_module: GraphModule | None = None) -> dict[str, Node]:
        """State placeholder nodes by FQN, of this graph or of a pass's result."""
        graph = (graph_module or self.graph_module).graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        return dict(zip(self.state_fqns, placeholders, strict=False))

    def gradient_positions(self) -> dict[str, int]:
        """Position of each parameter's gradient among the outputs."""
        return {label.fqn: at for at, label in enumerate(self.outputs) if label.kind == "grad"}


def output_node(graph_module: GraphModule) -> Node:
    return next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")


def results_of(output: Node) -> list[Node]:
    """What the graph returns, as a list of its own."""
    return list(output.args[0])  # type: ignore[arg-type]


def is_backward(node: Node) -> bool:
    return bool(node.meta.get("hp_backward", False))
