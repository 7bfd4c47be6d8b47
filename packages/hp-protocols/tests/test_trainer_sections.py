"""The sections of a trainer's config that a model may read, as protocols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hp_protocols.trainer_sections import (
    ActivationCheckpointSection,
    CompileSection,
    DebugSection,
    ParallelismSection,
    TrainerConfig,
    TrainingSection,
)


@dataclass
class Training:
    steps: int = 1
    seq_len: int = 8
    local_batch_size: int = 1
    global_batch_size: int = -1
    max_norm: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    mixed_precision_param: str = "bfloat16"
    mixed_precision_reduce: str = "float32"
    enable_cpu_offload: bool = False


@dataclass
class Compile:
    mode: Literal["none", "graph"] = "none"
    backend: str = "inductor"


def test_a_plain_dataclass_with_the_fields_is_a_section() -> None:
    section: TrainingSection = Training()
    compiled: CompileSection = Compile()
    assert isinstance(section, TrainingSection)
    assert isinstance(compiled, CompileSection)
    assert not isinstance(section, ParallelismSection)
    assert not isinstance(compiled, ActivationCheckpointSection | DebugSection | TrainerConfig)
