"""What a reader does with the README: pastes its Python blocks, in order, into one interpreter.

In: the README beside the tests' folder. Out: its blocks; or what the blocks left behind, for ranks too.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def pasted(upto: int | None = None) -> dict[str, Any]:
    """The names after the first `upto` blocks (all of them by default)."""
    names: dict[str, Any] = {"__name__": "readme"}
    for number, block in enumerate(blocks()[:upto]):
        exec(compile(block, f"{README.name}, python block {number}", "exec"), names)
    return names


def on_a_rank(rank: int, world: int) -> dict[str, Any]:
    """Paste everything where a process group is initialised; every rank draws the same data, so ranks agree."""
    import torch

    torch.manual_seed(0)
    names = pasted()
    trainer, model = names["trainer"], names["model"]
    return {
        "passes": trainer.pipeline.names(),
        "collectives": sum("hp_comm" in node.meta for node in trainer.graph_module.graph.nodes),
        "largest": max((float(p.grad.abs().max()) for p in model.parameters() if p.grad.numel()), default=0.0),
        "rows": [p.shape[0] for p in model.parameters()],
    }
