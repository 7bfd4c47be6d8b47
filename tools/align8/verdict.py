"""From finished runs to cells: ok, differs or missing, and the distances between layouts.

In: the runs, and how each process ended. Out: a `Findings`, which alignment.json holds as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from align8.copies import differing_copies
from align8.evidence import contradiction
from align8.launch import NO_REPORT, RUN_FOLDER, outcomes
from align8.matrix import MODEL, PATHS, PLAIN, REFERENCE_LAYOUT, NotApplicable, Run
from align8.results import Difference, Distance, Result, difference, distance, read_result

__all__ = ["ACROSS", "Across", "Cell", "Findings", "judge"]

ACROSS = 1e-5
"""How far a layout may be from layout 1, in fp32."""
PLAIN_ROW, FIRST_LAYOUT = f"row {PLAIN.name}", f"layout {REFERENCE_LAYOUT}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the matrix.

    Attributes:
        status: ok, differs or missing.
        compared_with: the other runs whose numbers this one had to have: the first path of this layout that ran, the
            plain row, layout 1 within its tolerance. Empty: there was none, and ok says only that it went through.
        reference: where it differs, from what: one of these, what was asked for, or another rank's copy.
        first_differing_step, largest_difference, what: from `reference`. Step 0: before any step.
        reason: why it is missing.
        seconds: of the slowest process.
        evidence: what the first process's trainer did of what was asked for.
    """

    model: str
    layout: str
    path: str
    row: str
    status: str
    compared_with: list[str] = field(default_factory=list)
    reference: str | None = None
    first_differing_step: int | None = None
    largest_difference: float | None = None
    what: str | None = None
    reason: str | None = None
    seconds: float | None = None
    evidence: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Across:
    """A layout against layout 1, on one path."""

    model: str
    row: str
    layout: str
    path: str
    loss: float
    grad_norm: float
    weights: float
    within: bool


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that is reported."""

    cells: list[Cell]
    not_applicable: list[NotApplicable]
    across_layouts: list[Across]
    across_limit: float
    steps: int
    wall_seconds: float

    @property
    def all_ok(self) -> bool:
        return all(cell.status == "ok" for cell in self.cells)


Key = tuple[str, str, str]
Outcomes = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Through:
    """A run that is through: its numbers, and how each process ended."""

    result: Result
    ended: Outcomes


def judge(
    runs: Sequence[Run], refused: Sequence[NotApplicable], folder: Path, *, stopped: str | None, wall_seconds: float
) -> Findings:
    """Compare every run with the first path of its layout, with the plain row, and with its path on layout 1.

    Args:
        stopped: why the launch ended early, if it did.
    """
    said = {key(run): read_run(run, folder, stopped) for run in runs}
    through = {name: found for name, found in said.items() if isinstance(found, Through)}
    reasons = {name: found for name, found in said.items() if isinstance(found, str)}
    verdicts = [verdict_on(run, through, reasons) for run in runs]
    cells, across = [cell for cell, _ in verdicts], [found for _, found in verdicts if found is not None]
    steps = max(run.settings.steps for run in runs)
    return Findings(cells, list(refused), across, ACROSS, steps, wall_seconds)


def key(run: Run) -> Key:
    return run.row.name, run.layout.name, run.path


def read_run(run: Run, folder: Path, stopped: str | None) -> Through | str:
    """What a run says, or why there is nothing to say."""
    try:
        ended = outcomes(run, folder)
        if faults := {outcome["fault"]: outcome["rank"] for outcome in reversed(ended) if outcome["fault"]}:
            # Ranks that were ended, or that only lost the connection to the one that failed, say less than that one.
            texts = sorted(faults, key=lambda text: (NO_REPORT in text, "onnection" in text, faults[text]))
            return f"rank {faults[texts[0]]}: {texts[0]}"
        if len(ended) < run.layout.processes:
            why = stopped or "its processes ended without a word"
            return f"{len(ended)} of {run.layout.processes} processes came to its end: {why.splitlines()[0]}"
        result = read_result(folder / run.name / RUN_FOLDER)
    except (Exception, CheckpointException) as error:  # whatever a broken file brings about; the last is no Exception
        return f"its run folder cannot be read: {type(error).__name__}: {error}"
    if len(result.steps) != run.settings.steps:
        return f"{len(result.steps)} of {run.settings.steps} steps were done"
    return Through(result, ended)


def verdict_on(run: Run, through: Mapping[Key, Through], reasons: Mapping[Key, str]) -> tuple[Cell, Across | None]:
    """The cell of a run, and how far it is from layout 1."""
    if key(run) in reasons:
        return missing(run, reasons[key(run)]), None
    try:
        across = compare_layouts(run, through)
        return cell_of(run, through, across), across
    except Exception as error:  # of this cell; the others have theirs
        return missing(run, f"it cannot be judged: {type(error).__name__}: {error}"), None


def missing(run: Run, reason: str) -> Cell:
    return Cell(MODEL, run.layout.name, run.path, run.row.name, "missing", reason=reason)


def compare_layouts(run: Run, through: Mapping[Key, Through]) -> Across | None:
    """None for layout 1 itself, for a row whose layouts are not compared, and where layout 1 is missing."""
    one = through.get((run.row.name, REFERENCE_LAYOUT, run.path))
    if one is None or run.layout.name == REFERENCE_LAYOUT or not run.row.across_layouts:
        return None
    found = distance(through[key(run)].result, one.result)
    return Across(
        *(MODEL, run.row.name, run.layout.name, run.path),
        *(found.loss, found.grad_norm, found.weights),
        within=found.largest <= ACROSS,
    )


def cell_of(run: Run, through: Mapping[Key, Through], across: Across | None) -> Cell:
    """The verdict on a run that is through: ok, or the first thing that is wrong with it."""
    mine, plain = through[key(run)], plain_of(run, through)
    first = next(path for path in PATHS if (run.row.name, run.layout.name, path) in through)
    faults = [
        ("what was asked for", asked_fault(run, mine, plain)),
        # The first path itself, too: a number that is none differs from itself.
        (first, difference(mine.result, through[run.row.name, run.layout.name, first].result)),
        (PLAIN_ROW, row_fault(run, mine, plain)),
        ("another rank's copy", copies_fault(run, mine)),
        (FIRST_LAYOUT, across_fault(run, across)),
    ]
    reference, found = next(((name, fault) for name, fault in faults if fault is not None), (None, None))
    held_against = {
        first: first != run.path,
        PLAIN_ROW: run.row.same_as_plain and plain is not None,
        FIRST_LAYOUT: across is not None,
    }
    return Cell(
        *(MODEL, run.layout.name, run.path, run.row.name),
        status="ok" if found is None else "differs",
        compared_with=[name for name, held in held_against.items() if held],
        reference=reference,
        first_differing_step=found.step if found else None,
        largest_difference=found.largest if found else None,
        what=found.what if found else None,
        seconds=max(outcome["seconds"] for outcome in mine.ended),
        evidence=mine.ended[0]["evidence"],
    )


def plain_of(run: Run, through: Mapping[Key, Through]) -> Through | None:
    """The plain row's run on this layout and path, for a run of another row that is as long."""
    plain = through.get((PLAIN.name, run.layout.name, run.path))
    if run.row.name == PLAIN.name or plain is None or run.settings.steps != len(plain.result.steps):
        return None
    return plain


def asked_fault(run: Run, mine: Through, plain: Through | None) -> Difference | None:
    """A run that did other than it was asked to, whatever its numbers are."""
    what = contradiction(run, mine.ended, plain.ended if plain is not None else ())
    return None if what is None else Difference(0, math.inf, what)


def row_fault(run: Run, mine: Through, plain: Through | None) -> Difference | None:
    """A row that does not do what it is for: recomputation changes numbers, or another setting changes none."""
    steps, max_norm = run.settings.steps, run.settings.max_norm
    if plain is not None:
        found = difference(mine.result, plain.result)
        if run.row.same_as_plain:
            return found
        if found is None:
            return Difference(steps, 0.0, f"{run.row.name} changes nothing")
    if math.isfinite(max_norm) and not max(step["grad_norm"] for step in mine.result.steps) > max_norm:
        return Difference(steps, 0.0, "no gradient is clipped")
    return None


def copies_fault(run: Run, mine: Through) -> Difference | None:
    """Ranks that hold the same part of a parameter and do not have the same bits."""
    copies = differing_copies((outcome["copies"] for outcome in mine.ended), run.layout.replicate)
    return Difference(run.settings.steps, math.inf, ", ".join(copies[:4])) if copies else None


def across_fault(run: Run, across: Across | None) -> Difference | None:
    """A layout that is farther from layout 1 than rounding takes it."""
    if across is None or across.within:
        return None
    gap = Distance(across.loss, across.grad_norm, across.weights)
    return Difference(run.settings.steps, gap.largest, f"{gap}")
