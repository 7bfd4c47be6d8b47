"""The run folder: chosen without writing, held by one run, nothing in it is lost."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import pytest

from hp_config import ConfigManager
from hp_protocols.errors import ConfigError
from hp_trainer import HyperTrainer
from hp_trainer.run_folder import RunFolder, default_run_folder


def test_choosing_a_default_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = default_run_folder("recipe")
    assert folder.parts[:2] == ("outputs", "recipe")
    assert list(tmp_path.iterdir()) == []


def test_runs_started_in_the_same_second_get_folders_of_their_own_sorted_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # None of them is made before the run is built, seconds later.
    chosen = [str(default_run_folder("recipe")) for _ in range(20)]
    assert chosen == sorted(set(chosen))


def test_a_default_folder_that_is_there_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Stopped:
            return cls(2026, 1, 2)

    monkeypatch.setattr("hp_trainer.run_folder.datetime.datetime", Stopped)
    for name in ("20260102-000000-000000", "20260102-000000-000000-2", "20260102-000000-000000-3"):
        folder = default_run_folder("recipe")
        assert folder.name == name
        folder.mkdir(parents=True)


def test_a_folder_is_held_by_one_run_at_a_time(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.open()
    with pytest.raises(ConfigError, match="run"):
        second.open()
    first.close()
    second.open()
    second.close()


def test_a_run_that_came_and_went_while_this_one_was_prepared_is_not_written_over(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    for folder in (first, second):
        folder.require_usable()
    first.open()
    first.write_resolved("first", 0)
    first.close()
    with pytest.raises(ConfigError, match="another run was written here"):
        second.open()
    first.open()  # its own it may go on with
    first.close()


def test_a_run_that_was_trained_while_another_was_built_for_its_folder_keeps_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    monkeypatch.setenv("HP_CACHE_DIR", str(tmp_path / "cache"))
    recipe = ["--module", "qwen3_5_v2", "--config", "qwen3_5_v2_debugmodel", "--tokenizer.vocab_size", "290"]
    data = ["--training.seq_len", "16", "--dataloader.dataset_path", str(tmp_path / "text.txt")]
    options = [*recipe, *data, "--training.steps", "2", "--dump_folder", str(tmp_path / "run")]
    slow: HyperTrainer = ConfigManager().parse_args(options, world_size=1).build()
    quick = subprocess.run([sys.executable, "-m", "hp_trainer", "train", *options], capture_output=True, text=True)
    assert quick.returncode == 0, quick.stderr
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != ".lock"]
    before = {path: path.read_bytes() for path in files}
    assert len(before) > 5
    with pytest.raises(ConfigError, match="another run was written here"):
        slow.train()
    slow.close()
    assert {path: path.read_bytes() for path in files} == before


def test_an_older_configuration_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_resolved("a: 1\n", step=0)
    folder.write_resolved("a: 1\n", step=5)
    assert {path.name for path in tmp_path.iterdir()} == {"resolved.yaml"}
    folder.write_resolved("a: 2\n", step=5)
    folder.write_resolved("a: 3\n", step=5)
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert texts == {
        "resolved.yaml": "a: 3\n",
        "resolved.before-step-6.yaml": "a: 1\n",
        "resolved.before-step-6.2.yaml": "a: 2\n",
    }


def test_a_place_where_no_folder_can_be_is_refused_without_writing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="is no folder"):
        RunFolder(tmp_path / "file" / "deep" / "run").require_usable()
    RunFolder(tmp_path / "new" / "deep" / "run").require_usable()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
