"""The README's example runs as it stands."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_readmes_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    # Classes need a module that has a name, as they have when a reader runs the block as a script.
    module = types.ModuleType("readme_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks:
        exec(compile(block, str(README), "exec"), module.__dict__)
    printed = capsys.readouterr().out
    assert "training.steps: 0 is too small; allowed: at least 1" in printed
    assert "hp_config: 1" in printed
    for said in ("belong below train.optimizer", "did you mean max_steps?", "pipeline parallelism", "--train.seed"):
        assert said in printed
