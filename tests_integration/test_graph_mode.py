"""`--compile.mode graph` from the command line: the bits of the eager run, and checkpoints that either goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import SMALL, Hp, assert_same_checkpoint, losses

SHORT = (*SMALL, "--training.steps", "4", "--checkpoint.interval", "2")
LAYOUTS = {
    "documents": "--dataloader.document_mask=true",
    "fsdp-3": "--nproc 3 --training.global_batch_size 6",
    "ddp-2": "--nproc 2 --parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 1",
    "tp-2-fsdp-2": "--nproc 4 --parallelism.tensor_parallel_degree 2 --loss.num_chunks 4",
    "tp-2-accumulated": "--nproc 2 --parallelism.tensor_parallel_degree 2 --training.global_batch_size 4",
    "bf16-recomputed": "--nproc 2 --training.mixed_precision_param bfloat16 --activation_checkpoint.mode full "
    "--loss.num_chunks 4",
}


def assert_same_run(one: Path, other: Path, step: int = 4) -> None:
    assert losses(one) == losses(other)
    assert_same_checkpoint(*(run / "checkpoint" / f"step-{step}" for run in (one, other)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graph_and_eager_agree_to_the_last_bit(hp: Hp, layout: str) -> None:
    for mode in ("none", "graph"):
        done = hp.train(*SHORT, *LAYOUTS[layout].split(), "--compile.mode", mode, "--dump_folder", f"run-{mode}")
        assert done.code == 0, done.text
    assert_same_run(hp.cwd / "run-none", hp.cwd / "run-graph")


def test_each_goes_on_from_the_other_s_checkpoint(hp: Hp) -> None:
    options = (*SHORT, "--nproc", "2")
    whole = hp.train(*options, "--dump_folder", "whole")
    assert whole.code == 0, whole.text
    for first, then in (("none", "graph"), ("graph", "none")):
        folder = f"{first}-{then}"
        for mode, steps in ((first, "2"), (then, "4")):
            schedule = ("--lr_scheduler.total_steps", "4", "--training.steps", steps)
            done = hp.train(*options, *schedule, "--compile.mode", mode, "--dump_folder", folder)
            assert done.code == 0, done.text
        assert_same_run(hp.cwd / "whole", hp.cwd / folder)
