"""What a whole config must satisfy: types, and fields that must fit together; all faults at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import toy_trainer

from hp_config import ConfigError, Fault, ParallelismConfig, TrainingConfig, check_layout, find_faults, validate_config


def config(**parallelism: int) -> toy_trainer.Trainer.Config:
    return toy_trainer.small().replace(parallelism=ParallelismConfig(**parallelism))


def batch(local: int, whole: int, **parallelism: int) -> toy_trainer.Trainer.Config:
    training = TrainingConfig(steps=10, seq_len=16, local_batch_size=local, global_batch_size=whole)
    return config(**parallelism).replace(training=training)


def places(faults: list[Any]) -> list[str]:
    return [fault.where for fault in faults]


def test_a_sound_config_passes_on_any_number_of_processes() -> None:
    for world_size in (None, 1, 2, 8):
        validate_config(config(), world_size)


def test_all_faults_come_in_one_error() -> None:
    bad = toy_trainer.small().replace(
        training=TrainingConfig(steps=0, seq_len=-1, dtype="float8"),
        parallelism=ParallelismConfig(data_parallel_shard_degree=0, pipeline_parallel_degree=2),
        optimizer=toy_trainer.Adam.Config(lr=-1.0),
    )
    with pytest.raises(ConfigError) as caught:
        validate_config(bad, world_size=1)
    assert set(places(caught.value.faults)) >= {
        "training.dtype",
        "parallelism.data_parallel_shard_degree",
        "parallelism.pipeline_parallel_degree",
        "optimizer.lr",
    }


def test_a_recipe_with_a_wrong_type_is_refused_with_path_value_and_type() -> None:
    bad = toy_trainer.small()
    bad.optimizer.lr = "1e-4"  # type: ignore[assignment]
    bad.training = None  # type: ignore[assignment]
    faults = [str(fault) for fault in find_faults(bad)]
    assert faults == [
        "training: expected TrainingConfig, got null",
        "optimizer.lr: expected a number, got the text '1e-4'",
    ]


def test_types_are_checked_deep_inside_the_model() -> None:
    bad = toy_trainer.small()
    bad.model_spec.model.layers[2].dim = 1.5  # type: ignore[assignment]
    assert places(find_faults(bad)) == ["model_spec.model.layers.2.dim"]


def test_a_node_is_not_asked_while_its_types_are_wrong() -> None:
    bad = toy_trainer.small()
    bad.training.steps = "ten"  # type: ignore[assignment]
    assert places(find_faults(bad)) == ["training.steps"]


@pytest.mark.parametrize(
    ("degrees", "world_size"),
    [
        ({}, 6),
        ({"data_parallel_shard_degree": 4}, 4),
        ({"data_parallel_replicate_degree": 2}, 8),
        ({"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 3}, 6),
        ({"tensor_parallel_degree": 2, "context_parallel_degree": 2, "pipeline_parallel_degree": 2}, 8),
        ({"expert_parallel_degree": 4, "data_parallel_shard_degree": 4}, 4),
    ],
)
def test_degrees_that_make_up_the_world_pass(degrees: dict[str, int], world_size: int) -> None:
    assert check_layout(config(**degrees), world_size) == []


def test_a_wrong_product_shows_product_world_and_the_flag_to_use() -> None:
    (fault,) = check_layout(config(data_parallel_replicate_degree=2, data_parallel_shard_degree=3), 4)
    assert str(fault).startswith(
        "parallelism: data_parallel_replicate_degree 2 x data_parallel_shard_degree 3 = 6, but the run has 4 processes"
    )
    assert fault.hint == "--nproc 6"
    (fault,) = check_layout(config(data_parallel_shard_degree=2), 1)
    assert "data_parallel_shard_degree 2 = 2, but the run has 1 process;" in str(fault)


def test_a_world_that_the_other_degrees_do_not_divide_is_refused() -> None:
    (fault,) = check_layout(config(data_parallel_replicate_degree=4), 6)
    assert "needs a multiple of 4 processes, but the run has 6 processes" in fault.problem
    assert fault.hint == "--nproc 8"


def test_the_layout_is_part_of_validation_where_the_world_is_known() -> None:
    assert find_faults(config(data_parallel_shard_degree=3)) == []
    assert places(find_faults(config(data_parallel_shard_degree=3), 2)) == ["parallelism"]


@pytest.mark.parametrize(
    ("whole", "world_size", "degrees", "divisor"),
    [
        (12, 2, {}, None),
        (8, 2, {}, None),
        (4, 1, {}, None),
        (6, 2, {}, 4),
        (6, 4, {}, 8),
        (2, 4, {}, 8),
        (6, 4, {"data_parallel_replicate_degree": 2}, 8),
        (7, None, {}, 2),
        (6, None, {}, None),
        (6, None, {"data_parallel_replicate_degree": 2}, 4),
        (6, None, {"data_parallel_shard_degree": 4}, 8),
    ],
)
def test_a_global_batch_is_a_multiple_of_what_all_ranks_compute_at_once(
    whole: int, world_size: int | None, degrees: dict[str, int], divisor: int | None
) -> None:
    faults = find_faults(batch(2, whole, **degrees), world_size)
    if divisor is None:
        assert faults == []
        return
    (fault,) = faults
    assert fault.where == "training.global_batch_size"
    assert "training.local_batch_size 2 x data" in fault.problem
    assert fault.problem.endswith(f"= {divisor}")
    assert fault.allowed is not None
    assert fault.allowed.startswith(f"a multiple of {divisor}, or -1")


def test_ranks_that_share_rows_do_not_multiply_the_batch() -> None:
    shared = {"parallelism": ParallelismConfig(tensor_parallel_degree=2, data_parallel_replicate_degree=2)}
    assert find_faults(dataclasses.replace(batch(2, 8), **shared), 8) == []
    (fault,) = find_faults(dataclasses.replace(batch(2, 4), **shared), 8)
    assert fault.problem.endswith("training.local_batch_size 2 x data-parallel degree 4 = 8")


def test_a_row_that_cannot_be_cut_evenly_is_refused() -> None:
    rows = find_faults(config(context_parallel_degree=3))
    assert places(rows) == ["training.seq_len"]
    assert "16 tokens cannot be cut into 3 equal parts (context_parallel_degree 3)" in rows[0].problem
    assert rows[0].hint == "the nearest is 15"


def test_sequence_parallelism_cuts_rows_too_and_can_be_off() -> None:
    assert places(find_faults(config(tensor_parallel_degree=3))) == ["training.seq_len"]
    assert find_faults(config(tensor_parallel_degree=3, enable_sequence_parallel=False)) == []


def test_a_model_says_what_it_cannot_do_of_a_run_and_each_place_is_named_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_faults(self: Any, *, trainer_config: Any) -> list[Fault]:
        degree = trainer_config.parallelism.tensor_parallel_degree
        faults = [Fault("parallelism.tensor_parallel_degree", f"{degree} ranks cannot share 2 heads")]
        return [*faults, Fault("training.seq_len", "cannot be cut, says the model too")] if degree > 1 else []

    bad = config(tensor_parallel_degree=3)
    monkeypatch.setattr(type(bad.model_spec.model), "run_faults", run_faults, raising=False)
    assert find_faults(config()) == []
    assert places(find_faults(bad)) == ["training.seq_len", "parallelism.tensor_parallel_degree"]
    # Not asked while what it would read is wrong.
    bad.training.seq_len = "long"  # type: ignore[assignment]
    assert places(find_faults(bad)) == ["training.seq_len"]


def test_rules_that_read_a_mistyped_value_are_skipped() -> None:
    bad = batch(3, 8)
    assert places(find_faults(bad)) == ["training.global_batch_size"]
    assert find_faults(bad, unsure={"training.local_batch_size"}) == []


def test_a_config_without_the_shared_sections_is_checked_for_what_it_has() -> None:
    assert find_faults(toy_trainer.Adam.Config(), 4) == []
    assert places(find_faults(toy_trainer.Adam.Config(lr="x"))) == ["lr"]
