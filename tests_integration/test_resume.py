"""Interrupted and started again, a run is bit for bit the run that was never interrupted (1 process and 2)."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from harness import (
    PATIENCE,
    RECIPE,
    SMALL,
    TORCHRUN,
    Hp,
    assert_same_checkpoint,
    descendants,
    is_alive,
    losses,
    wait_for,
)


def assert_same_run(one: Path, other: Path, step: int = 12) -> None:
    assert losses(one) == losses(other)
    assert_same_checkpoint(*(run / "checkpoint" / f"step-{step}" for run in (one, other)))


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(hp: Hp, plugin: str, nproc: int, how: str) -> None:
    # A record every 5 steps and a checkpoint every 4: the mean since the previous record spans the interruption.
    options = ["--module", "faulty", "--config", "debug_recipe", *SMALL, "--metrics.log_freq", "5"]
    options += ["--nproc", str(nproc)]
    hp.env["PYTHONPATH"] = plugin
    whole = hp("train", *options, "--dump_folder", "whole")
    assert whole.code == 0, whole.text

    # In the first of the 8 micro-batches of step 6, which the processes share.
    hp.env["FAULT"] = json.dumps({"rank": 0, "step": 5 * 8 // nproc + 1, "where": "forward", "how": f"run {how}"})
    broken = hp("train", *options, "--dump_folder", "broken")
    saved = {path.name for path in (hp.cwd / "broken" / "checkpoint").iterdir()}
    if how == "SIGTERM":
        assert broken.code == 0, broken.text
        # The ranks agree on it in a step, this one or the next.
        stopped = re.search("Stopped by SIGTERM after step ([67])", broken.out)
        assert stopped, broken.text
        assert "Resume:" in broken.out
        assert saved == {"step-4", f"step-{stopped[1]}"}
    else:
        assert broken.code == -signal.SIGKILL, broken.text
        assert saved == {"step-4"}
    del hp.env["FAULT"]
    again = hp("train", "broken/resolved.yaml", "--nproc", str(nproc))
    assert again.code == 0, again.text
    assert_same_run(hp.cwd / "whole", hp.cwd / "broken")


def test_a_run_saved_by_two_processes_goes_on_in_one(hp: Hp) -> None:
    options = [*SMALL, "--dump_folder", "run"]
    assert hp.train(*options, "--nproc", "2", "--training.steps", "4").code == 0
    more = hp.train(*options, "--training.steps", "6")
    assert more.code == 0, more.text
    assert [step for step, *_ in losses(hp.cwd / "run")] == [1, 2, 3, 4, 5, 6]


def test_torchrun_and_nproc_are_the_same_run(hp: Hp) -> None:
    options = [*RECIPE, *SMALL, "--training.steps", "4"]
    assert hp("train", *options, "--nproc", "2", "--dump_folder", "ours").code == 0
    torchrun = hp(
        *TORCHRUN, "-m", "hp_trainer.train", *options, "--dump_folder", "theirs", module="torch.distributed.run"
    )
    assert torchrun.code == 0, torchrun.text
    assert_same_run(hp.cwd / "ours", hp.cwd / "theirs", step=4)


def test_two_processes_train_what_one_trains(hp: Hp) -> None:
    for nproc in ("1", "2"):
        done = hp.train(*SMALL, "--training.steps", "4", "--nproc", nproc, "--dump_folder", f"run{nproc}")
        assert done.code == 0, done.text
    # Sums over ranks round differently from sums in one process; the contract allows 1e-5 between layouts.
    for one, two in zip(losses(hp.cwd / "run1"), losses(hp.cwd / "run2"), strict=True):
        assert one[0] == two[0]
        assert one[1:] == pytest.approx(two[1:], rel=1e-5)


def test_two_runs_into_one_folder_are_refused(hp: Hp) -> None:
    first = hp.start("train", *RECIPE, *SMALL, "--dump_folder", "run", "--training.steps", "100000")
    wait_for(lambda: (hp.cwd / "run" / "metrics.jsonl").exists())
    second = hp.train(*SMALL, "--dump_folder", "run")
    assert second.code == 2, second.text
    assert "run" in second.err
    assert "Traceback" not in second.text
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=PATIENCE)
    assert first.returncode == 0, out + err


def test_ranks_end_when_their_launcher_is_killed(hp: Hp) -> None:
    launcher = hp.start("train", *RECIPE, *SMALL, "--training.steps", "100000", "--nproc", "2", "--dump_folder", "run")
    wait_for(lambda: (hp.cwd / "run" / "metrics.jsonl").exists())
    ranks = descendants(launcher.pid)
    assert len(ranks) >= 2
    launcher.kill()
    launcher.communicate(timeout=PATIENCE)
    wait_for(lambda: not any(is_alive(pid) for pid in ranks))
