"""W&B, offline: one W&B run over all parts of a run, each step once."""

import json
import logging
import math
import os

import pytest
import wandb

from hp_protocols.errors import ConfigError


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wandb.teardown()  # it reads its variables once per process


def curve(records, name="loss"):
    points = []
    for record in records:
        items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if name in items:
            points.append((record.history.step.num, items[name]))
    return points


def runs(records):
    return [record.run for record in records if record.HasField("run")]


def test_a_resumed_run_goes_on_with_the_same_wandb_run_and_has_each_step_once(tmp_path, part, wandb_records, caplog):
    first = part(tmp_path / "my_run", enable_wandb=True, config_dict={"training": {"steps": 12}}).train(1, 4)
    state = first.metrics.state_dict()
    first.train(5, 7).metrics.close()
    second = part(tmp_path / "my_run", enable_wandb=True)
    with caplog.at_level(logging.INFO):
        second.resumed_from(state, 4)
    second.train(5, 12).metrics.close()
    assert "W&B has steps 5 to 7 already" in caplog.text
    records = wandb_records(tmp_path / "my_run")
    assert curve(records) == [(step, step / 10) for step in range(1, 13)]
    assert curve(records, "tokens") == [(step, 100.0 * step) for step in range(1, 13)]
    started = runs(records)
    assert len({run.run_id for run in started}) == 1
    assert {(run.project, run.display_name) for run in started} == {("hyper-parallel", "my_run")}
    (config,) = [item for item in started[0].config.update if item.key == "training"]
    assert json.loads(config.value_json) == {"steps": 12}


def test_values_that_are_not_finite_are_points_of_the_curve(tmp_path, part, wandb_records):
    run = part(tmp_path, enable_wandb=True).train(1, 1)
    run.step(2, math.nan, -math.inf)
    run.metrics.close()
    records = wandb_records(tmp_path)
    assert math.isnan(curve(records)[1][1])
    assert curve(records, "grad_norm")[1] == (2, -math.inf)


def test_wandbs_own_variables_come_first(tmp_path, part, wandb_records, monkeypatch):
    for name, value in {"PROJECT": "theirs", "NAME": "a name", "RUN_ID": "id1"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    part(tmp_path, enable_wandb=True).train(1, 1).metrics.close()
    run = runs(wandb_records(tmp_path))[0]
    assert (run.project, run.display_name, run.run_id) == ("theirs", "a name", "id1")


def test_every_rank_has_a_run_of_its_own_in_one_group_when_asked(tmp_path, part, wandb_records):
    for rank in (0, 1):
        part(tmp_path / "run", rank=rank, enable_wandb=True, save_for_all_ranks=True).train(1, 1).metrics.close()
    started = runs(wandb_records(tmp_path / "run"))
    assert {(run.run_group, run.display_name) for run in started} == {("run", "run-rank-0"), ("run", "run-rank-1")}
    assert len({run.run_id for run in started}) == 2


def test_without_a_login_the_run_is_refused_with_what_to_do(tmp_path, part, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match=r"metrics\.enable_wandb: W&B does not start: No API key.*\n.*wandb login"):
        part(tmp_path / "run", enable_wandb=True).metrics.begin()


def test_a_damaged_note_about_the_run_is_named(tmp_path, part):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/hp-run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"hp-run\.json: does not say which W&B run this is"):
        part(tmp_path, enable_wandb=True).metrics.begin()
