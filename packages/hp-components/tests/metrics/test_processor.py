"""MetricsProcessor: what is recorded when, to the bit after a resume, with a clock of its own."""

import json
import logging
import math
import time

import pytest
import torch

from hp_components import MetricsProcessor
from hp_components.metrics import read_records
from hp_protocols.errors import ConfigError

KEYS = ["step", "time", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "memory_gib", "mfu", "data_wait"]


class Clock:
    """Time that passes only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Quiet:
    """A stream that is no terminal."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return False


def build(folder, *, total_steps=12, clock=None, rank=0, stream=None, log_freq=5, **arguments):
    knobs = {name: arguments.pop(name) for name in ("peak_tflops", "save_for_all_ranks") if name in arguments}
    config = MetricsProcessor.Config(log_freq=log_freq, **knobs)
    return config.build(
        run_folder=folder,
        total_steps=total_steps,
        clock=clock or Clock(),
        rank=rank,
        stream=stream or Quiet(),
        **arguments,
    )


def loss_of(step):
    return torch.rand(1, generator=torch.Generator().manual_seed(step)).item()


def run(metrics, clock, first, last, seconds=0.5):
    for step in range(first, last + 1):
        clock.now += seconds
        metrics.record(step, loss=loss_of(step), grad_norm=step / 10, lr=1e-3, tokens=100, data_wait_s=0.1)


def records(folder):
    return [record for record in read_records(folder / "metrics.jsonl") if "event" not in record]


def events(folder):
    return [record for record in read_records(folder / "metrics.jsonl") if "event" in record]


def test_records_come_at_step_one_at_multiples_and_at_the_last_step(tmp_path):
    clock = Clock()
    metrics = build(tmp_path, clock=clock)
    metrics.begin()
    run(metrics, clock, 1, 12)
    metrics.close()
    assert [record["step"] for record in records(tmp_path)] == [1, 5, 10, 12]
    assert all(list(record) == KEYS for record in records(tmp_path))


def test_loss_is_the_mean_since_the_previous_record(tmp_path):
    clock = Clock()
    metrics = build(tmp_path, clock=clock)
    metrics.begin()
    run(metrics, clock, 1, 12)
    windows = [[1], [2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12]]
    for record, steps in zip(records(tmp_path), windows, strict=True):
        assert record["loss"] == sum(loss_of(step) for step in steps) / len(steps)
        assert record["grad_norm"] == steps[-1] / 10


def test_rates_follow_their_definitions(tmp_path):
    clock = Clock()
    metrics = build(tmp_path, clock=clock, flops_per_token=3e9, peak_tflops=2.0, world_size=4)
    clock.now += 1000  # before begin() nothing counts
    metrics.begin()
    run(metrics, clock, 1, 1, seconds=2.0)
    run(metrics, clock, 2, 5, seconds=0.5)
    first, second = records(tmp_path)
    assert (first["tokens"], first["time"], first["tokens_per_second"]) == (100, 2.0, 50.0)
    assert (second["tokens"], second["time"], second["tokens_per_second"]) == (500, 4.0, 200.0)
    assert second["mfu"] == 0.075
    assert first["data_wait"] == pytest.approx(0.05)
    assert second["data_wait"] == pytest.approx(0.2)


def test_mfu_is_unknown_without_flops_or_without_a_known_peak(tmp_path):
    for number, arguments in enumerate(({"peak_tflops": 2.0}, {"flops_per_token": 3e9, "compute_dtype": "float32"})):
        clock = Clock()
        metrics = build(tmp_path / str(number), clock=clock, **arguments)
        metrics.begin()
        run(metrics, clock, 1, 1)
        assert records(tmp_path / str(number))[0]["mfu"] is None


def test_a_resumed_run_writes_the_records_of_an_uninterrupted_one_to_the_bit(tmp_path):
    clock = Clock()
    whole = build(tmp_path / "whole", clock=clock)
    whole.begin()
    run(whole, clock, 1, 12)
    whole.close()
    expected = records(tmp_path / "whole")
    for stop in range(1, 12):
        folder, clock = tmp_path / str(stop), Clock()
        first = build(folder, clock=clock)
        first.begin()
        run(first, clock, 1, stop)
        state = json.loads(json.dumps(first.state_dict()))  # as a checkpoint would keep it
        run(first, clock, stop + 1, 12)  # it went on behind its last checkpoint, then was killed
        clock.now += 3600
        second = build(folder, clock=clock)
        second.load_state_dict(state)
        second.begin(stop)
        run(second, clock, stop + 1, 12)
        second.close()
        found = records(folder)
        memory = {"memory_gib": None}
        assert [record | memory for record in found] == [record | memory for record in expected], stop


def test_an_interrupted_run_leaves_its_last_steps_to_the_run_that_resumes_it(tmp_path):
    clock = Clock()
    metrics = build(tmp_path, clock=clock)
    metrics.begin()
    run(metrics, clock, 1, 7)
    metrics.close()
    assert [record["step"] for record in records(tmp_path)] == [1, 5]
    assert (tmp_path / "loss.png").exists()


def test_a_run_that_ended_early_by_itself_records_its_last_steps(tmp_path):
    clock = Clock()
    metrics = build(tmp_path, clock=clock)
    metrics.begin()
    run(metrics, clock, 1, 7)
    metrics.close(finished=True)
    assert records(tmp_path)[-1]["step"] == 7
    assert records(tmp_path)[-1]["loss"] == (loss_of(6) + loss_of(7)) / 2


def test_dropped_records_are_told(tmp_path, caplog):
    clock = Clock()
    metrics = build(tmp_path, clock=clock)
    metrics.begin()
    run(metrics, clock, 1, 10)
    metrics.close()
    with caplog.at_level(logging.INFO):
        build(tmp_path).begin(5)
    assert "1 records after step 5 dropped" in caplog.text
    assert [record["step"] for record in records(tmp_path)] == [1, 5]


# Values that are no numbers


def test_non_finite_values_are_shown_as_such_and_named_in_an_event_since_json_has_none(tmp_path):
    clock, stream = Clock(), Quiet()
    metrics = build(tmp_path, clock=clock, stream=stream)
    metrics.begin()
    run(metrics, clock, 1, 2)
    metrics.record(3, loss=math.nan, grad_norm=math.inf, lr=1e-3, tokens=100)
    metrics.record(4, loss=-math.inf, grad_norm=1.0, lr=1e-3, tokens=100)
    record = metrics.record(5, loss=1.0, grad_norm=math.inf, lr=1e-3, tokens=100)
    assert math.isnan(record.loss)
    assert record.grad_norm == math.inf
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    first, second = records(tmp_path)
    assert first["loss"] is not None
    assert second["loss"] is second["grad_norm"] is None
    assert [(event["event"], event["step"], event["values"]) for event in events(tmp_path)] == [
        ("non_finite", 3, ["loss=nan", "grad_norm=inf"]),
        ("non_finite", 4, ["loss=-inf"]),
        ("non_finite", 5, ["grad_norm=inf"]),
    ]
    # A line for the first step of an interval; the others of the interval are in the file only.
    assert stream.text.splitlines()[1] == "step 3: not finite: loss=nan, grad_norm=inf"
    assert stream.text.splitlines()[2].startswith("step  5/12  loss nan  lr 1.0e-03  grad inf")


def test_a_norm_that_was_not_measured_is_null_without_an_event(tmp_path):
    metrics = build(tmp_path)
    metrics.begin()
    metrics.record(1, loss=1.0, grad_norm=None, lr=1e-3, tokens=1)
    assert records(tmp_path)[0]["grad_norm"] is None
    assert events(tmp_path) == []


def test_a_step_that_took_no_time_has_no_rate(tmp_path):
    metrics = build(tmp_path)
    metrics.begin()
    metrics.record(1, loss=1.0, grad_norm=1.0, lr=1e-3, tokens=1)
    assert records(tmp_path)[0]["tokens_per_second"] is None


# Events


def test_events_carry_their_step_and_no_key_with_the_word_loss(tmp_path):
    clock = Clock()
    metrics = build(tmp_path, clock=clock)
    metrics.begin()
    run(metrics, clock, 1, 2)
    metrics.event("checkpoint_saved", path="checkpoint/step-2")
    assert events(tmp_path) == [{"event": "checkpoint_saved", "step": 2, "time": 1.0, "path": "checkpoint/step-2"}]
    for key in ("val_loss", "event", "step"):
        with pytest.raises((ValueError, TypeError)):
            metrics.event("bad", **{key: 1})
    assert all("loss" not in key for event in events(tmp_path) for key in event)


def test_events_behind_the_resumed_step_are_dropped_too(tmp_path):
    clock = Clock()
    metrics = build(tmp_path, clock=clock)
    metrics.begin()
    run(metrics, clock, 1, 2)
    metrics.event("early")
    run(metrics, clock, 3, 4)
    metrics.event("late")
    build(tmp_path).begin(2)
    assert [event["event"] for event in events(tmp_path)] == ["early"]


# Ranks, console, errors


def test_other_ranks_write_nothing_and_keep_the_same_state(tmp_path):
    clock = Clock()
    stream = Quiet()
    first, second = build(tmp_path / "0", clock=clock), build(tmp_path / "1", clock=clock, rank=1, stream=stream)
    for metrics in (first, second):
        metrics.begin()
    for step in range(1, 8):
        clock.now += 1
        for metrics in (first, second):
            metrics.record(step, loss=loss_of(step), grad_norm=1.0, lr=1e-3, tokens=10)
    second.event("something")
    second.note("something")
    second.close()
    assert first.state_dict() == second.state_dict()
    assert not (tmp_path / "1").exists()
    assert stream.text == ""


def test_the_console_shows_one_line_per_record_with_the_time_left(tmp_path):
    clock, stream = Clock(), Quiet()
    metrics = build(tmp_path, clock=clock, stream=stream)
    metrics.begin()
    run(metrics, clock, 1, 12, seconds=4.0)
    metrics.note("that was it")
    metrics.close()
    lines = stream.text.splitlines()
    assert len(lines) == 5
    assert lines[1] == (
        f"step  5/12  loss {records(tmp_path)[1]['loss']:.4f}  lr 1.0e-03  grad 0.50  mem n/a  25 tok/s  mfu n/a  "
        "data wait 2%  eta 28s"
    )
    assert lines[4] == "that was it"


def test_memory_is_the_devices_and_not_known_on_the_cpu(tmp_path):
    metrics = build(tmp_path)
    metrics.begin()
    assert metrics.record(1, loss=1.0, grad_norm=1.0, lr=1e-3, tokens=1).memory_gib is None
    assert records(tmp_path)[0]["memory_gib"] is None


def test_calls_in_the_wrong_order_are_refused(tmp_path):
    metrics = build(tmp_path)
    with pytest.raises(RuntimeError, match="call begin"):
        metrics.record(1, loss=1.0, grad_norm=1.0, lr=1e-3, tokens=1)
    metrics.begin()
    with pytest.raises(RuntimeError, match="begun already"):
        metrics.begin()
    metrics.close()
    metrics.close()


def test_every_fault_of_a_config_is_told_at_once(tmp_path):
    config = MetricsProcessor.Config(log_freq=0, peak_tflops=-1.0, save_tb_folder="../tb")
    with pytest.raises(ConfigError) as caught:
        config.build(run_folder=tmp_path, total_steps=1)
    assert [fault.where for fault in caught.value.faults] == [
        "metrics.log_freq",
        "metrics.peak_tflops",
        "metrics.save_tb_folder",
    ]


def test_a_resumed_run_says_where_it_goes_on(tmp_path):
    clock, stream = Clock(), Quiet()
    first = build(tmp_path, clock=clock)
    first.begin()
    run(first, clock, 1, 7)
    second = build(tmp_path, clock=clock, stream=stream)
    second.load_state_dict(first.state_dict())
    second.begin(7)
    assert stream.text == "resumed after step 7/12, 700 tokens in 4s so far\n"


def test_every_rank_writes_its_own_records_when_asked(tmp_path):
    for rank in (0, 1):
        metrics = build(tmp_path, rank=rank, save_for_all_ranks=True)
        metrics.begin()
        metrics.record(1, loss=1.0, grad_norm=1.0, lr=1e-3, tokens=1)
        metrics.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["loss.png", "metrics.jsonl", "metrics.rank-1.jsonl"]
    assert next(read_records(tmp_path / "metrics.rank-1.jsonl"))["loss"] == 1.0


def test_a_step_costs_well_under_half_a_millisecond(tmp_path):
    metrics = build(tmp_path, total_steps=20_000, log_freq=10, clock=time.perf_counter)
    metrics.begin()
    began = time.process_time()
    for step in range(1, 2001):
        metrics.record(step, loss=1.0, grad_norm=1.0, lr=1e-3, tokens=2048)
    assert (time.process_time() - began) / 2000 < 0.0005
