"""The findings as text: a table to print, and the two files.

In: a `Findings`. Out: markdown; `alignment.md` and `alignment.json` in a folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from align8.matrix import PATHS
from align8.verdict import Across, Cell, Findings

__all__ = ["summary", "to_markdown", "write"]

ALONE = "ran"


def write(findings: Findings, folder: Path) -> None:
    """Both files."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(finite(asdict(findings)), indent=2, allow_nan=False)
    (folder / "alignment.json").write_text(text + "\n", encoding="utf-8")
    (folder / "alignment.md").write_text(to_markdown(findings), encoding="utf-8")


def finite(value: Any) -> Any:
    """Plain data without infinity, which JSON does not have: None stands for a difference that no number measures."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_markdown(findings: Findings) -> str:
    """The matrix, what is to be said of single cells, and the distances between layouts."""
    parts = [
        "# Alignment\n",
        f"{summary(findings)}.\n",
        matrix_table(findings),
        *cell_notes(findings),
        "\n## Across layouts\n",
        f"Largest relative difference from layout 1 over {findings.steps} steps, the limit is "
        f"{findings.across_limit:g}: loss and gradient norm at worst over steps, weights (‖Δ‖₂/‖w‖₂) at worst over "
        "tensors.\n",
        across_table(findings.across_layouts),
    ]
    return "\n".join(parts) + "\n"


def summary(findings: Findings) -> str:
    """How many cells are what."""
    counts = {status: sum(cell.status == status for cell in findings.cells) for status in ("ok", "differs", "missing")}
    numbers = ", ".join(f"{number} {status}" for status, number in counts.items())
    if alone := sum(is_alone(cell) for cell in findings.cells):
        numbers = numbers.replace(" ok", f" ok ({alone} of them compared with no other run)", 1)
    refused = len(findings.not_applicable)
    return (
        f"{len(findings.cells)} cells of {findings.steps} steps: {numbers}; {refused} not applicable; "
        f"{findings.wall_seconds:.0f} s"
    )


def matrix_table(findings: Findings) -> str:
    """One line per row and layout, one column per path."""
    shown = {(cell.model, cell.row, cell.layout, cell.path): mark(cell) for cell in findings.cells}
    shown |= {(entry.model, entry.row, entry.layout, entry.path): "–" for entry in findings.not_applicable}
    lines = [f"| model | row | layout | {' | '.join(PATHS)} |", "|---|---|---|" + "---|" * len(PATHS)]
    for model, row, layout in dict.fromkeys(name[:3] for name in shown):
        marks = [shown.get((model, row, layout, path), "") for path in PATHS]
        lines.append(f"| {model} | {row} | {layout} | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


def mark(cell: Cell) -> str:
    if cell.status == "differs":
        size = "" if cell.largest_difference == math.inf else f": {cell.largest_difference:.1e}"
        return f"✗ step {cell.first_differing_step}{size}"
    if is_alone(cell):
        return ALONE
    return "✓" if cell.status == "ok" else "missing"


def is_alone(cell: Cell) -> bool:
    """Through and without a fault of its own, but held against no other run."""
    return cell.status == "ok" and not cell.compared_with


def cell_notes(findings: Findings) -> list[str]:
    """A line for each cell that is not ok, and for each reason why cells are not there by design."""
    notes = [
        f"- {cell.row}, {cell.layout}, {cell.path}: {cell.reason}"
        if cell.status == "missing"
        else f"- {cell.row}, {cell.layout}, {cell.path}: from step {cell.first_differing_step} on other than "
        f"{cell.reference} ({cell.what})"
        for cell in findings.cells
        if cell.status != "ok"
    ]
    if any(map(is_alone, findings.cells)):
        notes.append(f"- {ALONE}: went through, and is compared with no other run; those of its line are with it")
    by_design = {(entry.layout, entry.path, entry.reason) for entry in findings.not_applicable}
    return notes + [f"- {layout}, {path}: not applicable (–): {reason}" for layout, path, reason in sorted(by_design)]


def across_table(distances: Sequence[Across]) -> str:
    """The worst over paths, which are the same bits unless a cell says otherwise."""
    if not distances:
        return "Nothing to compare: no row was run on layout 1 and on another one.\n"
    lines = ["| row | layout | loss | gradient norm | weights |", "|---|---|---|---|---|"]
    for row, layout in dict.fromkeys((found.row, found.layout) for found in distances):
        own = [found for found in distances if (found.row, found.layout) == (row, layout)]
        worst = [max(getattr(found, name) for found in own) for name in ("loss", "grad_norm", "weights")]
        lines.append(f"| {row} | {layout} | {' | '.join(f'{value:.1e}' for value in worst)} |")
    return "\n".join(lines) + "\n"
