"""From the command line: every layout of the processes trains what one process trains, and goes on from its saves."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import RECIPE, Hp, losses

# A schedule that does not depend on the number of steps, so that a run can be compared with a longer one. The small
# rate: Adam makes the rounding of a gradient that is nearly zero into a whole step, in another direction.
STEPS = (
    *("--training.seq_len", "64", "--metrics.log_freq", "1", "--checkpoint.interval", "3"),
    *("--lr_scheduler.warmup_steps", "2", "--lr_scheduler.decay_type", "constant", "--optimizer.lr", "1e-4"),
)
TP, CP = "--parallelism.tensor_parallel_degree", "--parallelism.context_parallel_degree"
LAYOUTS = {
    # More ranks than key/value heads; activations cut along the sequence, logits along the vocabulary.
    "tp 4": ("4", (TP, "4")),
    "cp 2": ("2", (CP, "2")),
    "tp 2 x cp 2 x fsdp 2": ("8", (TP, "2", CP, "2")),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> list[tuple[object, ...]]:
    """Five steps of one process."""
    hp = Hp(tmp_path_factory.mktemp("one"), cache)
    try:
        done = hp.train(*STEPS, "--training.steps", "5", "--dump_folder", "run")
        assert done.code == 0, done.text
        return losses(hp.cwd / "run")
    finally:
        hp.close()


def assert_agrees(run: Path, expected: list[tuple[object, ...]], steps: int) -> None:
    found = losses(run)
    assert [record[0] for record in found] == list(range(1, steps + 1))
    for mine, theirs in zip(found, expected, strict=False):
        assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_what_one_process_trains(hp: Hp, one_process: list[tuple[object, ...]], layout: str) -> None:
    nproc, options = LAYOUTS[layout]
    done = hp.train(*STEPS, "--training.steps", "3", "--dump_folder", "run", "--nproc", nproc, *options)
    assert done.code == 0, done.text
    assert_agrees(hp.cwd / "run", one_process, 3)


def test_what_tensor_and_data_parallel_ranks_saved_goes_on_in_one_process(
    hp: Hp, one_process: list[tuple[object, ...]]
) -> None:
    folder = ("--dump_folder", "run")
    # TP 2 x FSDP 2, with whole activations between the matrices and whole logits.
    whole = ("--parallelism.enable_sequence_parallel=false", "--parallelism.disable_loss_parallel")
    shared = hp.train(*STEPS, "--training.steps", "3", *folder, "--nproc", "4", TP, "2", *whole)
    assert shared.code == 0, shared.text
    alone = hp.train(*STEPS, "--training.steps", "5", *folder)
    assert alone.code == 0, alone.text
    assert_agrees(hp.cwd / "run", one_process, 5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((TP, "3", "--nproc", "3"), (TP, "3 ranks cannot share 2 or 4 or 8 attention heads evenly; allowed: 1, 2, 4")),
        ((CP, "3", "--nproc", "3"), ("--training.seq_len", "64 tokens cannot be cut into 3 equal parts")),
    ],
)
def test_what_ranks_cannot_share_is_refused_before_anything_starts(
    hp: Hp, options: tuple[str, ...], says: tuple[str, ...]
) -> None:
    refused = hp("train", *RECIPE, "--training.seq_len", "64", *options)
    assert refused.code == 2, refused.text
    for text in says:
        assert text in refused.err
    assert "Traceback" not in refused.text
    assert not list(hp.cwd.iterdir())
