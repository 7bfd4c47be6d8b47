"""What `ConfigManager` does beyond reading: the warm-up, the world size, the process's own arguments."""

from __future__ import annotations

import logging
import sys

import pytest
import toy_trainer

from hp_config import ConfigError, ConfigManager

SMALL = ("--module", "toy", "--config", "small")


def test_without_arguments_the_processs_own_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hp", *SMALL, "--training.steps=7"])
    assert ConfigManager().parse_args().training.steps == 7


def test_a_warmup_longer_than_the_run_is_clamped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = ConfigManager().parse_args([*SMALL, "--training.steps=3"])
    assert config.lr_scheduler.warmup_steps == 3
    assert "lr_scheduler.warmup_steps 4 is longer than the run; set to its 3 steps" in caplog.text


def test_a_schedule_of_its_own_length_keeps_its_warmup(caplog: pytest.LogCaptureFixture) -> None:
    words = [*SMALL, "--training.steps=3", "--lr_scheduler.total_steps=100", "--lr_scheduler.warmup_steps=50"]
    assert ConfigManager().parse_args(words).lr_scheduler.warmup_steps == 50
    assert caplog.text == ""


def test_only_one_rank_logs_what_all_ranks_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.WARNING):
        config = ConfigManager().parse_args([*SMALL, "--training.steps=3", "--debug.seed=1", "--debug.seed=2"])
    assert config.lr_scheduler.warmup_steps == 3
    assert caplog.text == ""


def test_the_degrees_are_checked_where_the_number_of_processes_is_given() -> None:
    words = [*SMALL, "--parallelism.data_parallel_shard_degree=2"]
    assert ConfigManager().parse_args(words, world_size=2) == ConfigManager().parse_args(words)
    with pytest.raises(ConfigError, match="= 2, but the run has 4 processes"):
        ConfigManager().parse_args(words, world_size=4)


def test_the_recipes_config_is_not_changed_by_options(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = toy_trainer.small()
    monkeypatch.setattr(toy_trainer, "small", lambda: shared)
    ConfigManager().parse_args([*SMALL, "--training.steps=5", "--optimizer.lr=2"])
    assert shared == toy_trainer.Trainer.Config(
        model_spec=shared.model_spec,
        training=toy_trainer.TrainingConfig(steps=10, seq_len=16, local_batch_size=2),
    )


def test_the_config_builds_its_owner() -> None:
    trainer = ConfigManager().parse_args([*SMALL, "--training.steps=5"]).build()
    assert isinstance(trainer, toy_trainer.Trainer)
    assert trainer.config.training.steps == 5
