"""The alignment matrix: model × layout × path, bit for bit within a layout. Out: a table, alignment.md, alignment.json.

A cell is one of legacy `LLMTrainer`, `HyperTrainer` eager, `HyperTrainer` graph on one layout of 8 processes. None
of the cells can run yet: the legacy trainer and Graph Mode in the trainer are still to come, so each is `missing`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

MODELS = ("qwen3_5",)
LAYOUTS = ("1", "ddp8", "fsdp8", "hsdp2x4", "tp2xfsdp4", "tp2xfsdp4+sp", "cp2xfsdp4")
PATHS = ("legacy", "eager", "graph")


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the matrix: status is ok, differs or missing; the last two say where and by how much it differs."""

    model: str
    layout: str
    path: str
    status: str
    first_differing_step: int | None = None
    largest_difference: float | None = None


def matrix() -> list[Cell]:
    return [Cell(model, layout, path, "missing") for model in MODELS for layout in LAYOUTS for path in PATHS]


def to_markdown(cells: list[Cell]) -> str:
    marks = {"ok": "✓", "missing": "missing"}
    lines = [f"| model | layout | {' | '.join(PATHS)} |", "|---|---|" + "---|" * len(PATHS)]
    for model in MODELS:
        for layout in LAYOUTS:
            row = {cell.path: cell for cell in cells if (cell.model, cell.layout) == (model, layout)}
            shown = [
                marks.get(row[path].status, f"✗ step {row[path].first_differing_step}: {row[path].largest_difference}")
                for path in PATHS
            ]
            lines.append(f"| {model} | {layout} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/align8"), help="folder for the two files")
    arguments = parser.parse_args()
    cells = matrix()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "alignment.md").write_text(to_markdown(cells))
    document = {"cells": [asdict(cell) for cell in cells], "not_applicable": []}
    (arguments.out / "alignment.json").write_text(json.dumps(document, indent=2) + "\n")
    counts = {status: sum(cell.status == status for cell in cells) for status in ("ok", "differs", "missing")}
    print(to_markdown(cells))
    print(", ".join(f"{number} {status}" for status, number in counts.items()) + f"; written to {arguments.out}")
    print("missing: the cells come with the legacy trainer and Graph Mode in HyperTrainer")
    return 1 if counts["differs"] else 0


if __name__ == "__main__":
    sys.exit(main())
