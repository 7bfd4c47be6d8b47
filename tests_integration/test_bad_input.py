"""What a mistake gets: exit code 2, one clear message, no traceback, no half-made run folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness import RECIPE, SMALL, Hp


def assert_refused(hp: Hp, *arguments: str, says: tuple[str, ...]) -> str:
    before = sorted(hp.cwd.rglob("*"))
    done = hp(*arguments)
    assert done.code == 2, done.text
    assert "Traceback" not in done.text
    for text in says:
        assert text in done.err, f"{text!r} is not in:\n{done.err}"
    assert sorted(hp.cwd.rglob("*")) == before, "something was written"
    return done.err


MISTAKES = {
    "unknown module": (["--module", "qwen3_5", "--config", "qwen3_5_v2_debugmodel"], ["qwen3_5", "qwen3_5_v2"]),
    "unknown recipe": (["--module", "qwen3_5_v2", "--config", "debug"], ["debug", "qwen3_5_v2_debugmodel"]),
    "unknown option": ([*RECIPE, "--training.step", "5"], ["training.step", "training.steps"]),
    "wrong type": ([*RECIPE, "--training.steps", "many"], ["training.steps", "many", "int"]),
    "negative size": ([*RECIPE, "--training.seq_len", "-4"], ["training.seq_len", "-4"]),
    "zero size": ([*RECIPE, "--training.local_batch_size", "0"], ["training.local_batch_size", "0"]),
    "batch not divisible": (
        [*RECIPE, "--training.global_batch_size", "7", "--training.local_batch_size", "2"],
        ["training.global_batch_size", "7", "local_batch_size"],
    ),
    "degrees are not the world size": (
        [*RECIPE, "--parallelism.data_parallel_shard_degree", "4"],
        ["data_parallel_shard_degree", "--nproc"],
    ),
    "heads that ranks cannot share": (
        [*RECIPE, "--parallelism.tensor_parallel_degree", "3", "--nproc", "3"],
        ["tensor_parallel_degree", "heads"],
    ),
    "pipeline parallelism": (
        [*RECIPE, "--parallelism.pipeline_parallel_degree", "2", "--nproc", "2"],
        ["pipeline_parallel_degree", "not available yet"],
    ),
    "memory budget": (
        [*RECIPE, "--activation_checkpoint.mode", "memory_budget"],
        ["activation_checkpoint.mode", "memory_budget"],
    ),
    "missing dataset": ([*RECIPE, "--dataloader.dataset_path", "nowhere/at/all"], ["nowhere/at/all"]),
    "unknown dtype": ([*RECIPE, "--training.dtype", "float31"], ["training.dtype", "float31", "float32"]),
    "checkpoint interval": ([*RECIPE, "--checkpoint.interval", "0"], ["checkpoint.interval", "0"]),
    "negative learning rate": ([*RECIPE, "--optimizer.lr", "-1"], ["optimizer.lr", "-1"]),
    "tokenizer folder is missing": ([*RECIPE, "--tokenizer.tokenizer_path", "no-such-folder"], ["no-such-folder"]),
    "no processes": ([*RECIPE, "--nproc", "0"], ["--nproc", "0"]),
    "processes is no number": ([*RECIPE, "--nproc", "two"], ["--nproc", "two"]),
    "missing yaml": (["nowhere.yaml"], ["nowhere.yaml"]),
    "no recipe": (["--training.steps", "3"], ["--module"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_before_anything_is_written(hp: Hp, name: str) -> None:
    arguments, says = MISTAKES[name]
    assert_refused(hp, "train", *arguments, says=tuple(says))


def test_all_mistakes_are_reported_at_once(hp: Hp) -> None:
    says = ("training.step", "training.seq_len", "training.dtype")
    assert_refused(
        hp, "train", *RECIPE, "--training.step=5", "--training.seq_len=-4", "--training.dtype=f31", says=says
    )


def test_unknown_commands_name_the_nearest(hp: Hp) -> None:
    assert_refused(hp, "trian", says=("trian", "hp train"))


def test_a_bad_jsonl_line_is_named_by_file_and_line(hp: Hp) -> None:
    path = hp.cwd / "data.jsonl"
    path.write_text('{"text": "fine"}\n{"text": broken}\n')
    assert_refused(hp, "train", *RECIPE, "--dataloader.dataset_path", str(path), says=("data.jsonl:2",))


def test_bad_data_is_refused_the_same_way_with_two_processes(hp: Hp) -> None:
    path = hp.cwd / "data.jsonl"
    path.write_text("not json\n")
    options = ["--dataloader.dataset_path", str(path), "--nproc", "2"]
    assert_refused(hp, "train", *RECIPE, *options, says=("data.jsonl:1",))


def test_an_empty_dataset_is_refused(hp: Hp) -> None:
    empty = hp.cwd / "empty"
    empty.mkdir()
    assert_refused(hp, "train", *RECIPE, "--dataloader.dataset_path", str(empty), says=("empty",))


def test_a_tokenizer_folder_without_files_lists_what_was_looked_for(hp: Hp) -> None:
    empty = hp.cwd / "empty"
    empty.mkdir()
    says = ("empty", "tokenizer.json", "vocab.json")
    assert_refused(hp, "train", *RECIPE, "--tokenizer.tokenizer_path", str(empty), says=says)


def test_a_run_folder_of_another_model_is_refused_and_kept(hp: Hp) -> None:
    done = hp.train(*SMALL, "--training.steps", "2", "--dump_folder", "run")
    assert done.code == 0, done.text
    # The same folder under a recipe whose model is smaller by a layer, offered by a package of the user's own.
    site = hp.cwd / "site"
    (site / "other-1.0.dist-info").mkdir(parents=True)
    (site / "other-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (site / "other-1.0.dist-info" / "entry_points.txt").write_text(
        "[hp_trainer.recipes]\nother.other_small = other_recipes:other_small\n"
    )
    (site / "other_recipes.py").write_text(
        "from hp_trainer.recipes.qwen3_5_v2 import qwen3_5_v2_debugmodel\n"
        "def other_small():\n"
        "    config = qwen3_5_v2_debugmodel()\n"
        "    config.model_spec.model.layers.pop()\n"
        "    return config\n"
    )
    hp.env["PYTHONPATH"] = str(site)
    arguments = ["--module", "other", "--config", "other_small", *SMALL, "--dump_folder", "run"]
    before = {path: path.read_bytes() for path in sorted((hp.cwd / "run").rglob("*")) if path.is_file()}
    refused = hp("train", *arguments)
    assert refused.code == 2, refused.text
    assert "layers.3" in refused.err
    assert "Traceback" not in refused.text
    assert {path: path.read_bytes() for path in before} == before


def test_without_tyro_the_command_line_says_what_to_install(hp: Hp) -> None:
    code = "import sys\nsys.modules['tyro'] = None\nfrom hp_trainer.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    command = [sys.executable, "-c", code, "train", *RECIPE]
    done = subprocess.run(command, cwd=hp.cwd, env=hp.env, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert 'pip install "hp-config[cli]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_nproc_is_refused_inside_torchrun(hp: Hp) -> None:
    hp.env |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert_refused(hp, "train", *RECIPE, "--nproc", "2", says=("--nproc", "torchrun"))


def test_a_folder_that_cannot_be_written_is_an_error_before_training(hp: Hp, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = hp.train(*SMALL, "--dump_folder", "file/run")
    assert done.code == 2, done.text
    assert "file/run" in done.err
    assert "Traceback" not in done.text
