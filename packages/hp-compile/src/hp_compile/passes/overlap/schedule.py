"""Overlap of communication and computation (G20)."""
from __future__ import annotations
from typing import Any, ClassVar
from torch.fx import GraphModule
from hp_compile.passes.base import GraphPass

class AutoOverlapPass(GraphPass):
    name: ClassVar[str] = "auto_overlap"
    def run(self, graph_module: GraphModule, pass_config: Any, **context: Any) -> GraphModule:
        return graph_module
