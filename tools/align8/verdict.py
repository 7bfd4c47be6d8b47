"""From finished runs to cells: ok, differs or missing, and the distances between layouts.

In: the runs, and how each process ended. Out: a `Findings`, which alignment.json holds as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from align8.copies import differing_copies
from align8.launch import NO_REPORT, RUN_FOLDER, outcomes
from align8.matrix import MODEL, PATHS, PLAIN, NotApplicable, Run
from align8.results import Difference, Distance, Result, difference, distance, read_result

__all__ = ["ACROSS", "Across", "Cell", "Findings", "judge"]

ACROSS = 1e-5
"""How far a layout may be from layout 1, in fp32."""
REFERENCE_LAYOUT = "1"


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the matrix.

    Attributes:
        status: ok, differs or missing.
        first_differing_step, largest_difference, what: from `reference`, the first path of this layout that ran; or,
            where the bits agree, from the layouts' tolerance.
        reason: why it is missing.
        seconds: of the slowest process.
    """

    model: str
    layout: str
    path: str
    row: str
    status: str
    reference: str | None = None
    first_differing_step: int | None = None
    largest_difference: float | None = None
    what: str | None = None
    reason: str | None = None
    seconds: float | None = None


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


def judge(
    runs: Sequence[Run], refused: Sequence[NotApplicable], folder: Path, *, stopped: str | None, wall_seconds: float
) -> Findings:
    """Compare every run with the first path of its layout, and with the same path on layout 1.

    Args:
        stopped: why the launch ended early, if it did.
    """
    results, reasons = dict[Key, Result](), dict[Key, str]()
    for run in runs:
        said = read_run(run, folder, stopped)
        if isinstance(said, Result):
            results[key(run)] = said
        else:
            reasons[key(run)] = said
    across = [found for run in runs if (found := compare_layouts(run, results)) is not None]
    distances = {(found.row, found.layout, found.path): found for found in across}
    cells = [
        Cell(MODEL, run.layout.name, run.path, run.row.name, "missing", reason=reasons[key(run)])
        if key(run) in reasons
        else cell_of(run, results, distances.get(key(run)), outcomes(run, folder))
        for run in runs
    ]
    steps = max(run.settings.steps for run in runs)
    return Findings(cells, list(refused), across, ACROSS, steps, wall_seconds)


def key(run: Run) -> Key:
    return run.row.name, run.layout.name, run.path


def read_run(run: Run, folder: Path, stopped: str | None) -> Result | str:
    """What a run says, or why there is nothing to say."""
    ended = outcomes(run, folder)
    if faults := {outcome["fault"]: outcome["rank"] for outcome in reversed(ended) if outcome["fault"]}:
        # Ranks that were ended, or that only lost the connection to the one that failed, say less than that one.
        texts = sorted(faults, key=lambda text: (NO_REPORT in text, "onnection" in text, faults[text]))
        return f"rank {faults[texts[0]]}: {texts[0]}"
    if len(ended) < run.layout.processes:
        why = stopped or "its processes ended without a word"
        return f"{len(ended)} of {run.layout.processes} processes came to its end: {why.splitlines()[0]}"
    try:
        result = read_result(folder / run.name / RUN_FOLDER)
    except (OSError, ValueError, KeyError) as error:
        return f"its run folder cannot be read: {type(error).__name__}: {error}"
    if len(result.steps) != run.settings.steps:
        return f"{len(result.steps)} of {run.settings.steps} steps were done"
    return result


def compare_layouts(run: Run, results: Mapping[Key, Result]) -> Across | None:
    """None for layout 1 itself, for a row whose layouts are not compared, and where one of the two is missing."""
    mine, one = results.get(key(run)), results.get((run.row.name, REFERENCE_LAYOUT, run.path))
    if mine is None or one is None or run.layout.name == REFERENCE_LAYOUT or not run.row.across_layouts:
        return None
    found = distance(mine, one)
    return Across(
        *(MODEL, run.row.name, run.layout.name, run.path),
        *(found.loss, found.grad_norm, found.weights),
        within=found.largest <= ACROSS,
    )


def cell_of(run: Run, results: Mapping[Key, Result], across: Across | None, ended: Sequence[dict[str, Any]]) -> Cell:
    """The verdict on a run that is through."""
    mine = results[key(run)]
    first = next(path for path in PATHS if (run.row.name, run.layout.name, path) in results)
    found = difference(mine, results[run.row.name, run.layout.name, first])
    reference: str | None = first
    if found is None and (wrong := row_fault(run, results)) is not None:
        found, reference = wrong, f"row {PLAIN.name}"
    if found is None and (copies := differing_copies(outcome["copies"] for outcome in ended)):
        found, reference = Difference(run.settings.steps, math.inf, ", ".join(copies[:4])), "another rank's copy"
    if found is None and across is not None and not across.within:
        gap = Distance(across.loss, across.grad_norm, across.weights)
        found, reference = Difference(run.settings.steps, gap.largest, f"{gap}"), f"layout {REFERENCE_LAYOUT}"
    took = max(outcome["seconds"] for outcome in ended)
    identity = (MODEL, run.layout.name, run.path, run.row.name)
    if found is None:
        return Cell(*identity, "ok", reference=first, seconds=took)
    return Cell(*identity, "differs", reference, found.step, found.largest, found.what, seconds=took)


def row_fault(run: Run, results: Mapping[Key, Result]) -> Difference | None:
    """A row that does not do what it is for: recomputation changes numbers, or another setting changes none."""
    plain = results.get((PLAIN.name, run.layout.name, run.path))
    mine = results[key(run)]
    if run.row.name == PLAIN.name or plain is None or run.settings.steps != len(plain.steps):
        return None
    found = difference(mine, plain)
    if run.row.same_as_plain:
        return found
    if found is None:
        return Difference(run.settings.steps, 0.0, f"{run.row.name} changes nothing")
    if not max(step["grad_norm"] for step in mine.steps) > run.settings.max_norm and run.settings.max_norm < 1e9:
        return Difference(run.settings.steps, 0.0, "no gradient is clipped")
    return None
