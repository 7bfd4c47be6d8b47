"""The alignment matrix is honest: a path that differs, and a run that fails, are found and named, on two processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"
STEPS = 4


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], str]]:
    """alignment.json and alignment.md of a small matrix in which one path's Adam has another eps, and one cannot run.

    eps acts on the weights of the first update, so on the loss of the second step.
    """
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(TOOLS))
    from align8.matrix import Layout, Row, Settings, plan
    from align8.measure import measure
    from align8.report import write
    from align8.verdict import judge

    settings = Settings(steps=STEPS, rows_per_step=4)
    rows = [
        Row("plain", settings, ("1", "fsdp2")),
        Row("idle", replace(settings, max_norm=1e6), ("1",)),
        Row("copies", replace(settings, steps=1), ("ddp2",)),
    ]
    runs, refused = plan([Layout("1"), Layout("fsdp2", shard=2), Layout("ddp2", replicate=2)], rows)
    planted = {
        "plain--fsdp2--graph": replace(settings, eps=1e-3),
        "copies--ddp2--eager": replace(settings, steps=1, lr=-1.0),
    }
    runs = [replace(run, settings=planted.get(run.name, run.settings)) for run in runs]
    folder = tmp_path_factory.mktemp("align8")
    measure(runs, refused, folder / "runs", processes=2)
    said = folder / "runs" / "copies--ddp2--graph" / "outcome-1.json"
    said.write_text(json.dumps(plant_copy(json.loads(said.read_text()))))
    findings = judge(runs, refused, folder / "runs", stopped=None, wall_seconds=0.0)
    write(findings, folder)
    yield json.loads((folder / "alignment.json").read_text()), (folder / "alignment.md").read_text()
    patch.undo()


def plant_copy(outcome: dict[str, Any]) -> dict[str, Any]:
    """What the second process would say if its copy of one weight had become another one."""
    assert "norm.weight" in outcome["copies"]
    return {**outcome, "copies": {**outcome["copies"], "norm.weight": "another"}}


def cell(written: tuple[dict[str, Any], str], row: str, layout: str, path: str) -> dict[str, Any]:
    wanted = {"model": "qwen3_5", "row": row, "layout": layout, "path": path}
    (found,) = [cell for cell in written[0]["cells"] if wanted.items() <= cell.items()]
    return found


def test_paths_that_agree_are_ok(written: tuple[dict[str, Any], str]) -> None:
    for layout, path in (("1", "legacy"), ("1", "eager"), ("1", "graph"), ("fsdp2", "legacy"), ("fsdp2", "eager")):
        found = cell(written, "plain", layout, path)
        assert (found["status"], found["first_differing_step"]) == ("ok", None)


def test_a_difference_is_found_at_its_first_step(written: tuple[dict[str, Any], str]) -> None:
    found = cell(written, "plain", "fsdp2", "graph")
    assert (found["status"], found["first_differing_step"], found["reference"]) == ("differs", 2, "legacy")
    assert found["largest_difference"] > 1e-6
    assert "✗ step 2" in written[1]
    (across,) = [a for a in written[0]["across_layouts"] if a["row"] == "plain" and a["path"] == "graph"]
    assert not across["within"]


def test_layouts_that_agree_are_within_the_limit(written: tuple[dict[str, Any], str]) -> None:
    (across,) = [a for a in written[0]["across_layouts"] if a["row"] == "plain" and a["path"] == "eager"]
    assert across["within"]
    assert 0 < max(across["loss"], across["grad_norm"], across["weights"]) < 1e-5


def test_a_run_that_fails_is_missing_with_its_reason(written: tuple[dict[str, Any], str]) -> None:
    found = cell(written, "copies", "ddp2", "eager")
    assert found["status"] == "missing"
    assert "optimizer.lr" in found["reason"]
    assert "optimizer.lr" in written[1]
    assert cell(written, "copies", "ddp2", "legacy")["status"] == "ok"


def test_copies_that_have_drifted_apart_are_found(written: tuple[dict[str, Any], str]) -> None:
    found = cell(written, "copies", "ddp2", "graph")
    assert (found["status"], found["what"]) == ("differs", "norm.weight")


def test_a_row_that_changes_nothing_is_no_row(written: tuple[dict[str, Any], str]) -> None:
    found = cell(written, "idle", "1", "eager")
    assert (found["status"], found["what"]) == ("differs", "idle changes nothing")
