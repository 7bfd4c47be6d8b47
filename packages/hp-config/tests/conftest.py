"""What all tests share: the toy trainer, installed as a distribution of its own with real entry points.

In: tests/toy. Out: a temporary folder on sys.path that holds the modules and a `*.dist-info`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

RECIPES = {
    "toy.small": "toy_trainer:small",
    "toy.wide": "toy_trainer:wide",
    "toy.picky": "toy_trainer:picky",
    "toy.plain_optimizer": "toy_trainer:plain_optimizer",
    "broken.raises": "toy_trainer:raises",
    "broken.no_config": "toy_trainer:no_config",
    "broken.mistyped": "toy_trainer:mistyped",
    "broken.no_module": "toy_module_that_is_missing:recipe",
}
SITE = Path(tempfile.mkdtemp(prefix="hp-config-tests-"))


def write_metadata(folder: Path, name: str, recipes: dict[str, str]) -> None:
    """Write the metadata of an installed distribution that offers `recipes`."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    points = "".join(f"{key} = {value}\n" for key, value in recipes.items())
    (info / "entry_points.txt").write_text(f"[hp_trainer.recipes]\n{points}")


def pytest_configure() -> None:
    for module in (Path(__file__).parent / "toy").glob("*.py"):
        shutil.copy(module, SITE)
    write_metadata(SITE, "toy-trainer", RECIPES)
    sys.path.insert(0, str(SITE))


def pytest_unconfigure() -> None:
    sys.path.remove(str(SITE))
    shutil.rmtree(SITE)


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder that subprocesses put on their path to find the toy trainer."""
    return SITE


@pytest.fixture(scope="session")
def toy_recipes() -> dict[str, str]:
    """The entry points of the toy trainer: name → function."""
    return RECIPES


@pytest.fixture
def declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, str]], Path]:
    """Install a distribution with the given recipes in a folder on sys.path; returns the folder."""

    def install(name: str, recipes: dict[str, str]) -> Path:
        write_metadata(tmp_path, name, recipes)
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    return install
