"""`hp config show | diff | validate`: exit codes and texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import toy_trainer

from hp_config import cli, dump_yaml, load_yaml

SMALL = ("--module", "toy", "--config", "small")


@pytest.fixture
def resolved(tmp_path: Path) -> Path:
    """A run's resolved.yaml: the recipe `toy.small` with 5 steps."""
    path = tmp_path / "resolved.yaml"
    config = toy_trainer.small().replace(recipe="toy.small")
    config.training.steps = 5
    path.write_text(dump_yaml(config))
    return path


def test_show_prints_the_yaml_that_a_run_would_save(tmp_path: Path) -> None:
    code, text = cli.show([*SMALL, "--training.steps=5"])
    assert code == 0
    assert text.startswith("hp_config: 1\nmodule: toy\nconfig: small\ntrainer:\n")
    (tmp_path / "shown.yaml").write_text(text)
    config = load_yaml(tmp_path / "shown.yaml")
    assert config.training.steps == 5
    assert config.recipe == "toy.small"


def test_diff_of_options_shows_what_they_change_in_the_recipe() -> None:
    assert cli.diff([*SMALL, "--training.steps=5", "--debug.seed", "1"]) == (
        0,
        "recipe toy.small → options\n  training.steps: 10 → 5\n  debug.seed: null → 1",
    )
    assert cli.diff([*SMALL, "--training.steps=10"]) == (0, "options says the same as recipe toy.small")


def test_diff_of_a_file_shows_what_it_changes_in_its_recipe(resolved: Path) -> None:
    assert cli.diff([str(resolved)]) == (0, f"recipe toy.small → {resolved}\n  training.steps: 10 → 5")


def test_diff_of_two_files_shows_what_the_second_changes(resolved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("hp_config: 1\nmodule: toy\nconfig: small\n")
    code, text = cli.diff([str(resolved), str(other), "--debug.seed=3"])
    assert (code, text.splitlines()) == (
        0,
        [f"{resolved} → {other}", "  recipe: toy.small → ", "  training.steps: 5 → 10", "  debug.seed: null → 3"],
    )


def test_diff_of_a_file_without_a_recipe_asks_for_a_second_file(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(dump_yaml(toy_trainer.small()))
    code, text = cli.diff([str(path)])
    assert code == 2
    assert "does not name its recipe (module, config)\n    → give a second file" in text


def test_validate_says_what_is_valid(resolved: Path) -> None:
    assert cli.validate([*SMALL]) == (0, "toy.small is valid")
    assert cli.validate([str(resolved), "--world-size", "1"]) == (0, f"{resolved} is valid on 1 process")
    assert cli.validate([str(resolved), "--world_size=4"]) == (0, f"{resolved} is valid on 4 processes")


def test_validate_lists_every_mistake_with_its_place(resolved: Path) -> None:
    resolved.write_text(resolved.read_text().replace("seq_len: 16", "seq_len: 0").replace("mode: none", "mode: grph"))
    code, text = cli.validate([str(resolved), "--training.global_batch_size=3", "--world-size=3"])
    lines = resolved.read_text().splitlines()
    assert code == 2
    assert text.splitlines()[0] == "3 mistakes in the configuration:"
    assert f"{resolved}:{lines.index('    seq_len: 0') + 1} (training.seq_len): 0 is too small" in text
    assert f"{resolved}:{lines.index('    mode: grph') + 1} (compile.mode): expected one of" in text
    assert "--training.global_batch_size: 3 rows cannot be shared out" in text


def test_validate_checks_the_degrees_only_where_it_knows_the_processes() -> None:
    degrees = "--parallelism.data_parallel_shard_degree=4"
    assert cli.validate([*SMALL, degrees])[0] == 0
    code, text = cli.validate([*SMALL, degrees, "--world-size=2"])
    assert code == 2
    assert text.startswith("1 mistake in the configuration:\nparallelism: data_parallel_shard_degree 4 = 4, but")
    assert "→ --nproc 4" in text


@pytest.mark.parametrize("given", ["--world-size=0", "--world-size=two", "--world-size", "--world-size=-1"])
def test_a_world_size_is_a_number_of_processes(given: str) -> None:
    code, text = cli.validate([*SMALL, given])
    assert code == 2
    assert "is no number of processes; allowed: at least 1" in text


@pytest.mark.parametrize("command", [cli.show, cli.diff, cli.validate])
def test_a_mistake_is_a_text_and_exit_code_2(command: cli.Command) -> None:
    code, text = command([*SMALL, "--training.step=5"])
    assert (code, text) == (
        2,
        "1 mistake in the configuration:\n--training.step: no such option\n    → did you mean --training.steps?",
    )


def test_an_exception_of_a_recipe_is_not_swallowed() -> None:
    with pytest.raises(RuntimeError, match="the recipe itself is broken"):
        cli.show(["--module", "broken", "--config", "raises"])
    with pytest.raises(ModuleNotFoundError):
        cli.validate(["--module", "broken", "--config", "no_module"])
