"""Callbacks by what they do: what each hook may look at and change, their order, what an error in one leads to."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import build, train

from hp_protocols.platform import get_platform
from hp_trainer import Callback
from hp_trainer._legacy.callbacks import MemoryMonitorCallback, default_callbacks

HOOKS = [name for name in vars(Callback) if name.startswith("on_")]
ROWS = {"data__type": "preset_pt", "data__train_path": "rows.pt", "data__train_size": 8}
EVERYTHING: dict[str, Any] = {
    **ROWS,
    "train__num_train_epochs": 2,
    "train__max_steps": 3,
    "train__eval": {"eval_steps": 2, "eval_dataset": "rows.pt"},
}


@pytest.fixture(autouse=True)
def rows() -> None:
    ids = torch.randint(300, (8, 16), generator=torch.Generator().manual_seed(3))
    torch.save({"input_ids": ids}, "rows.pt")


class Scales(Callback):
    """Halves all gradients before they are clipped, doubles the rate behind each step, stops at what it is told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_substep_end(self, trainer: Any) -> None:
        self.seen.append(float(trainer.model.lm_head.weight.grad.norm()))

    def on_pre_optimizer_step(self, trainer: Any) -> None:
        self.seen.append("clip")
        for parameter in trainer.model.parameters():
            parameter.grad.mul_(0.5)

    def on_step_end(self, trainer: Any, result: Any) -> None:
        self.seen.append((trainer.state.step, result.grad_norm, trainer.model.lm_head.weight.grad))


def test_gradients_can_be_looked_at_and_changed_between_backward_and_clipping() -> None:
    plain, scales = Scales(), Scales()
    plain.on_pre_optimizer_step = lambda trainer: plain.seen.append("clip")  # type: ignore[method-assign]
    constant = {"train__optimizer": {"max_grad_norm": float("inf")}, "train__max_steps": 1}
    train(plain, **constant)
    train(scales, **constant)
    first, second, mark, (step, norm, gone) = plain.seen
    assert mark == "clip"
    assert 0 < first != second
    assert scales.seen[:2] == [first, second]
    assert scales.seen[3][1] == pytest.approx(norm / 2, rel=1e-6)
    assert (step, gone) == (1, None)


def test_what_is_logged_can_be_added_to_by_callbacks_that_come_before_and_is_seen_by_those_behind() -> None:
    class Adds(Callback):
        def on_log(self, trainer: Any, logs: dict[str, float]) -> None:
            logs["mine"] = trainer.state.step

    class Reads(Callback):
        seen: list[float] = []  # noqa: RUF012

        def on_log(self, trainer: Any, logs: dict[str, float]) -> None:
            self.seen.append(logs["mine"])
            assert {"loss", "grad_norm", "lr", "tokens"} <= logs.keys()

    train(Adds(), Reads())
    assert Reads.seen == [1, 2]


def test_what_is_saved_is_there_and_what_is_loaded_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Paths(Callback):
        def __init__(self) -> None:
            self.saved: list[tuple[int, str, bool]] = []
            self.loaded: list[tuple[str, int]] = []

        def on_save(self, trainer: Any, path: Path) -> None:
            self.saved.append((trainer.state.step, path.name, path.is_dir()))

        def on_load(self, trainer: Any, path: Path) -> None:
            self.loaded.append((str(path), trainer.state.step))

    paths = Paths()
    place = {"save_hf_weights": True, "save_steps": 2}
    train(paths, train__max_steps=3, train__checkpoint=place)
    assert paths.saved == [(2, "step-2", True), (3, "step-3", True)]
    assert paths.loaded == []
    train(paths, train__max_steps=4, train__checkpoint={"save_hf_weights": False, "load_path": "outputs"})
    train(paths, model__weights_path="outputs/checkpoint/step-3-hf", train__checkpoint={"output_dir": "new"})
    assert paths.loaded == [("outputs/checkpoint/step-3", 3), ("outputs/checkpoint/step-3-hf", 0)]


def test_callbacks_are_called_in_their_order_those_of_the_caller_behind_the_trainers_own() -> None:
    called: list[str] = []

    class Named(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_begin(self, trainer: Any) -> None:
            called.append(self.name)

        def on_step_end(self, trainer: Any, result: Any) -> None:
            called.append(f"{self.name} {Path('outputs/checkpoint/step-1').is_dir()}")

        def close(self, trainer: Any) -> None:
            called.append(f"{self.name} closed")

    trainer = build(Named("first"), train__checkpoint={"save_steps": 1, "save_hf_weights": False})
    trainer.add_callback(Named("second"))
    assert [type(one) for one in trainer.callbacks[:-2]] == [type(one) for one in default_callbacks(trainer)]
    trainer.train()
    trainer.close()
    step = ["first True", "second True"]  # what the trainer saves at a step is there
    assert called == ["first", "second", *step, *step, "first closed", "second closed"]


def run_and_close(*callbacks: Callback, **options: Any) -> None:
    trainer = build(*callbacks, **options)
    try:
        trainer.train()
    finally:
        trainer.close()


@pytest.mark.parametrize("hook", [*HOOKS, "close", "around_steps"])
def test_an_error_in_any_hook_ends_the_run_with_that_error_and_everything_is_let_go_of(hook: str) -> None:
    closed: list[bool] = []

    class Fails(Callback):
        def close(self, trainer: Any) -> None:
            closed.append(True)

    def fail(*values: Any) -> None:
        raise LookupError(f"asked to fail in {hook}")

    last = Callback()
    last.close = lambda trainer: closed.append(True)  # type: ignore[method-assign]
    options = dict(EVERYTHING)
    if hook == "on_load":
        train(train__max_steps=1, **ROWS)
        options["train__checkpoint"] = {"save_hf_weights": False, "load_path": "outputs"}
    failing = Fails()
    setattr(failing, hook, fail)
    with pytest.raises(LookupError, match=f"asked to fail in {hook}"):
        run_and_close(failing, last, **options)
    if hook not in ("on_init_end", "on_load"):
        assert closed == [True] * (1 if hook == "close" else 2)
    # The folder is free again: the next run goes on in it, or beside it.
    assert not torch.distributed.is_initialized()
    again = train(train__max_steps=1, train__checkpoint={"save_hf_weights": False, "output_dir": "again"}, **ROWS)
    assert again.result.reason == "finished"
    assert os.environ["LOCAL_RANK"] == "0"


class Device(Callback):
    """Stands in for a device that needs so many GiB in each step and holds one between them."""

    def __init__(self, needs: list[int]) -> None:
        self.needs, self.peak, self.seen = needs, 9, list[float]()  # nine for building the model

    def max_memory(self, device: str | None = None) -> int:
        return self.peak * 2**30

    def reset_max_memory(self, device: str | None = None) -> None:
        self.peak = 1

    def on_substep_end(self, trainer: Any) -> None:
        self.peak = max(self.peak, self.needs[trainer.state.step])

    def on_step_end(self, trainer: Any, result: Any) -> None:
        monitor = next(one for one in trainer.callbacks if isinstance(one, MemoryMonitorCallback))
        self.seen.append(monitor.peaks.get("device", 0.0))


@pytest.mark.parametrize(("each_step", "expected"), [(False, [0, 5, 5, 5, 5, 6]), (True, [0, 3, 3, 2, 2, 6])])
def test_peaks_of_the_device_are_those_of_the_run_or_of_the_last_step_and_the_records_have_theirs(
    each_step: bool, expected: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hp_trainer")
    device = Device([5, 3, 4, 2, 1, 6])
    for name in ("max_memory", "reset_max_memory"):
        monkeypatch.setattr(type(get_platform()), name, staticmethod(getattr(device, name)))
    train(
        device,
        train__max_steps=6,
        train__logging={"log_steps": 4},
        train__memory_monitor={"enabled": True, "log_steps": 2, "reset_peak_each_step": each_step},
    )
    assert device.seen == expected
    assert [float(line.rpartition("device ")[2].split()[0]) for line in caplog.messages if "peak memory" in line] == [
        expected[step] for step in (1, 3, 5)
    ]
    records = map(json.loads, Path("outputs/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    assert [(r["step"], r["memory_gib"]) for r in records if "event" not in r] == [(1, 5.0), (4, 4.0), (6, 6.0)]
