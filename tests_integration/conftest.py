"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Hp


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tokenizer and token cache for all tests: the first run fills it."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder with the recipes of the faults, for PYTHONPATH."""
    import faulty

    return faulty.install(tmp_path_factory.mktemp("plugin"))


@pytest.fixture
def hp(tmp_path: Path, cache: Path) -> Iterator[Hp]:
    command = Hp(tmp_path, cache)
    try:
        yield command
    finally:
        command.close()
