"""The shared sections: torchtitan's names, and what each section finds wrong with itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import toy_trainer

from hp_config import (
    ActivationCheckpointConfig,
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from hp_config.availability import NOT_YET, NOT_YET_VALUES, TORCHTITAN_ONLY
from hp_config.fields import field_docs
from hp_protocols import trainer_sections
from hp_protocols.trainer_sections import TrainerConfig

SECTIONS = {
    cls.__name__: cls
    for cls in (
        TrainingConfig,
        ParallelismConfig,
        ActivationCheckpointConfig,
        CompileConfig,
        CommConfig,
        DebugConfig,
    )
}

# The fields of torchtitan's sections, May 2026.
TORCHTITAN = {
    "TrainingConfig": "local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload dtype "
    "mixed_precision_param mixed_precision_reduce gc_freq gc_debug",
    "ParallelismConfig": "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
    "enable_fsdp_symm_mem tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel "
    "enable_sequence_parallel full_dtensor pipeline_parallel_degree module_fqns_per_model_part "
    "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
    "pipeline_parallel_layers_per_stage pipeline_parallel_schedule pipeline_parallel_schedule_csv "
    "pipeline_parallel_microbatch_size context_parallel_degree context_parallel_load_balancer "
    "context_parallel_rotate_method expert_parallel_degree",
    "ActivationCheckpointConfig": "mode per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget "
    "visualize_memory_budget_pareto preserve_rng_state determinism_check debug",
    "CompileConfig": "enable components backend",
    "CommConfig": "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder "
    "save_traces_file_prefix mode",
    "DebugConfig": "seed deterministic deterministic_warn_only moe_force_load_balance detect_anomaly "
    "batch_invariant print_config save_config_file enable_structured_logging",
}


def messages(section: Any) -> list[str]:
    return [str(fault) for fault in section.faults("s")]


@pytest.mark.parametrize("name", SECTIONS)
def test_every_name_of_torchtitan_is_a_field_or_is_refused_with_a_reason(name: str) -> None:
    fields = {field.name for field in dataclasses.fields(SECTIONS[name])}
    absent = set(TORCHTITAN_ONLY.get(name, {}))
    assert not fields & absent
    assert fields | absent >= set(TORCHTITAN[name].split())


def test_models_can_read_the_sections_they_expect() -> None:
    assert isinstance(toy_trainer.small(), TrainerConfig)
    assert isinstance(TrainingConfig(), trainer_sections.TrainingSection)
    assert isinstance(ParallelismConfig(), trainer_sections.ParallelismSection)
    assert isinstance(ActivationCheckpointConfig(), trainer_sections.ActivationCheckpointSection)
    assert isinstance(CompileConfig(), trainer_sections.CompileSection)
    assert isinstance(DebugConfig(), trainer_sections.DebugSection)


def test_what_is_said_of_fields_is_said_of_fields_that_exist() -> None:
    for table in (NOT_YET, NOT_YET_VALUES):
        for name, entries in table.items():
            assert set(entries) <= {field.name for field in dataclasses.fields(SECTIONS[name])}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_field_has_a_sentence_for_help(name: str) -> None:
    cls = SECTIONS[name]
    assert set(field_docs(cls)) == {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("name", SECTIONS)
def test_the_defaults_are_sound(name: str) -> None:
    assert messages(SECTIONS[name]()) == []


@pytest.mark.parametrize("field", ["steps", "seq_len", "local_batch_size", "gc_freq"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_below_one_are_refused(field: str, value: int) -> None:
    assert messages(TrainingConfig(**{field: value})) == [f"s.{field}: {value} is too small; allowed: at least 1"]


@pytest.mark.parametrize("value", [0, -2])
def test_a_global_batch_is_a_size_or_minus_one(value: int) -> None:
    (message,) = messages(TrainingConfig(global_batch_size=value))
    assert message.startswith(f"s.global_batch_size: {value} is not a batch size")
    assert messages(TrainingConfig(global_batch_size=-1)) == []


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_norm_that_erases_gradients_is_refused(value: float) -> None:
    (message,) = messages(TrainingConfig(max_norm=value))
    assert "inf measures the norm without clipping" in message
    assert messages(TrainingConfig(max_norm=float("inf"))) == []


@pytest.mark.parametrize(
    "field",
    ["pipeline_parallel_degree", "expert_parallel_degree"],
)
def test_degrees_that_cannot_be_had_yet_are_refused_by_name(field: str) -> None:
    (message,) = messages(ParallelismConfig(**{field: 2}))
    assert message.startswith(f"s.{field}: 2 needs ")
    (message,) = messages(ParallelismConfig(**{field: 0}))
    assert message == f"s.{field}: 0 is too small; allowed: at least 1"


@pytest.mark.parametrize("field", ["tensor_parallel_degree", "context_parallel_degree"])
def test_degrees_of_tensor_and_context_parallelism_are_at_least_one(field: str) -> None:
    assert messages(ParallelismConfig(**{field: 2})) == []
    assert messages(ParallelismConfig(**{field: 0})) == [f"s.{field}: 0 is too small; allowed: at least 1"]


def test_a_shard_degree_is_a_degree_or_minus_one() -> None:
    assert messages(ParallelismConfig(data_parallel_shard_degree=-1)) == []
    assert "at least 1, or -1" in messages(ParallelismConfig(data_parallel_shard_degree=0))[0]
    assert "too small" in messages(ParallelismConfig(data_parallel_replicate_degree=-1))[0]


def test_modes_that_cannot_be_had_yet_are_refused_by_name() -> None:
    for mode in ("none", "blocks", "graph"):
        assert messages(CompileConfig(mode=mode)) == []
    for mode in ("none", "selective", "full"):
        assert messages(ActivationCheckpointConfig(mode=mode)) == []
    assert messages(ActivationCheckpointConfig(mode="memory_budget"))[0].startswith(
        "s.mode: 'memory_budget' needs the compiler's"
    )


def test_a_compiler_needs_a_name() -> None:
    assert "the name is empty" in messages(CompileConfig(backend=" "))[0]


def test_timeouts_are_at_least_a_second() -> None:
    assert len(messages(CommConfig(init_timeout_seconds=0, train_timeout_seconds=-1))) == 2


def test_a_seed_is_one_that_generators_take() -> None:
    assert messages(DebugConfig(seed=0)) == []
    assert messages(DebugConfig(seed=2**63 - 1)) == []
    assert messages(DebugConfig(seed=-1)) == ["s.seed: -1 is not a seed; allowed: 0 to 2**63 - 1"]
    assert len(messages(DebugConfig(seed=2**63))) == 1


def test_a_warning_mode_without_its_mode_is_refused() -> None:
    assert "has no effect without s.deterministic" in messages(DebugConfig(deterministic_warn_only=True))[0]
    assert messages(DebugConfig(deterministic=True, deterministic_warn_only=True)) == []
