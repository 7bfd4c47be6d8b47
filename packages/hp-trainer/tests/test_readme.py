"""The README's Python example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_example_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HP_CACHE_DIR", str(tmp_path / "cache"))
    # Those further on are parts of a package, which the integration tests install.
    example, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    assert "finished after step 3" in capsys.readouterr().out
    assert (tmp_path / "runs" / "readme" / "checkpoint" / "step-3").is_dir()
