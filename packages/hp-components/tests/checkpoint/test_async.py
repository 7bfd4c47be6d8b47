"""Saves beside training, in one process: of which moment they are, what waits for them, what a failed one costs."""

import contextlib
import copy
import errno
import logging
import os
import re
import threading

import pytest
import torch
from torch import nn

from hp_components import CheckpointError, CheckpointManager, LRSchedulersContainer, OptimizersContainer
from hp_components.checkpoint import list_checkpoints
from hp_components.checkpoint.background import Background
from hp_protocols.errors import ConfigError


class Counter:
    def __init__(self):
        self.values = {"step": 0, "nested": [torch.zeros(2)]}

    def state_dict(self):
        return self.values

    def load_state_dict(self, state_dict):
        self.values = state_dict


class Run:
    """Every step changes every kind of state in place: weights, buffers, optimizer, schedule, random numbers."""

    def __init__(self, folder, seed=0, **config):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.optimizers = OptimizersContainer.Config(lr=1e-2).build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedule = schedule.build(optimizers=self.optimizers, training_steps=50)
        self.counter = Counter()
        self.manager = CheckpointManager.Config(**({"interval": 2, "async_mode": "async"} | config)).build(
            run_folder=folder,
            model_parts=[self.model],
            optimizers=self.optimizers,
            states={"lr_scheduler": self.schedule, "counter": self.counter},
        )

    def step(self):
        loss = self.model(torch.randn(6, 4)).square().mean()
        loss.backward()
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.schedule.step()
        self.counter.values["step"] += 1
        self.counter.values["nested"][0] += 1
        return loss.item()

    def train(self, first, last):
        losses = []
        for step in range(first, last + 1):
            losses.append(self.step())
            self.manager.poll()
            self.manager.save(step)
        return losses

    def contents(self):
        """Copies; drawing a random number shows the generator's state and puts it back."""
        generator = torch.get_rng_state()
        state = {**self.model.state_dict(), **self.optimizers.state_dict(), "draw": torch.rand(3)}
        torch.set_rng_state(generator)
        counter = {"step": self.counter.values["step"], "nested": self.counter.values["nested"][0]}
        return copy.deepcopy({**state, **counter, "lr": self.schedule.get_last_lr()})


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]) if isinstance(value, torch.Tensor) else value == right[name], name


class SlowDisk:
    """The disk answers when it is let go; until then a save in the background is under way."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        self.free = threading.Event()
        fsync = os.fsync

        def wait(fd):
            if threading.current_thread() is not threading.main_thread():
                assert self.free.wait(30)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", wait)

    def let_go_when_waited_for(self):
        result = Background.result

        def let_go(save):
            self.free.set()
            return result(save)

        self._monkeypatch.setattr(Background, "result", let_go)


@pytest.fixture
def slow_disk(monkeypatch):
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.free.set()


@contextlib.contextmanager
def full_disk():
    """Nothing gets to disk."""

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(os, "fsync", full)
        yield


def steps(folder):
    return [info.step for info in list_checkpoints(folder / "checkpoint")]


def test_a_save_is_of_its_step_however_training_goes_on(tmp_path, slow_disk):
    run = Run(tmp_path)
    for _ in range(2):
        run.step()
    run.manager.save(2)
    at_the_time = run.contents()
    for _ in range(5):
        run.step()
    assert steps(tmp_path) == []  # it was not written before the five steps
    slow_disk.free.set()
    run.manager.close()
    resumed = Run(tmp_path, seed=5)
    assert resumed.manager.load() == 2
    assert_same(resumed.contents(), at_the_time)


def test_a_second_save_does_not_touch_what_the_first_wrote(tmp_path):
    run = Run(tmp_path, interval=1)
    run.train(1, 5)
    run.manager.close()
    whole = Run(tmp_path / "blocking", interval=1, async_mode="disabled")
    whole.train(1, 5)
    for step in range(1, 6):
        loaded = []
        for folder in (tmp_path, tmp_path / "blocking"):
            again = Run(folder, seed=3, load_step=step)
            again.manager.load()
            loaded.append(again.contents())
        assert_same(*loaded)


def test_a_run_resumed_from_an_asynchronous_save_equals_an_uninterrupted_one_to_the_bit(tmp_path):
    expected = Run(tmp_path / "whole", async_mode="disabled").train(1, 10)
    cut = Run(tmp_path / "cut")
    cut.train(1, 4)
    cut.manager.close()
    resumed = Run(tmp_path / "cut", seed=9)
    assert resumed.manager.load() == 4
    assert resumed.train(5, 10) == expected[4:]
    resumed.manager.close()


def test_the_next_save_waits_for_the_one_on_its_way_and_says_how_long(tmp_path, slow_disk, caplog):
    run = Run(tmp_path)
    with caplog.at_level(logging.INFO):
        assert run.manager.save(2) is True
        assert steps(tmp_path) == []
        slow_disk.let_go_when_waited_for()
        assert run.manager.save(4) is True
    assert steps(tmp_path)[0] == 2
    (line,) = [record.message for record in caplog.records if "waited" in record.message]
    assert re.fullmatch(r"waited \d+\.\d\d s for the save of step 2 before saving step 4", line)
    assert re.search(r"step-2 in \d+\.\d\d s beside training, which it held up for \d+\.\d\d s", caplog.text)
    run.manager.close()
    assert steps(tmp_path) == [2, 4]


def test_the_final_save_is_on_disk_when_it_returns(tmp_path, slow_disk):
    run = Run(tmp_path)
    run.manager.save(2)
    slow_disk.let_go_when_waited_for()
    assert run.manager.save(3, force=True) is True
    assert steps(tmp_path) == [2, 3]


def test_a_final_save_of_the_step_on_its_way_only_waits_for_it(tmp_path, slow_disk):
    run = Run(tmp_path)
    run.manager.save(2)
    slow_disk.let_go_when_waited_for()
    assert run.manager.save(2, force=True) is True
    assert steps(tmp_path) == [2]
    run.manager.close()


@pytest.mark.parametrize("how", ["poll", "save", "close"])
def test_a_failed_save_is_told_and_costs_no_training_and_no_older_checkpoint(tmp_path, caplog, how):
    run = Run(tmp_path)
    run.train(1, 2)
    run.manager.close()
    with full_disk(), caplog.at_level(logging.ERROR):
        run.step()
        assert run.manager.save(4) is True  # on its way
        if how == "poll":
            while "NOT saved" not in caplog.text:
                run.manager.poll()
        elif how == "save":
            run.manager.save(6)
        else:
            run.manager.close()
        assert "checkpoint of step 4 NOT saved" in caplog.text
        assert "No space left on device" in caplog.text
        assert "Training goes on; the newest checkpoint is still step-2" in caplog.text
        run.manager.close()
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-2"]
    run.step()
    assert run.manager.save(6) is True
    run.manager.close()
    assert steps(tmp_path) == [2, 6]


def test_a_final_save_tries_again_what_failed_in_the_background_and_raises_if_it_fails_too(tmp_path):
    run = Run(tmp_path)
    with full_disk():
        run.manager.save(2)
        with pytest.raises(CheckpointError, match="No space left on device"):
            run.manager.save(2, force=True)
    assert run.manager.save(2, force=True) is True
    assert steps(tmp_path) == [2]


def test_older_checkpoints_are_deleted_in_the_background_too(tmp_path):
    run = Run(tmp_path, interval=1, keep_latest_k=2)
    run.train(1, 5)
    run.manager.close()
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-4", "step-5"]


def test_pinned_memory_is_refused_where_there_is_no_accelerator(tmp_path):
    with pytest.raises(ConfigError, match=r"async_with_pinned_mem is for accelerators.*\n?.*allowed: disabled, async"):
        Run(tmp_path, async_mode="async_with_pinned_mem")
