"""Launching: what is refused, and that the exit code is that of the rank that failed."""

from __future__ import annotations

import pytest

from hp_protocols.errors import ConfigError
from hp_trainer.cli.train import split_launch
from hp_trainer.launch import Launch, run_ranks


def test_launch_options_are_taken_out_of_the_arguments() -> None:
    launch, rest = split_launch(["--module", "m", "--nproc", "4", "--training.steps=3", "--nnodes=2"])
    assert launch == Launch(nproc=4, nnodes=2)
    assert rest == ["--module", "m", "--training.steps=3"]


@pytest.mark.parametrize(
    ("launch", "flag"),
    [
        (Launch(nproc=0), "--nproc"),
        (Launch(nnodes=0), "--nnodes"),
        (Launch(nnodes=2, node_rank=2, rdzv_endpoint="h:1"), "--node-rank"),
        (Launch(nnodes=2), "--rdzv-endpoint"),
    ],
)
def test_an_impossible_launch_names_its_flag(launch: Launch, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        run_ranks(launch, [])


def test_nproc_is_refused_inside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun"):
        run_ranks(Launch(nproc=2), [])


def test_a_mistake_that_only_the_ranks_see_gives_exit_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(Launch(nproc=2), ["--module", "no_such_module", "--config", "c"]) == 2
    said = capfd.readouterr().err
    assert said.count("no_such_module") == 1, "one rank speaks for all"
    assert "Traceback" not in said
