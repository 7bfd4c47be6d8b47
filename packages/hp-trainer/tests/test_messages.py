"""The closing lines name commands that the user can type as they stand."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hp_components import (
    CheckpointManager,
    CorpusTokenizer,
    DummyDataLoader,
    HuggingFaceTokenizer,
    MetricsProcessor,
    Profiler,
    TextDataLoader,
)
from hp_trainer import Launch, TrainResult
from hp_trainer.cli.messages import STARTED_BY, closing


def told(
    reason: str = "finished",
    *,
    nproc: int = 1,
    saved: bool = True,
    dataloader: object = None,
    tokenizer: object = None,
    **checkpoint: object,
) -> str:
    config = SimpleNamespace(
        recipe="qwen3_5_v2.debug",
        tokenizer=tokenizer or CorpusTokenizer.Config(),
        dataloader=dataloader or TextDataLoader.Config(),
        checkpoint=CheckpointManager.Config(**checkpoint),
        metrics=MetricsProcessor.Config(),
        profiler=Profiler.Config(),
    )
    trainer = SimpleNamespace(config=config, first_step=0)
    return closing(trainer, TrainResult(8, reason, Path("runs/a"), saved), Launch(nproc=nproc))  # type: ignore[arg-type]


def test_a_finished_run_tells_where_everything_is_and_what_to_try() -> None:
    said = told()
    for part in ("loss.png", "metrics.jsonl", "checkpoint/", "resolved.yaml"):
        assert part in said
    assert "hp train --module qwen3_5_v2 --config debug --nproc 2" in said
    assert "hp train runs/a/resolved.yaml --training.steps 16" in said
    assert "hp sample runs/a\n" in said


@pytest.mark.parametrize(
    "own",
    [
        {"dataloader": TextDataLoader.Config(dataset_path="mine")},
        {"tokenizer": HuggingFaceTokenizer.Config(tokenizer_path="tok")},
    ],
)
def test_what_to_try_keeps_the_options_without_which_the_recipe_is_another_run(own: dict[str, object]) -> None:
    said = told(**own)
    assert "longer         hp train runs/a/resolved.yaml --dump_folder runs/a-2 --training.steps 32" in said
    assert "2 processes    hp train runs/a/resolved.yaml --dump_folder runs/a-2 --nproc 2" in said
    assert "--module" not in said


def test_an_option_that_the_data_does_not_have_is_not_suggested() -> None:
    assert "dataset_path my_folder" in told()
    assert "dataset_path" not in told(dataloader=DummyDataLoader.Config())


def test_an_interrupted_run_tells_how_to_resume_it() -> None:
    assert told("SIGTERM", nproc=2).endswith("Resume:  hp train runs/a/resolved.yaml --nproc 2")
    assert "Nothing was saved" in told("SIGTERM", saved=False)


def test_under_nox_the_commands_work_without_hp_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTED_BY, "nox -s train --")
    monkeypatch.setattr(sys, "executable", str(Path(".nox/train/bin/python").absolute()))
    said = told()
    assert "nox -s train -- --training.steps 32" in said
    assert ".nox/train/bin/hp train runs/a/resolved.yaml" in said


def test_a_last_save_of_the_weights_alone_is_nothing_to_resume_from() -> None:
    said = told(last_save_model_only=True)
    assert "checkpoint/step-8  the weights" in said
    assert "to resume from" not in said
    assert "go on" not in said
    exported = told(last_save_in_hf=True)
    assert "checkpoint/step-8-hf  the weights, as transformers loads them" in exported
    assert "the states to resume from" in exported
    stopped = told("SIGTERM", last_save_model_only=True)
    assert "the states to resume from" in stopped
    assert "Resume:" in stopped


def test_why_nothing_was_saved_is_said() -> None:
    assert "checkpoint.enable is off" in told(saved=False)
    assert "checkpoint.load_only is on" in told(saved=False, load_only=True)
