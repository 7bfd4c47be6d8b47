"""Validation in whole runs: the same number for any number of ranks, and training that does not notice it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import assert_same_checkpoint, losses
from world import World

OPTIONS = ("--module", "faulty", "--config", "faulty_recipe", "--training.steps", "3")
WORDS = "the quick brown fox jumps over the lazy dog while nobody looks at it "


@pytest.fixture
def run(tmp_path: Path, cache: Path, plugin: str, monkeypatch: pytest.MonkeyPatch):
    """Trains `name` on so many ranks; returns its run folder."""
    monkeypatch.chdir(tmp_path)
    # Rows that neither 2 nor 3 ranks share evenly, the last one short.
    (tmp_path / "held_out.txt").write_text(WORDS * 29)

    def train(name: str, size: int, *arguments: str, validate: bool = True) -> Path:
        if validate:
            arguments += ("--validation.enable", "--validation.dataloader.dataset_path", "held_out.txt")
            arguments += ("--validation.freq", "1")
        options = [*OPTIONS, "--dump_folder", name, *arguments]
        ended = World(tmp_path / f"log-{name}", plugin, size, options, HP_CACHE_DIR=str(cache)).wait()
        assert ended.codes == [0] * size, ended.text
        return tmp_path / name

    return train


def validations(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == "validation"]


def test_every_token_weighs_the_same_on_1_2_and_3_ranks_and_in_graph_mode(run) -> None:
    # Nothing is learnt, so that all of them measure the same weights.
    still = ("--optimizer.lr", "0", "--optimizer.weight_decay", "0", "--training.steps", "1")
    (one,) = validations(run("one", 1, *still))
    assert one["tokens"] > 100
    for name, size, mode in (("two", 2, "none"), ("three", 3, "none"), ("graph", 3, "graph")):
        (found,) = validations(run(name, size, *still, "--compile.mode", mode))
        assert found["tokens"] == one["tokens"]
        assert found["nll"] == pytest.approx(one["nll"], rel=1e-6)


@pytest.mark.parametrize("mode", ["none", "graph"])
def test_training_is_bitwise_the_same_with_and_without_validation(run, mode: str) -> None:
    with_it = run("with", 2, "--compile.mode", mode)
    without = run("without", 2, "--compile.mode", mode, validate=False)
    assert len(validations(with_it)) == 3
    assert not validations(without)
    assert losses(with_it) == losses(without)
    assert_same_checkpoint(*(folder / "checkpoint" / "step-3" for folder in (with_it, without)))
