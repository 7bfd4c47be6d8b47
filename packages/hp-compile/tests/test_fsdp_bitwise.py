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
