"""Traces lie at the right steps, hold the right steps, and are what the standard viewers open."""

import gzip
import json
import logging
import re

import pytest
import torch

from hp_components import Profiler

# As TensorBoard's profiler plugin recognises a trace: worker, optional span, ending.
PLUGIN_NAME = re.compile(r"^(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?$")


def train(folder, steps, *, after=0, fail_in=None, rank=0, **knobs):
    """Steps after `after`; returns the profiler."""
    profiler = Profiler.Config(enable_profiling=True, **knobs).build(run_folder=folder, rank=rank)
    layer = torch.nn.Linear(8, 8)
    with profiler.active(after):
        for step in range(after + 1, after + steps + 1):
            layer(torch.randn(2, 8)).sum().backward()
            if step == fail_in:
                raise RuntimeError("a step failed")
            profiler.step()
    return profiler


def load(path):
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def recorded_steps(path):
    return sorted(
        int(event["name"].removeprefix("ProfilerStep#"))
        for event in load(path)["traceEvents"]
        if event["ph"] == "X" and event["name"].startswith("ProfilerStep#") and event["dur"] > 0
    )


def places(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_trace_at_the_end_of_every_cycle_is_named_by_its_last_step(tmp_path):
    profiler = train(tmp_path, 9, profile_freq=4, profiler_warmup=1, profiler_active=2)
    four, eight = profiler.files
    assert places(tmp_path) == [
        "profiling/traces/iteration_4/rank0.pt.trace.json",
        "profiling/traces/iteration_8/rank0.pt.trace.json",
    ]
    assert recorded_steps(four) == [3, 4]
    assert recorded_steps(eight) == [7, 8]


def test_a_trace_is_what_perfetto_chrome_and_tensorboard_read(tmp_path):
    (path,) = train(tmp_path, 4, profile_freq=4, profile_memory=True, with_stack=True).files
    assert PLUGIN_NAME.match(path.name)[1] == "rank0"
    trace = load(path)
    assert trace["schemaVersion"] == 1
    events = trace["traceEvents"]
    for event in events:
        assert {"ph", "name"} <= event.keys()
        if event["ph"] == "X":  # a span: where, from when, how long
            assert {"ts", "dur", "pid", "tid", "cat"} <= event.keys()
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert spans["ProfilerStep#4"]["cat"] == "user_annotation"
    product = spans["aten::addmm"]
    assert product["cat"] == "cpu_op"
    assert [2, 8] in product["args"]["Input Dims"]
    step = spans["ProfilerStep#4"]
    assert step["ts"] <= product["ts"] <= step["ts"] + step["dur"]
    assert any(event["name"] == "[memory]" for event in events)
    assert any(event.get("cat") == "python_function" for event in events)


def test_gzip_is_a_tenth_of_the_size_and_holds_the_same(tmp_path):
    (plain,) = train(tmp_path / "plain", 4, profile_freq=4).files
    (packed,) = train(tmp_path / "packed", 4, profile_freq=4, gzip_traces=True).files
    assert packed.name == "rank0.pt.trace.json.gz"
    assert recorded_steps(packed) == recorded_steps(plain) == [4]
    assert packed.stat().st_size < plain.stat().st_size / 3
    assert len(places(tmp_path)) == 2


@pytest.mark.parametrize("after", [1, 2, 3, 4, 6, 7])
def test_a_resumed_run_goes_on_in_the_cycle_of_the_whole_run(tmp_path, after):
    profiler = train(tmp_path, 12 - after, after=after, profile_freq=6, profiler_warmup=2, profiler_active=2)
    # Of steps 5 and 6 as many as are left.
    expected = ([list(range(max(5, after + 1), 7))] if after < 6 else []) + [[11, 12]]
    assert [recorded_steps(path) for path in profiler.files] == expected
    assert [path.parent.name for path in profiler.files] == ["iteration_6", "iteration_12"][-len(expected) :]


def test_torchs_schedule_options_count_from_the_runs_first_step(tmp_path):
    knobs = {"profile_freq": 4, "profiler_warmup": 1, "profiler_skip_first": 2, "profiler_repeat": 2}
    whole = train(tmp_path / "whole", 16, **knobs)
    assert [path.parent.name for path in whole.files] == ["iteration_6", "iteration_10"]
    resumed = train(tmp_path / "resumed", 9, after=7, **knobs)
    assert [path.parent.name for path in resumed.files] == ["iteration_10"]
    soon = train(tmp_path / "soon", 8, profile_freq=6, profiler_warmup=1, profiler_skip_first_wait=1)
    assert [path.parent.name for path in soon.files] == ["iteration_2", "iteration_8"]


def test_a_run_that_ends_within_a_recording_keeps_what_it_has_and_writes_no_empty_trace(tmp_path):
    knobs = {"profile_freq": 6, "profiler_warmup": 1, "profiler_active": 3}
    (cut,) = train(tmp_path / "cut", 5, **knobs).files
    assert cut.parent.name == "iteration_5"
    assert recorded_steps(cut)[:2] == [4, 5]
    assert train(tmp_path / "before", 3, **knobs).files == []
    assert places(tmp_path / "before") == []


def test_the_step_that_failed_is_in_a_trace_when_it_was_recorded(tmp_path):
    with pytest.raises(RuntimeError, match="a step failed"):
        train(tmp_path, 9, fail_in=4, profile_freq=4)
    (path,) = tmp_path.rglob("*.pt.trace.json")
    assert path.parent.name == "iteration_4"
    assert recorded_steps(path) == [4]


def test_every_rank_writes_a_file_of_its_own_name(tmp_path):
    for rank in (0, 3):
        train(tmp_path, 4, rank=rank, profile_freq=4, save_traces_folder="traces")
    assert places(tmp_path) == [f"traces/iteration_4/rank{rank}.pt.trace.json" for rank in (0, 3)]


def test_a_trace_that_cannot_be_written_costs_the_trace_and_not_the_run(tmp_path, caplog):
    (tmp_path / "profiling").write_text("in the way")
    with caplog.at_level(logging.ERROR):
        assert train(tmp_path, 4, profile_freq=4).files == []
    assert "iteration_4/rank0.pt.trace.json could not be written" in caplog.text
