"""`nox -s contracts` fails when a contract is broken: each fault is planted into a copy of the packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PLANTED = {
    "a private name across packages": (
        "borders",
        "hp-config/src/hp_config/planted.py",
        "from hp_protocols.configurable import _secret\n",
        "_secret",
    ),
    "a private module across packages": (
        "imports",
        "hp-config/src/hp_config/planted.py",
        "import hp_protocols._planted_private\n",
        "hp_protocols._planted_private",
    ),
    "a private attribute across packages": (
        "borders",
        "hp-config/src/hp_config/planted.py",
        "import hp_protocols\n\nprint(hp_protocols._hidden)\n",
        "hp_protocols._hidden",
    ),
    "torch in hp-models": ("imports", "hp-models/src/hp_models/planted.py", "import torch\n", "torch"),
    "torch in hp-protocols outside the platform": (
        "imports",
        "hp-protocols/src/hp_protocols/planted.py",
        "import torch\n",
        "torch",
    ),
    "a package above": ("imports", "hp-models/src/hp_models/planted.py", "import hp_trainer\n", "hp_trainer"),
    "another package in hp-compile": (
        "imports",
        "hp-compile/src/hp_compile/planted.py",
        "import hp_protocols\n",
        "hp_protocols",
    ),
    "an undeclared dependency": ("declared", "hp-config/src/hp_config/planted.py", "import numpy\n", "numpy"),
    "an unused import": ("lint", "hp-config/src/hp_config/planted.py", "import os\n", "F401"),
    "a wrong type": ("types", "hp-config/src/hp_config/planted.py", 'number: int = "one"\n', "planted.py:1: error: "),
    "a sibling without an upper bound": ("ranges", "hp-config/pyproject.toml", None, "hp-protocols"),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "packages", copy / "packages", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "packages/hp-protocols/src/hp_protocols/_planted_private.py").write_text('"""Planted."""\n')
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)
    return copy


def run_check(tree: Path, check: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "contracts.py"), "--root", str(tree), check]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("check", ["imports", "borders", "declared", "ranges", "lint", "types"])
def test_the_copy_is_sound_before_anything_is_planted(tree: Path, check: str) -> None:
    done = run_check(tree, check)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(tree: Path, fault: str) -> None:
    check, place, text, says = PLANTED[fault]
    path = tree / "packages" / place
    before = path.read_text() if path.exists() else None
    try:
        path.write_text(text if text is not None else before.replace("hp-protocols>=0.1,<0.2", "hp-protocols>=0.1"))
        done = run_check(tree, check)
        assert done.returncode == 1, done.stdout
        assert says in done.stdout
    finally:
        path.unlink() if before is None else path.write_text(before)
