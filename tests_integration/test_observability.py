"""What a run leaves for TensorBoard, W&B and trace viewers, through the command line and over a resume."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness import SMALL, Hp, records

CURVES = (
    "--metrics.enable_tensorboard",
    "--metrics.enable_wandb",
    "--profiler.enable_profiling",
    "--profiler.profile_freq=4",
    "--profiler.profiler_warmup=1",
)


def tensorboard_loss(run: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tb"), size_guidance={"scalars": 0})
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars("loss")]


def step_spans(trace: Path) -> list[str]:
    events = json.loads(trace.read_text())["traceEvents"]
    return [event["name"] for event in events if event["name"].startswith("ProfilerStep#") and event["ph"] == "X"]


def test_curves_and_traces_of_a_run_that_is_resumed(hp: Hp) -> None:
    hp.env |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    options = [*SMALL, *CURVES, "--dump_folder", "run", "--nproc", "2"]
    first = hp.train(*options, "--training.steps", "6")
    assert first.code == 0, first.text
    again = hp.train(*options, "--training.steps", "9")
    assert again.code == 0, again.text
    run = hp.cwd / "run"

    # One curve, with the values of the records.
    found = records(run)
    assert [record["step"] for record in found] == list(range(1, 10))
    assert tensorboard_loss(run) == [(record["step"], pytest.approx(record["loss"])) for record in found]

    # One W&B run in two parts.
    parts = sorted(path.name for path in (run / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    assert len({part.rpartition("-")[2] for part in parts}) == 1

    # Traces of every rank where the whole run would have them.
    traces = sorted(str(path.relative_to(run)) for path in run.rglob("*.pt.trace.json"))
    assert traces == [
        f"profiling/traces/iteration_{step}/rank{rank}.pt.trace.json" for step in (4, 8) for rank in (0, 1)
    ]
    assert [step_spans(run / trace) for trace in traces] == [[f"ProfilerStep#{step}"] for step in (4, 4, 8, 8)]

    # And the user is told.
    assert "resumed after step 6/9" in again.out
    for text in ("tensorboard --logdir run/tb", "wandb sync run/wandb", "profiling/traces", "ui.perfetto.dev"):
        assert text in again.out
    assert re.search(r"^  steps +9 of 9$", again.out, flags=re.MULTILINE)
    assert re.search(r"^  loss +\d\.\d{4} to \d\.\d{4}$", again.out, flags=re.MULTILINE)


def test_knobs_that_do_not_fit_and_what_this_machine_lacks_are_refused(hp: Hp) -> None:
    short = hp.train("--profiler.enable_profiling", "--profiler.profile_freq", "2")
    assert short.code == 2, short.text
    assert "--profiler.profiler_warmup=1" in short.err
    snapshot = hp.train("--profiler.enable_memory_snapshot", "--nproc", "2")
    assert snapshot.code == 2, snapshot.text
    assert "profiler.enable_memory_snapshot" in snapshot.err
    assert "--profiler.profile_memory" in snapshot.err
    assert not (hp.cwd / "outputs").exists()
