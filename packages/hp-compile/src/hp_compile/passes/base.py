"""The contract of a pass: a straight line from graph to graph.

In: a graph module and what it was captured from. Out: a graph module. Free of torch at import.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import nn
    from torch.fx import GraphModule

    from hp_compile.pass_config import PassConfig
    from hp_compile.pass_plan import PassPlan

__all__ = ["GraphPass"]


class GraphPass(ABC):
    """One step of the pipeline. Subclasses set `name` and implement `run`.

    A pass keeps the placeholders and the number and order of the outputs: the trainer finds parameters and
    gradients by position. Every node it makes has `node.meta["val"]`, a fake tensor of its result: `insert_call` sees
    to that. Communication nodes carry a tag in `node.meta["hp_comm"]`; read it, do not guess.
    """

    name: ClassVar[str] = ""

    @abstractmethod
    def run(
        self,
        graph_module: GraphModule,
        pass_config: PassConfig,
        *,
        model: nn.Module,
        joint_graph: Any,
        pass_plan: PassPlan | None,
        mesh: Any,
    ) -> GraphModule:
        """Transform the graph; `mesh` is the resolved data-parallel mesh, or None without one."""
