"""The alignment matrix is honest: a path that differs, and a run that fails, are found and named, on two processes."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"
STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def tools() -> Iterator[None]:
    """align8 is no package that is installed."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(TOOLS))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def carried_out(tools: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any], Path]:
    """A small matrix in which one path's Adam has another eps, and one cannot run: its runs and their folder.

    eps acts on the weights of the first update, so on the loss of the second step.
    """
    from align8.matrix import Layout, Row, Settings, plan
    from align8.measure import measure

    settings = Settings(steps=STEPS, rows_per_step=4)
    rows = [
        Row("plain", settings, ("1", "fsdp2")),
        Row("idle", replace(settings, max_norm=1e6), ("1",)),
        Row("copies", replace(settings, steps=1), ("ddp2",)),
        Row("asked", replace(settings, steps=1, recompute=True), ("tp2+sp",)),
    ]
    layouts = [
        Layout("1"),
        Layout("fsdp2", shard=2),
        Layout("ddp2", replicate=2),
        Layout("tp2+sp", tensor=2, sequence_parallel=True),
    ]
    runs, refused = plan(layouts, rows)
    planted = {
        "plain--fsdp2--graph": replace(settings, eps=1e-3),
        "copies--ddp2--eager": replace(settings, steps=1, lr=-1.0),
    }
    runs = [replace(run, settings=planted.get(run.name, run.settings)) for run in runs]
    folder = tmp_path_factory.mktemp("align8") / "runs"
    measure(runs, refused, folder, processes=2)
    said = folder / "copies--ddp2--graph" / "outcome-1.json"
    said.write_text(json.dumps(plant_copy(json.loads(said.read_text()))))
    return runs, refused, folder


@pytest.fixture(scope="module")
def written(carried_out: tuple[list[Any], list[Any], Path]) -> tuple[dict[str, Any], str]:
    """alignment.json and alignment.md of it."""
    return report_of(*carried_out)


def report_of(runs: list[Any], refused: list[Any], folder: Path) -> tuple[dict[str, Any], str]:
    from align8.report import write
    from align8.verdict import judge

    write(judge(runs, refused, folder, stopped=None, wall_seconds=0.0), folder / "report")
    return json.loads((folder / "report" / "alignment.json").read_text()), (folder / "report/alignment.md").read_text()


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


def test_a_cell_names_the_runs_that_it_is_compared_with(written: tuple[dict[str, Any], str]) -> None:
    assert cell(written, "plain", "1", "eager")["compared_with"] == ["legacy"]
    assert cell(written, "plain", "fsdp2", "eager")["compared_with"] == ["legacy", "layout 1"]
    assert cell(written, "plain", "fsdp2", "legacy")["compared_with"] == ["layout 1"]


def test_a_cell_that_is_compared_with_no_run_does_not_read_as_compared(written: tuple[dict[str, Any], str]) -> None:
    found = cell(written, "plain", "1", "legacy")
    assert (found["status"], found["compared_with"], found["reference"]) == ("ok", [], None)
    assert "| qwen3_5 | plain | 1 | ran | ✓ | ✓ |" in written[1]
    alone = [cell for cell in written[0]["cells"] if cell["status"] == "ok" and not cell["compared_with"]]
    assert f"({len(alone)} of them compared with no other run)" in written[1]


def test_every_part_of_the_matrix_brings_what_it_is_compared_with() -> None:
    from align8.matrix import LAYOUTS, PLAIN, ROWS, plan

    for row in ROWS.values():
        for layout in row.layouts:
            runs, _ = plan([LAYOUTS[layout]], [row])
            cells = {(run.row.name, run.layout.name) for run in runs}
            wanted = {(row.name, layout), (PLAIN.name, layout), (PLAIN.name, "1")}
            assert cells == wanted | ({(row.name, "1")} if row.across_layouts else set())
    everything, refused = plan(LAYOUTS.values(), ROWS.values())
    assert (len(everything), len({run.name for run in everything}), len(refused)) == (56, 56, 1)


def test_clipping_is_looked_at_without_a_plain_run(carried_out: tuple[list[Any], list[Any], Path]) -> None:
    runs, _, folder = carried_out
    found = report_of([run for run in runs if run.row.name == "idle"], [], folder)
    assert cell(found, "idle", "1", "eager")["what"] == "no gradient is clipped"


def test_runs_tell_what_they_did_of_what_was_asked(written: tuple[dict[str, Any], str]) -> None:
    plain, eager, graph = (
        cell(written, *name)
        for name in (("plain", "1", "graph"), ("asked", "tp2+sp", "eager"), ("asked", "tp2+sp", "graph"))
    )
    products = graph["evidence"].pop("matrix_products"), plain["evidence"].pop("matrix_products")
    assert products[0] > products[1] > 0
    asked = {"recomputed_blocks": 2, "sequence_parallel": True, "micro_batches": 1, "degrees": {"tp": 2}}
    nothing = {"recomputed_blocks": 0, "sequence_parallel": False, "micro_batches": 1, "degrees": {}}
    assert (eager["status"], eager["evidence"]) == ("ok", {**asked, "graph": False, "matrix_products": None})
    assert (graph["status"], graph["evidence"]) == ("ok", {**asked, "graph": True})
    assert plain["evidence"] == {**nothing, "graph": True}
    for layout, path, degrees in (("fsdp2", "eager", {"fsdp": 2}), ("fsdp2", "graph", {"fsdp": 2})):
        assert cell(written, "plain", layout, path)["evidence"]["degrees"] == degrees
    for path in ("legacy", "graph"):
        assert cell(written, "copies", "ddp2", path)["evidence"]["degrees"] == {"dp_replicate": 2}


@pytest.mark.parametrize(
    ("layout", "path", "changes", "what"),
    [
        ("1", "eager", {"settings": {"recompute": True}}, "rank 0: recomputed_blocks 0, not 2"),
        ("1", "legacy", {"settings": {"micro_batches": 2}}, "rank 0: micro_batches 1, not 2"),
        ("fsdp2", "legacy", {"layout": {"sequence_parallel": True}}, "rank 0: sequence_parallel False, not True"),
        ("fsdp2", "eager", {"layout": {"shard": 1, "context": 2}}, "rank 0: degrees {'fsdp': 2}, not {"),
        ("fsdp2", "graph", {"layout": {"shard": 1, "replicate": 2}}, "rank 0: degrees {'fsdp': 2}, not {"),
    ],
)
def test_a_run_that_did_other_than_it_was_asked_to_differs(
    carried_out: tuple[list[Any], list[Any], Path], layout: str, path: str, changes: dict[str, Any], what: str
) -> None:
    """As if the trainer had dropped the option: it was not given, and the run is judged as if it had been."""
    runs, _, folder = carried_out
    (run,) = [run for run in runs if run.name == f"plain--{layout}--{path}"]
    asked = replace(run, **{name: replace(getattr(run, name), **values) for name, values in changes.items()})
    found = cell(report_of([asked], [], folder), "plain", layout, path)
    assert (found["status"], found["reference"], found["first_differing_step"]) == ("differs", "what was asked for", 0)
    assert found["what"].startswith(what)


def test_a_graph_that_recomputes_nothing_is_found(carried_out: tuple[list[Any], list[Any], Path]) -> None:
    from align8.evidence import contradiction

    runs, _, folder = carried_out
    (run,) = [run for run in runs if run.name == "asked--tp2+sp--graph"]
    ended = [json.loads((folder / run.name / f"outcome-{rank}.json").read_text()) for rank in (0, 1)]
    as_many = [{**outcome, "evidence": {**outcome["evidence"]}} for outcome in ended]
    assert contradiction(run, ended) is None
    assert "nothing is recomputed" in (contradiction(run, ended, as_many) or "")
    as_many[1]["evidence"]["graph"] = False
    assert contradiction(run, as_many) == "rank 1: graph False, not True"


def break_checkpoint(run_folder: Path, ending: str) -> None:
    (file, *_) = sorted((run_folder / "checkpoint" / f"step-{STEPS}").rglob(f"*{ending}"))
    file.write_bytes(b"not what it was")


def break_number(run_folder: Path) -> None:
    file = run_folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[1]["grad_norm"] = None
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda folder: break_checkpoint(folder, ".metadata"), "UnpicklingError"),
        (lambda folder: break_checkpoint(folder, ".distcp"), "CheckpointException"),
        (break_number, "step 2: grad_norm None is no number"),
    ],
)
def test_one_broken_run_does_not_lose_the_report(
    carried_out: tuple[list[Any], list[Any], Path], tmp_path: Path, broken: Callable[[Path], None], reason: str
) -> None:
    runs, _, folder = carried_out
    runs = [run for run in runs if run.name.startswith("plain--1--")]
    for run in runs:
        shutil.copytree(folder / run.name, tmp_path / run.name)
    broken(tmp_path / "plain--1--eager" / "run")
    found = report_of(runs, [], tmp_path)
    assert cell(found, "plain", "1", "eager")["status"] == "missing"
    assert reason in cell(found, "plain", "1", "eager")["reason"]
    assert [cell(found, "plain", "1", path)["status"] for path in ("legacy", "graph")] == ["ok", "ok"]


def test_tensors_that_cannot_be_compared_are_a_difference_with_a_name() -> None:
    import torch
    from align8.results import Result, difference, distance

    steps = [{"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 8.0}]
    reference = Result(steps, {"model.w": torch.ones(2, 3)})
    for tensor in (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3, 2), torch.ones(6)):
        result = Result(steps, {"model.w": tensor})
        found = difference(result, reference)
        assert found is not None
        assert found.what == f"model.w ({tensor.dtype} {list(tensor.shape)}, not torch.float32 [2, 3])"
        assert distance(result, reference).largest == float("inf")
    without = Result(steps, {"model.v": torch.ones(2, 3)})
    found = difference(without, reference)
    assert found is not None
    assert found.what == "tensors that only one of the two has: model.v, model.w"
    assert distance(without, reference).largest == float("inf")


def test_empty_sets_are_not_equal_but_refused(tmp_path: Path) -> None:
    import torch
    from align8.copies import differing_copies
    from align8.results import read_tensors
    from torch.distributed.checkpoint import FileSystemWriter, save

    weights, moments = {"model.w": torch.ones(2)}, {"optimizer.state.w.exp_avg": torch.ones(2)}
    for name, tensors, kind in (("a", weights, "optimizer"), ("b", moments, "model"), ("c", {}, "model.* and optim")):
        save(dict(tensors), storage_writer=FileSystemWriter(tmp_path / name), no_dist=True)
        with pytest.raises(ValueError, match=f"{name} has no tensor of {kind}".replace("*", r"\*")):
            read_tensors(tmp_path / name)
    assert differing_copies([{}, {}], replicas=2) == ["no rank has any part"]
    assert differing_copies([{"w": "1"}, {"v": "1"}], replicas=2) == ["w is on 1 ranks only", "v is on 1 ranks only"]


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ("dies", "exit code 7, after its report"),
        ("hangs", "still running after 2 s, after its report"),
        ("raises", "CheckpointException: "),
        ("silent", "ended without a report: exit code 7"),
    ],
)
def test_the_end_of_a_process_counts_also_after_its_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planted: str, fault: str
) -> None:
    from align8 import launch
    from align8.matrix import LAYOUTS, PLAIN, Run
    from torch.distributed.checkpoint import CheckpointException

    def train(run: Run, material: Path, home: Path) -> dict[str, Any]:
        if planted == "raises":
            raise CheckpointException("planted", {})
        if planted == "silent":
            os._exit(7)

        def stay() -> None:
            while planted == "hangs" or not (home / "report-0.json").exists():
                time.sleep(0.01)
            os._exit(7)

        # The interpreter waits for it at its end.
        threading.Thread(target=stay).start()
        return {"copies": {"w": "1"}, "evidence": {}}

    monkeypatch.setattr(launch, "train", train)
    run = Run(PLAIN, LAYOUTS["1"], "eager", PLAIN.settings)
    launch.attempt(run, tmp_path, 0, {}, seconds=2 if planted == "hangs" else 60)
    (outcome,) = launch.outcomes(run, tmp_path)
    assert fault in outcome["fault"]
    assert (outcome["copies"] == {}) == (planted in ("raises", "silent"))
    assert fault in report_of([run], [], tmp_path)[0]["cells"][0]["reason"]
