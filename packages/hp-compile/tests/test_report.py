"""`explain()` and the number of collectives, against what one counts by hand for three linear layers on two ranks."""

from __future__ import annotations

from collections import Counter

import report_jobs as jobs
from graph_world import run_world

UNITS = ("layers.0", "layers.1", "")


def test_collectives_and_bytes_are_those_that_one_counts_by_hand():
    per_unit_of = {None: 1, 0: 2}  # a unit is a weight and a bias
    found = [(per_unit_of[mb], *told) for on_rank in run_world(jobs.told, 2) for mb, told in on_rank.items()]
    for per_unit, launches, table in found:
        forward = {("all_gather", "forward", unit): per_unit for unit in UNITS}
        reduced = {("reduce_scatter", "backward", unit): per_unit for unit in UNITS}
        # Backward needs the weight of layers.1 again: the input of layers.0 has no gradient, the root stays gathered.
        assert launches == Counter({**forward, **reduced, ("all_gather", "backward", "layers.1"): 1})
        rows = {cells[0]: cells[-4:] for line in table.splitlines() if (cells := line.split())}
        # MiB whole, here, gathered, reduced. A weight is 4 MiB and a bias 0.004; the root's are half of that.
        assert rows["layers.0"] == ["4.004", "2.002", "4.004", "4.004"]
        assert rows["layers.1"] == ["4.004", "2.002", "8.004", "4.004"]
        assert rows["(root)"] == ["2.002", "1.001", "2.002", "2.002"]
