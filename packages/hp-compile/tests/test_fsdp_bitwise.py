"""Several ranks: the graph trainer gives what FSDP2 gives on the same ranks, bit for bit (G13)."""

from __future__ import annotations

import importlib.util

import graph_jobs as jobs
import graph_zoo as zoo
from graph_world import run_world

MIXED = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
LATE = {"reduce_every": "optimizer_step"}
HSDP = {"dp_mode": "hsdp", "fsdp_degree": 4}
TRANSFORMERS = zoo.TRANSFORMERS if importlib.util.find_spec("transformers") else []


def equal(world: int, *cases: tuple[object, ...]) -> None:
    assert run_world(jobs.many, world, list(cases), timeout=580) == [{}] * world


def test_every_model_equals_fully_shard_on_two_ranks():
    equal(2, *[(name, {}) for name in [*zoo.OWN, *TRANSFORMERS]])


def test_fsdp_ddp_mixed_precision_sum_accumulation_and_clipping_equal_their_counterparts_on_three_ranks():
    equal(
        3,
        ("uneven", {}),
        ("tied", {}),
        ("norm_dropout", {}),
        ("decoder", {"dp_mode": "ddp"}),
        ("norm_dropout", {"dp_mode": "ddp"}),
        ("uneven", {"dp_mode": "ddp"}),
        ("sometimes_unused", {"dp_mode": "ddp"}),
        ("decoder", MIXED),
        ("tied", {"param_dtype": "bfloat16"}),
        ("decoder", {"grad_reduce": "sum"}),
        ("decoder", {}, {"accumulation": 3}),
        ("decoder", {**LATE, **MIXED}, {"accumulation": 3}),
        ("decoder", LATE, {"accumulation": 3}),
        ("decoder", {}, {"clip": 0.1}),
    )


def test_fsdp_and_hsdp_equal_one_and_two_dimensional_fully_shard_on_eight_ranks():
    equal(
        8, ("decoder", {}), ("uneven", {}), ("decoder", HSDP), ("tied", {**HSDP, **MIXED}), ("sometimes_unused", HSDP)
    )
