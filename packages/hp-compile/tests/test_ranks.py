"""Several ranks: what a sharded model, its trainer and its group do besides computing."""

from __future__ import annotations

import subprocess
import sys

import checkpoint_jobs as checkpoints
import collective_jobs as collectives
import fault_jobs as faults
import graph_jobs as jobs
import mesh_jobs as meshes
import pytest
from graph_world import run_world


def test_a_sharded_model_is_cut_in_place_and_refuses_to_run_eagerly():
    run_world(jobs.sharded_model_behaves, 3)


def test_a_rank_that_differs_stops_all_ranks_and_none_hangs():
    run_world(jobs.ranks_agree, 2)


def test_ranks_with_different_lengths_train_as_eager_does():
    assert run_world(jobs.lengths_may_differ, 2) == [[], []]


def test_bad_starts_are_refused_by_name():
    run_world(jobs.bad_starts, 2)


EARLY_GROUP = """
import os
import torch
import torch.distributed as dist
def start(): dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
{before}
from hp_compile import GraphTrainer, PassConfig
{after}
model = torch.nn.Linear(2, 2)
trainer = GraphTrainer(model, lambda model, input, label: model(input).sum(), PassConfig(), device="cpu")
trainer.train_step(torch.ones(1, 2), None)
print("trained", dist.group.WORLD._get_backend(torch.device("cpu")).options._threads, flush=True)
os._exit(0)
"""


def test_gloo_groups_have_one_thread_and_one_with_two_is_refused():
    """torch frees memory twice when two threads of a group end at once; groups made after the import have one."""

    def run(**code: str) -> subprocess.CompletedProcess[str]:
        lines = EARLY_GROUP.format(**{"before": "", "after": ""} | code)
        return subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=100)

    assert run(after="start()").stdout == "trained 1\n"
    refused = run(before="start()")
    assert refused.returncode == 1
    assert "import hp_compile's GraphTrainer before torch.distributed.init_process_group" in refused.stderr


def test_two_trainers_live_in_one_process():
    assert run_world(jobs.two_trainers, 2) == [[], []]


@pytest.mark.parametrize("world", [2, 3])
def test_reshard_overlap_buckets_and_plans_do_not_change_a_bit_where_they_must_not(world):
    assert run_world(meshes.layouts_agree, world) == [[]] * world


def test_tensor_parallel_parameters_are_sharded_on_the_data_axis_and_described_as_both():
    assert run_world(meshes.in_a_context, 4) == [[]] * 4


def test_trainers_on_sub_groups_do_not_hear_of_each_other():
    assert run_world(meshes.in_groups, 4) == [[]] * 4


def test_a_model_on_meta_is_sharded_then_drawn_or_loaded():
    run_world(checkpoints.on_meta, 2)


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_on_meta_may_be_filled_by_a_function_of_the_user(world):
    run_world(checkpoints.filled_by_function, world)


def test_plain_tensor_parallel_parts_are_clipped_and_saved_only_with_declared_placements():
    run_world(meshes.plain_shards, 4)


def test_what_the_plan_leaves_out_is_replicated_and_averaged():
    assert run_world(meshes.outside_the_plan, 3) == [[]] * 3


def test_the_norm_is_that_of_the_whole_averaged_gradient():
    run_world(meshes.true_norm, 4)


def test_a_write_to_a_sharded_parameter_in_forward_is_refused():
    run_world(meshes.writes_to_shards, 2)


@pytest.mark.parametrize("world", [2, 3])
def test_a_fault_of_one_rank_anywhere_in_a_build_is_an_error_on_every_rank_that_names_it(world):
    assert run_world(faults.one_rank_fails, world) == [[]] * world


def test_ranks_of_a_tensor_parallel_axis_hear_of_each_others_faults():
    assert run_world(faults.one_tensor_parallel_rank_fails, 4) == [[]] * 4


def test_collectives_in_the_users_own_step_are_waited_for():
    assert run_world(collectives.in_the_users_step, 2) == [[], []]


def test_loaders_that_end_at_different_batches_stop_all_ranks_and_even_ones_end_together():
    assert run_world(faults.loaders_end_apart, 2) == [[], []]
