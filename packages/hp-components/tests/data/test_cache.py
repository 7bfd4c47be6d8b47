"""Where the cache is, and what its files promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_components.data.cache import cache_key, cache_root, open_atomic
from hp_protocols.errors import ConfigError


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HP_CACHE_DIR", str(tmp_path / "own"))
    assert cache_root(tmp_path / "argument") == tmp_path / "argument"
    assert cache_root() == tmp_path / "own"
    monkeypatch.delenv("HP_CACHE_DIR")
    assert cache_root() == tmp_path / "xdg" / "hyper-parallel"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_root() == tmp_path / "home" / ".cache" / "hyper-parallel"
    monkeypatch.setenv("HP_CACHE_DIR", "~/elsewhere")
    assert cache_root() == tmp_path / "home" / "elsewhere"


def test_a_key_tells_its_parts_apart() -> None:
    assert cache_key("a", "bc") != cache_key("ab", "c")
    assert cache_key("a", 1) == cache_key("a", 1)


def write_and_be_interrupted(path: Path) -> None:
    with open_atomic(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "made" / "file"
    with open_atomic(path) as file:
        file.write(b"old")
        assert not path.exists()
    with pytest.raises(KeyboardInterrupt):
        write_and_be_interrupted(path)
    assert path.read_bytes() == b"old"
    with open_atomic(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"file/tokens: cannot write the cache: Not a directory"):
        write_and_be_interrupted(tmp_path / "file" / "tokens" / "x")
