"""TensorBoard's own reader sees one curve, however often the run was cut off and resumed."""

import json
import math
import resource
import subprocess
import sys
from contextlib import contextmanager

import pytest

from hp_components import MetricsProcessor
from hp_protocols.errors import ConfigError

KILLED = """
import sys, time
from hp_components import MetricsProcessor
metrics = MetricsProcessor.Config(log_freq=1, enable_tensorboard=True).build(run_folder=sys.argv[1], total_steps=12)
metrics.begin()
for step in range(1, 5):
    metrics.record(step, loss=step / 10, grad_norm=1.0, lr=1e-3, tokens=100)
metrics.state_dict()  # as a checkpoint after step 4 would ask for it
for step in range(5, 8):
    metrics.record(step, loss=9.0, grad_norm=1.0, lr=1e-3, tokens=100)
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_curves_have_the_names_and_values_of_the_records(tmp_path, part, tensorboard_curves):
    part(tmp_path, enable_tensorboard=True).train(1, 12).metrics.close()
    curves = tensorboard_curves(tmp_path / "tb")
    # mfu and memory are not known on the cpu: no curve, rather than one of zeros.
    assert sorted(curves) == ["data_wait", "grad_norm", "loss", "lr", "time", "tokens", "tokens_per_second"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name, points in curves.items():
        assert points == [(record["step"], pytest.approx(record[name])) for record in records], name


def test_a_run_that_resumes_from_an_older_step_has_each_step_once(tmp_path, part, tensorboard_curves):
    first = part(tmp_path, enable_tensorboard=True).train(1, 4)
    state = first.metrics.state_dict()
    first.train(5, 7, shift=5.0).metrics.close()
    second = part(tmp_path, enable_tensorboard=True).resumed_from(state, 4)
    second.train(5, 10).metrics.close()
    third = part(tmp_path, enable_tensorboard=True).resumed_from(second.metrics.state_dict(), 10)
    third.train(11, 12).metrics.close()
    points = tensorboard_curves(tmp_path / "tb")["loss"]
    assert points == [(step, pytest.approx(step / 10)) for step in range(1, 13)]


def test_a_killed_run_has_lost_no_record_before_its_checkpoint(tmp_path, part, tensorboard_curves):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    again = part(tmp_path, enable_tensorboard=True).resumed_from({}, 4)
    again.train(5, 12).metrics.close()
    points = tensorboard_curves(tmp_path / "tb")["loss"]
    assert points == [(step, pytest.approx(step / 10)) for step in range(1, 13)]


def test_values_that_are_not_finite_are_points_of_the_curve(tmp_path, part, tensorboard_curves):
    run = part(tmp_path, enable_tensorboard=True).train(1, 1)
    run.step(2, math.nan, math.inf)
    run.metrics.close()
    curves = tensorboard_curves(tmp_path / "tb")
    assert math.isnan(curves["loss"][1][1])
    assert curves["grad_norm"][1] == (2, math.inf)


def test_the_resolved_configuration_is_there_to_read(tmp_path, part):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = {"training": {"steps": 12}, "recipe": "grün"}
    part(tmp_path, enable_tensorboard=True, config_dict=config).train(1, 1).metrics.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (shown,) = events.Tensors("config/text_summary")
    text = shown.tensor_proto.string_val[0].decode()
    assert json.loads(text.removeprefix("```json\n").removesuffix("\n```")) == config


def test_validation_is_an_event_and_a_curve_of_its_own(tmp_path, part, tensorboard_curves):
    run = part(tmp_path, enable_tensorboard=True, log_freq=5).train(1, 2)
    run.metrics.validation(nll=3.5, perplexity=math.inf, tokens=70)
    run.metrics.close()
    curves = tensorboard_curves(tmp_path / "tb")
    assert curves["validation/nll"] == [(2, 3.5)]
    assert curves["validation/perplexity"] == [(2, math.inf)]
    event = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    # JSON has no inf: the text says what it was.
    assert event == {"event": "validation", "step": 2, "time": 1.0, "nll": 3.5, "perplexity": "inf", "tokens": 70}


def test_only_rank_0_writes_unless_all_are_asked(tmp_path, part, tensorboard_curves):
    for rank in (0, 1):
        part(tmp_path / "one", rank=rank, enable_tensorboard=True, save_tb_folder="curves").train(1, 1).metrics.close()
        part(tmp_path / "all", rank=rank, enable_tensorboard=True, save_for_all_ranks=True).train(1, 1).metrics.close()
    assert len(list((tmp_path / "one/curves").iterdir())) == 1
    for rank in (0, 1):
        assert tensorboard_curves(tmp_path / f"all/tb/rank_{rank}")["loss"] == [(1, pytest.approx(0.1))]


@contextmanager
def no_room_beyond(size):
    """The kernel lets no file of this process grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_costs_points_and_not_the_run(tmp_path, part, tensorboard_curves, caplog):
    run = part(tmp_path, enable_tensorboard=True).train(1, 3)
    run.metrics.state_dict()
    (file,) = (tmp_path / "tb").iterdir()
    with no_room_beyond(file.stat().st_size):
        run.step(4, 0.4)
        run.metrics.state_dict()
    assert "could not be written" in caplog.text
    assert "the next record starts a new file" in caplog.text
    run.train(5, 12).metrics.close()
    steps = [step for step, _ in tensorboard_curves(tmp_path / "tb")["loss"]]
    assert steps == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(("knob", "module"), [("enable_tensorboard", "tensorboard"), ("enable_wandb", "wandb")])
def test_a_missing_extra_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch, knob, module):
    monkeypatch.setitem(sys.modules, module, None)
    config = MetricsProcessor.Config(**{knob: True})
    assert config.faults("metrics") == []  # another machine may have it
    hint = rf'metrics.{knob}: needs {module}, which is not installed\n.*pip install "hp-components\[{module}\]"'
    with pytest.raises(ConfigError, match=hint):
        config.build(run_folder=tmp_path, total_steps=1)


def test_a_folder_of_wandbs_name_is_not_taken_for_the_package(tmp_path):
    script = (
        "import importlib.util, sys\n"
        "sys.meta_path = [finder for finder in sys.meta_path if finder is not None]\n"
        "sys.path = [entry for entry in sys.path if 'site-packages' not in entry]\n"
        "from hp_components._extras import missing_extra_fault\n"
        "assert missing_extra_fault('here', 'wandb', 'wandb') is not None\n"
        "assert missing_extra_fault('here', 'json', 'json') is None\n"
    )
    (tmp_path / "wandb").mkdir()
    imports = "import hp_components, hp_protocols.errors\n"
    done = subprocess.run(
        [sys.executable, "-c", imports + script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
