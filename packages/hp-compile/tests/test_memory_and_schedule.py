"""What is alive when, and what is launched when: reshard frees, overlap stays within its window (G14, G20)."""

from __future__ import annotations

import itertools

import memory_jobs as jobs
import pytest
import schedule_jobs as random_jobs
from graph_world import run_world


@pytest.fixture(scope="module")
def schedules():
    return run_world(jobs.schedule, 2)


def test_the_peak_stays_under_two_gathered_units_and_under_eager_fsdp2():
    for found in run_world(jobs.peaks, 2):
        # Shards, root gathered, two gathered units, whole gradients of two units, sharded gradients, activations.
        shards = found["whole"] // 2
        activations = 8 * 8 * 6 * 96 * 4  # blocks, rows, widths of a block's intermediates, bytes
        bound = shards + found["root"] + 4 * found["unit"] + shards + activations
        assert found["graph"] <= bound, found
        assert found["graph"] <= found["eager"], found
        assert found["overlap off"] <= 0.95 * found["eager"], found
        assert found["overlap off"] < found["reshard off"], found


def gathers(schedule):
    return [entry for entry in schedule if entry["kind"] == "all_gather"]


def reductions(schedule):
    return [entry for entry in schedule if entry["kind"] != "all_gather"]


def test_each_gather_is_launched_one_unit_ahead_and_no_earlier(schedules):
    found = gathers(schedules[0]["True"])
    assert len(found) == 7  # root once, three layers forward and backward
    for before, after in itertools.pairwise(found):
        assert after["launch"] < before["wait"]
    layers = [entry for entry in found if entry["unit"]]
    for entry, later in zip(layers, layers[2:], strict=False):
        assert later["launch"] > entry["last_wait"]


def test_each_gathers_wait_stands_right_before_its_first_reader(schedules):
    for entry in gathers(schedules[0]["True"]):
        assert entry["reader"] == entry["wait"] + 1


def test_a_reductions_wait_stands_behind_the_next_units_launch(schedules):
    found = reductions(schedules[0]["True"])
    assert len(found) == 4
    for entry, following in itertools.pairwise(found):
        assert following["launch"] < entry["wait"]
    for entry, later in zip(found, found[2:], strict=False):
        assert entry["last_wait"] < later["launch"]


def test_without_the_pass_every_wait_follows_its_launch(schedules):
    for entry in reductions(schedules[0]["False"]):
        assert entry["wait"] == entry["launch"] + 1
    found = gathers(schedules[0]["False"])
    for before, after in itertools.pairwise(found):
        assert before["last_wait"] < after["launch"]


def test_all_ranks_issue_the_same_collectives_in_the_same_order(schedules):
    for overlap in ("True", "False"):
        sequences = [[(e["kind"], e["unit"], e["region"]) for e in one[overlap]] for one in schedules]
        assert sequences[0] == sequences[1]


@pytest.mark.parametrize("world", [2, 4])
def test_random_models_plans_and_passes_are_scheduled_soundly_and_give_the_same_bits(world):
    seeds = list(range(16)) if world == 2 else list(range(100, 108))
    assert run_world(random_jobs.random_schedules, world, seeds) == [[]] * world
