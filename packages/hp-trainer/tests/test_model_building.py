"""What is asked of a model before it is built, also where no command line was read."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from hp_protocols import BaseModel, ModelSpec
from hp_protocols.errors import ConfigError
from hp_trainer.model_building import build_model
from hp_trainer.recipes.qwen3_5_v2 import qwen3_5_v2_debugmodel


class Plain(BaseModel):
    """Knows no parallelism of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        pass


NOWHERE: Any = SimpleNamespace(platform=None, world_size=1)
"""An environment that may not be used: refusals come before anything is built."""


def test_a_config_from_python_is_refused_what_its_model_cannot_do() -> None:
    config = qwen3_5_v2_debugmodel()
    config.model_spec = ModelSpec(name="plain", flavor="only", model=Plain.Config())
    config.parallelism.tensor_parallel_degree = 2
    with pytest.raises(ConfigError, match=r"parallelism.tensor_parallel_degree: 2: Plain has no tensor parallelism"):
        build_model(config, NOWHERE, seed=0)


def test_a_spec_without_a_parallelize_fn_trains_in_one_process_only() -> None:
    config = qwen3_5_v2_debugmodel()
    config.model_spec = ModelSpec(name="plain", flavor="only", model=Plain.Config())
    with pytest.raises(ConfigError, match="plain has no parallelize_fn, so it can train in one process only"):
        build_model(config, SimpleNamespace(world_size=2), seed=0)  # type: ignore[arg-type]


def test_a_spec_without_a_config_is_sent_away() -> None:
    config = qwen3_5_v2_debugmodel()
    config.model_spec = ModelSpec(name="bare", flavor="only", build_model_fn=object)
    with pytest.raises(ConfigError, match="bare has no model config"):
        build_model(config, NOWHERE, seed=0)
