"""Every model on every number of ranks in every mode, bit for bit: minutes, so only with `-m matrix`."""

from __future__ import annotations

import graph_jobs as jobs
import graph_zoo as zoo
import pytest
from graph_world import run_world

pytestmark = pytest.mark.matrix

MIXED = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
MODES = {
    "fsdp": {},
    "fsdp mixed": MIXED,
    "ddp": {"dp_mode": "ddp"},
    "hsdp": {"dp_mode": "hsdp"},
}


@pytest.mark.parametrize("name", [*zoo.OWN, *zoo.TRANSFORMERS])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_five_steps_equal_eagers_bit_for_bit(name, mode, world):
    options = dict(MODES[mode])
    if mode == "hsdp":
        # 8 ranks: 2 × 4; 2 and 3 ranks: all of them replicas of one shard.
        options["fsdp_degree"] = 4 if world == 8 else 1
    elif mode == "fsdp mixed" and world == 1:
        pytest.skip("mixed precision on one rank has no eager counterpart in FSDP2")
    assert run_world(jobs.many, world, [(name, options)], timeout=400) == [{}] * world
