"""Sections that cannot be had together are refused before anything starts, with all the fields that take part."""

import math

import pytest

from hp_components import ChunkedCELoss
from hp_config import ConfigManager
from hp_protocols.errors import ConfigError
from hp_trainer.cross_checks import cross_faults
from hp_trainer.recipes.qwen3_5_v2 import qwen3_5_v2_debugmodel

RECIPE = ["--module", "qwen3_5_v2", "--config", "qwen3_5_v2_debugmodel"]


def test_a_step_in_backward_cannot_be_clipped():
    with pytest.raises(ConfigError) as caught:
        ConfigManager().parse_args([*RECIPE, "--optimizer.in_backward"])
    (fault,) = caught.value.faults
    assert fault.where == "--optimizer.in_backward, training.max_norm"
    assert "clipped to a norm of 1" in fault.problem
    assert fault.hint == "--training.max_norm inf, or drop in_backward"
    config = ConfigManager().parse_args([*RECIPE, "--optimizer.in_backward", "--training.max_norm", "inf"])
    assert config.optimizer.in_backward


def test_a_captured_step_takes_no_steps_in_backward():
    config = qwen3_5_v2_debugmodel()
    assert cross_faults(config) == []
    config.compile.mode = "graph"
    assert cross_faults(config) == []
    config.training.max_norm = math.inf
    config.optimizer.in_backward = True
    config.loss = ChunkedCELoss.Config()
    assert [fault.where for fault in cross_faults(config)] == ["optimizer.in_backward, compile.mode"]


def test_a_config_that_no_command_line_has_checked_is_refused_too():
    config = qwen3_5_v2_debugmodel()
    config.optimizer.in_backward = True
    with pytest.raises(ConfigError, match=r"optimizer\.in_backward, training\.max_norm"):
        config.build()
