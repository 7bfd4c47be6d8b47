"""The table at the end: the whole run, also its parts before a resume; and the curve in one line."""

import math

import pytest

from hp_components.metrics import sparkline
from hp_components.metrics.summary import summary_rows


def test_a_curve_in_one_line():
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline([8, 8, 6, 6, 4, 4, 1, 1], 4) == "█▆▄▁"
    assert sparkline([1, 2], 24) == "▁█"
    assert sparkline([5, 5, 5], 3) == "▁▁▁"
    assert sparkline([], 3) == ""


def test_what_is_not_finite_is_marked_and_does_not_hide_the_rest():
    assert sparkline([3.0, math.nan, 1.0], 3) == "█×▁"
    assert sparkline([None, math.inf], 5) == "××"
    with pytest.raises(ValueError, match="no room"):
        sparkline([1.0], 0)


def record(step, **values):
    base = {"loss": 5.0, "time": step * 1.0, "tokens": step * 100, "data_wait": 0.0, "mfu": None, "memory_gib": None}
    return {"step": step} | base | values


def test_the_table_sums_the_run_up():
    records = [record(1, loss=7.6612, data_wait=0.5), record(4), record(10, loss=3.912, data_wait=0.1)]
    records.insert(1, {"event": "non_finite", "step": 3})
    rows = dict(summary_rows(records, 1000, host_gib=0.81234))
    assert rows == {
        "steps": "10 of 1,000",
        "loss": "7.6612 to 3.9120",
        "": "█▃▁",
        "time": "10s",
        "tokens": "1,000, 100 tok/s",
        # (0.5 × 1 s + 0 × 3 s + 0.1 × 6 s) / 10 s
        "data wait": "11.0%",
        "mfu": "n/a",
        "memory": "n/a (the process: 0.81 GiB)",
        "not finite": "1 steps, the first is 3",
    }


def test_rates_and_peaks_of_a_device_are_over_the_run():
    records = [record(1, mfu=0.1, memory_gib=9.0), record(5, mfu=0.5, memory_gib=8.0)]
    rows = dict(summary_rows(records, 5, host_gib=1.0, curve=False))
    assert (rows["mfu"], rows["memory"]) == ("42.0%", "9.00 GiB at most")
    assert "" not in rows


def test_a_run_without_a_record_has_no_table():
    assert summary_rows([{"event": "stopped", "step": 0}], 5, host_gib=1.0) == []


def test_the_table_goes_to_the_console_after_the_last_record(tmp_path, part, quiet):
    run = part(tmp_path).train(1, 12)
    run.metrics.close(summary=True)
    lines = run.stream.text.splitlines()
    assert lines[12:16] == ["", "this run", "  steps      12 of 12", "  loss       0.1000 to 1.2000"]
    assert lines[16] == "             ▁▂▂▃▄▄▅▅▆▇▇█"
    ascii_only = part(tmp_path, stream=quiet("ascii")).resumed_from({}, 12)
    ascii_only.metrics.close(summary=True)
    assert "0.1000 to 1.2000" in ascii_only.stream.text
    assert ascii_only.stream.text.isascii()
