"""loss.png: a real picture of what the records say, drawn without a display."""

import json
import os
import struct
import subprocess
import sys

import pytest

from hp_components.metrics import plot_loss
from hp_components.metrics.plot import smoothed


def write_records(path, losses, first=1):
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=first)]
    lines.insert(1, {"event": "non_finite", "step": 1, "values": ["loss=nan"]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_a_run_becomes_a_picture(tmp_path):
    records = write_records(tmp_path / "metrics.jsonl", [5.0, None, 4.0, 3.5, 3.2, 3.0, 2.9])
    assert plot_loss({"run": records}, tmp_path / "loss.png", "debug")
    width, height = size(tmp_path / "loss.png")
    assert width > 800
    assert height > 500
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_several_runs_share_one_picture(tmp_path):
    runs = {name: write_records(tmp_path / name, [4.0, 3.0, 2.0, 1.5, 1.2, 1.1]) for name in ("a", "b")}
    assert plot_loss(runs, tmp_path / "both.png")
    size(tmp_path / "both.png")


def test_a_single_record_is_enough(tmp_path):
    assert plot_loss({"run": write_records(tmp_path / "metrics.jsonl", [5.0])}, tmp_path / "loss.png")


def test_without_any_loss_nothing_is_drawn(tmp_path):
    records = write_records(tmp_path / "metrics.jsonl", [None, None])
    assert not plot_loss({"run": records}, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_it_needs_no_display_and_leaves_matplotlibs_state_alone(tmp_path):
    records = write_records(tmp_path / "metrics.jsonl", [5.0, 4.0])
    code = (
        "import sys\nfrom hp_components.metrics import plot_loss\n"
        "assert plot_loss({'run': sys.argv[1]}, sys.argv[2])\nassert 'matplotlib.pyplot' not in sys.modules\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(records), str(tmp_path / "loss.png")]
    subprocess.run(command, check=True, env={**os.environ, "DISPLAY": ""})


@pytest.mark.parametrize("count", [1, 2, 5, 6, 50, 1000])
def test_a_smoothed_constant_is_the_constant_from_end_to_end(count):
    assert smoothed([3.0] * count) == pytest.approx([3.0] * count)


def test_a_smoothed_curve_loses_the_noise_and_does_not_lag():
    trend = [10 - 0.05 * step for step in range(200)]
    smooth = smoothed([value + (0.5 if step % 2 else -0.5) for step, value in enumerate(trend)])
    assert smooth[20:-20] == pytest.approx(trend[20:-20], abs=0.01)
