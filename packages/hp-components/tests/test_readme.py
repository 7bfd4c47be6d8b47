"""The README's examples run as they stand, and the first one resumes when it is run again."""

import re
from pathlib import Path

import pytest

from hp_components.checkpoint import list_checkpoints
from hp_components.metrics import read_records

README = Path(__file__).parents[1] / "README.md"


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(1, len(examples())))
def test_every_other_example_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(examples()[number], str(README), "exec"), {})


def test_the_readmes_example_runs_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = examples()[0]
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        exec(compile(block, str(README), "exec"), {})
        run = tmp_path / "my_run"
        assert [info.step for info in list_checkpoints(run / "checkpoint")] == [10, 20]
        assert [record["step"] for record in read_records(run / "metrics.jsonl")] == [1, 5, 10, 15, 20]
        assert (run / "loss.png").exists()
