"""Ranks agree on faults and data before they start, so that none waits for one that has given up."""

from __future__ import annotations

import pytest
import torch

from hp_components import CrossEntropyLoss
from hp_config import CommConfig, DebugConfig, ParallelismConfig
from hp_protocols.errors import ConfigError, Fault
from hp_protocols.testing import run_world
from hp_trainer.environment import Environment, start_environment
from hp_trainer.training_step import TrainingStep


def _start() -> Environment:
    return start_environment(ParallelismConfig(), CommConfig(), DebugConfig())


def _said(work: object) -> str:
    try:
        work()  # type: ignore[operator]
    except ConfigError as error:
        return str(error)
    return "fine"


def _fail(*where: str) -> None:
    raise ConfigError([Fault(place, "is wrong") for place in where])


def _cases(rank: int, world_size: int) -> dict[str, str]:
    environment = _start()
    order: list[int] = []
    environment.main_first(lambda: order.append(rank))
    return {
        "all": _said(lambda: environment.agree(lambda: _fail("a"))),
        "one": _said(lambda: environment.agree(lambda: _fail("b") if rank == 1 else None)),
        "none": _said(lambda: environment.agree(lambda: None)),
        "first": _said(lambda: environment.main_first(lambda: _fail("c") if rank == 0 else None)),
        "later": _said(lambda: environment.main_first(lambda: _fail("d") if rank == 2 else None)),
        "same": _said(lambda: environment.require_same("data", "x", "1")),
        "other": _said(lambda: environment.require_same("data", f"of {rank}", str(rank == 2))),
        "dp": f"{environment.dp_rank}/{environment.dp_degree}",
    }


def test_every_rank_raises_the_faults_of_all_ranks() -> None:
    results = run_world(_cases, 3, init_process_group=False)
    for rank, said in enumerate(results):
        assert said.pop("dp") == f"{rank}/3"
        assert said == {
            "all": "a: is wrong",
            "one": "rank 1: b: is wrong",
            "none": "fine",
            "first": "c: is wrong",
            "later": "rank 2: d: is wrong",
            "same": "fine",
            "other": results[0]["other"],
        }
    assert "rank 0: of 0; rank 2: of 2" in results[0]["other"]


def _wrong_degrees(rank: int, world_size: int) -> str:
    return _said(
        lambda: start_environment(ParallelismConfig(data_parallel_shard_degree=3), CommConfig(), DebugConfig())
    )


def test_degrees_that_do_not_multiply_to_the_world_are_refused() -> None:
    with pytest.raises(ConfigError, match="4"):
        start_environment(ParallelismConfig(data_parallel_shard_degree=4), CommConfig(), DebugConfig())
    assert all("3" in said and "2" in said for said in run_world(_wrong_degrees, 2, init_process_group=False))


def _layout(rank: int, world_size: int) -> tuple[object, ...]:
    parallelism = ParallelismConfig(tensor_parallel_degree=2, context_parallel_degree=2)
    environment = start_environment(parallelism, CommConfig(), DebugConfig())
    # One rank alone may look at a mesh: all of them were built together.
    alone = environment.main_first(lambda: environment.dp_rank if rank == 0 else 0)
    step = TrainingStep(
        environment=environment,
        model=torch.nn.Identity(),
        loss_fn=CrossEntropyLoss.Config().build(),
        optimizer=None,  # type: ignore[arg-type]
        lr_scheduler=None,  # type: ignore[arg-type]
        max_norm=1.0,
        micro_batches=1,
    )
    labels = torch.tensor([[1, 2, -100, 4], [-100, -100, 7, 8]])
    fetched = step.fetch(iter([{"input": torch.arange(8).view(2, 4), "labels": labels}]))
    assert fetched is not None
    (batch,) = fetched.micro_batches
    valid = step.agree(fetched, stop_wanted=False).valid_tokens
    return alone, environment.dp_degree, batch["input"].tolist(), batch["labels"].tolist(), valid


def test_ranks_that_share_rows_read_the_same_ones_and_count_each_label_once() -> None:
    results = run_world(_layout, 4, init_process_group=False)
    # Ranks of tensor parallelism are neighbours: 0 and 1 have the first stretch of every row, 2 and 3 the second.
    first, second = [[1, 2], [-100, -100]], [[-100, 4], [7, 8]]
    for (alone, dp_degree, rows, labels, valid), expected in zip(results, (first, first, second, second), strict=True):
        assert (alone, dp_degree, valid) == (0, 1, 5)
        assert rows == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert labels == expected
