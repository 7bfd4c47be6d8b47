"""The run folder: chosen without writing, held by one run, nothing in it is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_protocols.errors import ConfigError
from hp_trainer.run_folder import RunFolder, default_run_folder


def test_choosing_a_default_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = default_run_folder("recipe")
    assert folder.parts[:2] == ("outputs", "recipe")
    assert list(tmp_path.iterdir()) == []


def test_two_runs_started_in_the_same_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = set()
    for _ in range(3):
        folder = default_run_folder("recipe")
        folder.mkdir(parents=True)
        chosen.add(folder)
    assert len(chosen) == 3


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
