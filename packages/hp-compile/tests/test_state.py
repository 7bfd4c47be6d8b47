"""Checkpointable state: saved on some ranks, loaded on others, the same bits (G19)."""

from __future__ import annotations

import checkpoint_jobs as jobs
import pytest
from graph_world import run_world


@pytest.mark.parametrize("name", ["uneven", "norm_dropout"])
def test_a_state_saved_on_eight_ranks_goes_on_on_two_and_on_one(name, tmp_path):
    run_world(jobs.train_and_save, 8, name, str(tmp_path))
    assert run_world(jobs.load_and_go_on, 2, name, str(tmp_path)) == [[], []]
    assert jobs.load_and_go_on(0, 1, name, str(tmp_path)) == []


def test_a_state_that_does_not_fit_changes_nothing():
    run_world(jobs.misfits, 2)


def test_the_models_own_state_dict_speaks_dtensors_and_whole_tensors():
    run_world(jobs.model_state_round_trip, 2)
