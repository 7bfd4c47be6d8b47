"""Several ranks: the graph trainer gives what FSDP2 gives on the same ranks, bit for bit (G13)."""

from __future__ import annotations

import graph_jobs as jobs
import graph_zoo as zoo
import pytest
from graph_world import run_world


@pytest.mark.parametrize("world", [2, 3, 8])
def test_fsdp_equals_fully_shard(world):
    names = zoo.OWN
    found = run_world(jobs.many, world, [(name, {}) for name in names])
    assert found == [{}] * world


def test_ddp_mixed_precision_sum_accumulation_and_clipping_equal_their_counterparts_on_three_ranks():
    mixed = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    late = {"reduce_every": "optimizer_step"}
    found = run_world(
        jobs.many,
        3,
        [
            ("decoder", {"dp_mode": "ddp"}),
            ("norm_dropout", {"dp_mode": "ddp"}),
            ("decoder", mixed),
            ("tied", {"param_dtype": "bfloat16"}),
            ("decoder", {"grad_reduce": "sum"}),
            ("decoder", {}, {"accumulation": 3}),
            ("decoder", {**late, **mixed}, {"accumulation": 3}),
            ("decoder", late, {"accumulation": 3}),
            ("decoder", {}, {"clip": 0.1}),
        ],
        timeout=400,
    )
    assert found == [{}] * 3


def test_hsdp_equals_two_dimensional_fully_shard_on_eight_ranks():
    mixed = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    hsdp = {"dp_mode": "hsdp", "fsdp_degree": 4}
    found = run_world(jobs.many, 8, [("decoder", hsdp), ("tied", {**hsdp, **mixed})], timeout=400)
    assert found == [{}] * 8
