"""CheckpointManager in one process: resume to the bit, what is kept, what is refused, what a failed save costs."""

import errno
import json
import logging
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hp_components import CheckpointError, CheckpointManager, LRSchedulersContainer, OptimizersContainer
from hp_components.checkpoint import list_checkpoints, load_model
from hp_protocols.errors import ConfigError


class Counter:
    """A state like the trainer's own: steps and tokens."""

    def __init__(self):
        self.values = {"step": 0, "tokens": 0, "nested": [{"tensor": torch.zeros(2)}, b"bytes", None]}

    def state_dict(self):
        return self.values

    def load_state_dict(self, state_dict):
        self.values = state_dict


class Run:
    """A small training run whose every step draws random numbers from four generators."""

    def __init__(self, folder, *, width=8, seed=0, states=True, **config):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 3))
        self.optimizers = OptimizersContainer.Config(lr=1e-2).build(model_parts=[self.model])
        self.schedule = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=50
        )
        self.counter = Counter()
        self.manager = CheckpointManager.Config(**({"interval": 2} | config)).build(
            run_folder=folder,
            model_parts=[self.model],
            optimizers=self.optimizers,
            states={"lr_scheduler": self.schedule, "train": self.counter} if states else {},
        )

    def train(self, first, last):
        """Steps first..last; returns the loss and the random draws of each."""
        seen = []
        for step in range(first, last + 1):
            loss = self.model(torch.randn(6, 4)).square().mean()
            loss.backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedule.step()
            self.counter.values["step"] = step
            self.counter.values["tokens"] += 6
            seen.append((loss.item(), self.schedule.get_last_lr()[0], random.random(), np.random.rand()))
            self.manager.save(step)
        self.manager.close()  # older checkpoints are deleted
        return seen


def steps(folder):
    return [info.step for info in list_checkpoints(Path(folder) / "checkpoint")]


def damage(folder, step):
    (data,) = (Path(folder) / f"checkpoint/step-{step}").glob("*.distcp")
    with data.open("r+b") as file:
        file.truncate(100)


def entries(folder):
    return sorted(path.name for path in (Path(folder) / "checkpoint").iterdir())


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(tmp_path):
    whole = Run(tmp_path / "whole", interval=100)
    expected = whole.train(1, 10)
    Run(tmp_path / "cut").train(1, 4)
    resumed = Run(tmp_path / "cut", seed=7)
    assert resumed.manager.load() == 4
    assert resumed.counter.values["step"] == 4
    assert resumed.counter.values["tokens"] == 24
    assert resumed.train(5, 10) == expected[4:]
    for (name, a), (_, b) in zip(whole.model.state_dict().items(), resumed.model.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_nothing_is_written_before_the_first_save(tmp_path):
    run = Run(tmp_path / "new")
    assert run.manager.load() is None
    assert run.manager.latest() is None
    assert not (tmp_path / "new").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_is_one_root_of_torchs_distributed_checkpoint(tmp_path):
    run = Run(tmp_path)
    run.train(1, 2)
    target = {"model": {name: torch.zeros_like(value) for name, value in run.model.state_dict().items()}}
    dcp.load(target, checkpoint_id=tmp_path / "checkpoint/step-2", no_dist=True)
    assert all(torch.equal(target["model"][name], value) for name, value in run.model.state_dict().items())


def test_saves_happen_every_interval_and_when_forced(tmp_path):
    run = Run(tmp_path, interval=3)
    run.train(1, 7)
    assert steps(tmp_path) == [3, 6]
    assert run.manager.save(7) is False
    assert run.manager.save(7, force=True) is True
    assert steps(tmp_path) == [3, 6, 7]
    assert run.manager.latest() == 7
    assert not run.manager.should_save(0)


def test_a_step_that_is_saved_already_is_not_saved_twice(tmp_path):
    run = Run(tmp_path)
    run.train(1, 2)
    before = (tmp_path / "checkpoint/step-2").stat().st_ino
    assert run.manager.save(2, force=True) is True
    assert (tmp_path / "checkpoint/step-2").stat().st_ino == before
    resumed = Run(tmp_path)
    resumed.manager.load()
    assert resumed.manager.save(2, force=True) is True
    assert (tmp_path / "checkpoint/step-2").stat().st_ino == before


def test_disabled_checkpoints_save_and_load_nothing(tmp_path):
    run = Run(tmp_path, enable=False)
    run.train(1, 4)
    assert run.manager.save(4, force=True) is False
    assert run.manager.load() is None
    assert not (tmp_path / "checkpoint").exists()


# Which checkpoint


def test_the_newest_is_loaded_by_default_and_the_log_says_so(tmp_path, caplog):
    Run(tmp_path).train(1, 6)
    with caplog.at_level(logging.INFO):
        assert Run(tmp_path).manager.load() == 6
    assert f"loading checkpoint {tmp_path}/checkpoint/step-6: the newest of 3" in caplog.text


def test_load_step_chooses_and_warns_of_later_ones(tmp_path, caplog):
    Run(tmp_path).train(1, 6)
    with caplog.at_level(logging.INFO):
        assert Run(tmp_path, load_step=2).manager.load() == 2
    assert "step-2: asked for by load_step" in caplog.text
    assert "checkpoints of later steps stay in" in caplog.text
    assert Run(tmp_path, load_step=2).manager.load(4) == 4


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    Run(tmp_path).train(1, 4)
    with pytest.raises(ConfigError, match=r"no checkpoint of step 3 .*\n?.*steps found: 2, 4"):
        Run(tmp_path, load_step=3).manager.load()


def test_steps_are_ordered_as_numbers(tmp_path):
    run = Run(tmp_path, interval=100)
    for step in (9, 10, 100):
        run.manager.save(step, force=True)
    assert steps(tmp_path) == [9, 10, 100]


def test_a_shortened_file_is_noticed_before_anything_is_loaded(tmp_path):
    Run(tmp_path).train(1, 4)
    damage(tmp_path, 4)
    run = Run(tmp_path, seed=3)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"step-4: damaged since it was saved: __0_0.distcp has 100 bytes instead of"):
        run.manager.load()
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
    assert run.manager.load(2) == 2


# Whose checkpoint


def test_a_folder_of_another_model_is_refused_with_every_name_that_does_not_fit(tmp_path):
    Run(tmp_path).train(1, 2)
    other = Run(tmp_path, width=9)
    other.model.append(nn.Linear(3, 3))
    before = other.model[0].weight.clone()
    with pytest.raises(ConfigError) as caught:
        other.manager.load()
    text = str(caught.value)
    assert "missing in the checkpoint: model.4.weight, model.4.bias" in text
    assert "model.0.weight (checkpoint (8, 4), here (9, 4))" in text
    assert torch.equal(other.model[0].weight, before)


def test_names_that_only_the_checkpoint_has_are_told(tmp_path):
    Run(tmp_path).train(1, 2)
    smaller = nn.Sequential(nn.Linear(4, 8))
    with pytest.raises(ConfigError, match=r"unknown to this run: model\.1\.weight"):
        load_model(smaller, tmp_path / "checkpoint/step-2")


def test_long_lists_of_names_are_shortened(tmp_path):
    with_many = nn.Sequential(*[nn.Linear(2, 2) for _ in range(30)])
    Run(tmp_path).train(1, 2)
    with pytest.raises(ConfigError, match="and 46 more"):
        load_model(with_many, tmp_path / "checkpoint/step-2")


def test_a_state_that_the_checkpoint_lacks_is_refused_and_one_it_has_too_many_is_told(tmp_path, caplog):
    Run(tmp_path / "without", states=False).train(1, 2)
    with pytest.raises(ConfigError, match=r"holds no states\.lr_scheduler, states\.train"):
        Run(tmp_path / "without").manager.load()
    Run(tmp_path / "with").train(1, 2)
    with caplog.at_level(logging.WARNING):
        assert Run(tmp_path / "with", states=False).manager.load() == 2
    assert "not loaded, since this run has no such part: states.lr_scheduler, states.train" in caplog.text


def test_the_weights_alone_load_into_a_plain_model(tmp_path):
    run = Run(tmp_path)
    run.train(1, 2)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    load_model(model, tmp_path / "checkpoint/step-2")
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), run.model.state_dict().values(), strict=True)
    )
    with pytest.raises(ConfigError, match="is no whole checkpoint"):
        load_model(model, tmp_path / "checkpoint/step-3")


def test_another_type_is_converted_and_told(tmp_path, caplog):
    Run(tmp_path).train(1, 2)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)).to(torch.float64)
    with caplog.at_level(logging.WARNING):
        load_model(model, tmp_path / "checkpoint/step-2")
    assert "model.0.weight (torch.float32 → torch.float64)" in caplog.text


def test_hyperparameters_that_the_checkpoint_lacks_do_not_stop_a_resume(tmp_path, caplog):
    run = Run(tmp_path)
    run.train(1, 2)
    resumed = Run(tmp_path)
    for group in resumed.optimizers.param_groups:
        group["invented"] = 3  # as a later release of torch may do
    with caplog.at_level(logging.WARNING):
        assert resumed.manager.load() == 2
    assert "hyperparameters not in the checkpoint, this run's are used: invented" in caplog.text
    assert resumed.optimizers.param_groups[0]["invented"] == 3
    assert torch.equal(*(r.optimizers.state_dict()["state.0.weight.exp_avg"] for r in (run, resumed)))


def test_a_state_that_would_need_code_to_load_is_refused_when_it_is_saved(tmp_path):
    run = Run(tmp_path)
    run.counter.values["path"] = Path("x")
    with pytest.raises(CheckpointError, match="the state 'train' cannot be saved"):
        run.manager.save(2, force=True)


# What is kept


def test_only_the_latest_k_are_kept(tmp_path):
    Run(tmp_path, keep_latest_k=2).train(1, 8)
    assert entries(tmp_path) == ["step-6", "step-8"]
    Run(tmp_path / "all", keep_latest_k=0).train(1, 8)
    assert steps(tmp_path / "all") == [2, 4, 6, 8]
    Run(tmp_path / "one", keep_latest_k=1).train(1, 8)
    assert entries(tmp_path / "one") == ["step-8"]


def test_nothing_that_is_not_ours_is_deleted(tmp_path, caplog):
    run = Run(tmp_path, keep_latest_k=1)
    run.train(1, 2)
    folder = tmp_path / "checkpoint"
    (folder / "step-2/notes.txt").write_text("the good one")
    (folder / "notes.txt").write_text("mine")
    (folder / "step-0-backup").mkdir()
    shutil.copytree(folder / "step-2", folder / "step-1")  # says step 2 inside: not what we wrote there
    (folder / "step-3").mkdir()
    (folder / "step-3/.metadata").write_text("another program's")
    (folder / ".step-9.partial-mine").mkdir()
    with caplog.at_level(logging.WARNING):
        run.train(3, 6)
    left = entries(tmp_path)
    assert left == [".step-9.partial-mine", "notes.txt", "step-0-backup", "step-1", "step-2", "step-3", "step-6"]
    assert (folder / "step-2/notes.txt").read_text() == "the good one"
    assert "holds files that are not ours: notes.txt" in caplog.text


def test_what_was_just_saved_is_kept_although_later_steps_of_an_earlier_run_exist(tmp_path):
    Run(tmp_path, keep_latest_k=3).train(1, 8)
    again = Run(tmp_path, keep_latest_k=2, load_step=4)
    again.manager.load()
    again.manager.save(5, force=True)
    assert 5 in steps(tmp_path)


def test_a_step_saved_again_after_going_back_replaces_the_old_one(tmp_path):
    first = Run(tmp_path)
    first.train(1, 4)
    again = Run(tmp_path, load_step=2)
    again.manager.load()
    again.counter.values["tokens"] = 1000
    again.train(3, 4)
    assert entries(tmp_path) == ["step-2", "step-4"]
    check = Run(tmp_path)
    check.manager.load()
    assert check.counter.values["tokens"] == 1012


# Leftovers


def leave(folder, name):
    path = Path(folder) / "checkpoint" / name
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"half")
    return path


def test_a_partial_folder_is_never_taken_for_a_checkpoint_and_is_cleaned_up_with_a_word(tmp_path, caplog):
    Run(tmp_path).train(1, 2)
    leave(tmp_path, ".step-4.partial-0123abcd")
    leave(tmp_path, ".step-1.deleting-0123abcd")
    with caplog.at_level(logging.WARNING):
        run = Run(tmp_path)
    assert run.manager.latest() == 2
    assert entries(tmp_path) == ["step-2"]
    assert ".step-4.partial-0123abcd: removed, left over from a save that was killed" in caplog.text


def test_a_leftover_that_holds_other_files_stays(tmp_path, caplog):
    path = leave(tmp_path, ".step-4.partial-0123abcd")
    (path / "thesis.tex").write_text("…")
    with caplog.at_level(logging.WARNING):
        Run(tmp_path)
    assert (path / "thesis.tex").exists()
    assert "left alone, since it holds files that are not ours: thesis.tex" in caplog.text


def test_a_checkpoint_that_was_being_replaced_is_brought_back(tmp_path, caplog):
    Run(tmp_path).train(1, 4)
    folder = tmp_path / "checkpoint"
    (folder / "step-4").rename(folder / ".step-4.replaced-0123abcd")
    with caplog.at_level(logging.WARNING):
        assert Run(tmp_path).manager.load() == 4
    assert "brought back" in caplog.text


# Failed saves


def test_an_unwritable_folder_costs_no_training_and_no_older_checkpoint(tmp_path, caplog, monkeypatch):
    run = Run(tmp_path)
    run.train(1, 2)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr(os, "fsync", full)
        assert run.manager.save(4) is False
        with pytest.raises(CheckpointError, match="No space left on device"):
            run.manager.save(4, force=True)
    assert "checkpoint of step 4 NOT saved" in caplog.text
    assert "No space left on device" in caplog.text
    assert "Training goes on; the newest checkpoint is still step-2" in caplog.text
    assert entries(tmp_path) == ["step-2"]
    assert run.manager.save(4) is True
    assert Run(tmp_path).manager.load() == 4


def test_a_file_where_the_folder_should_be_is_a_failed_save(tmp_path, caplog):
    (tmp_path / "checkpoint").write_text("in the way")
    run = Run(tmp_path)
    assert run.manager.save(2) is False
    assert "there is no older checkpoint" in caplog.text
    with pytest.raises(CheckpointError):
        run.manager.save(2, force=True)


def test_the_error_of_a_state_is_a_failed_save_too(tmp_path):
    run = Run(tmp_path)

    def broken():
        raise KeyError("gone")

    run.counter.state_dict = broken
    assert run.manager.save(2) is False
    assert entries(tmp_path) == []


def test_failing_to_delete_an_old_one_does_not_fail_the_save(tmp_path, caplog, monkeypatch):
    run = Run(tmp_path, keep_latest_k=1)
    run.train(1, 2)

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert run.manager.save(4) is True
    run.manager.close()
    assert "older ones could not be deleted" in caplog.text
    monkeypatch.undo()
    assert Run(tmp_path).manager.load() == 4


# Config


def test_every_fault_of_a_config_is_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        CheckpointManager.Config(
            interval=0, keep_latest_k=-1, load_step=-2, folder="../elsewhere", async_mode="asinc"
        ).build(run_folder=tmp_path, model_parts=[nn.Linear(1, 1)])
    assert {fault.where.removeprefix("checkpoint.") for fault in caught.value.faults} == {
        "interval", "keep_latest_k", "load_step", "folder", "async_mode",
    }  # fmt: skip
    assert "'asinc' is unknown; allowed: disabled, async, async_with_pinned_mem" in str(caught.value)


def test_the_marker_says_how_it_was_saved(tmp_path):
    Run(tmp_path).train(1, 2)
    marker = json.loads((tmp_path / "checkpoint/step-2/hp_checkpoint.json").read_text())
    assert marker["format"] == 1
    assert marker["step"] == 2
    assert marker["world_size"] == 1
    assert marker["files"].keys() == {".metadata", "__0_0.distcp"}
