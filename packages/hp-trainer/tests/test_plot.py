"""Loss curves of runs: a picture, and a line of text each, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hp_trainer.cli.plot import main


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, losses in {"a": [8.0, 6.0, 4.0, 1.0], "long/b": [7.0, None, 5.0], "empty": []}.items():
        (tmp_path / name).mkdir(parents=True)
        lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
        lines.append({"event": "stopped", "step": 9})
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_one_run_is_drawn_into_its_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a"]) == 0
    assert capsys.readouterr().out.splitlines() == ["a  █▆▄▁  8.0000 to 1.0000 in 4 steps", "a/loss.png"]
    assert (runs / "a/loss.png").read_bytes().startswith(b"\x89PNG")


def test_several_runs_share_a_picture(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a", "long/b", "empty", "--out", "both.png"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a       █▆▄▁  8.0000 to 1.0000 in 4 steps",
        "long/b  █×▁  7.0000 to 5.0000 in 3 steps",
        "empty   no record yet",
        "both.png",
    ]
    assert (runs / "both.png").read_bytes().startswith(b"\x89PNG")
    assert not (runs / "loss.png").exists()


def test_mistakes_are_told_all_at_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a", "nowhere", "neither"]) == 2
    error = capsys.readouterr().err
    assert "nowhere: is no run folder: it has no metrics.jsonl" in error
    assert "neither: is no run folder" in error
    assert main(["a", "--out", "x.pdf"]) == 2
    assert "--out: x.pdf is no PNG" in capsys.readouterr().err
    assert main(["a", "--out", "no/such/folder/x.png"]) == 2
    assert "no/such/folder/x.png cannot be written" in capsys.readouterr().err
    assert main(["empty"]) == 2
    assert "has no record with a loss yet" in capsys.readouterr().err


def test_it_needs_neither_torch_nor_a_terminal_that_can_draw(runs: Path) -> None:
    code = (
        "import sys\nfrom hp_trainer.cli import main\n"
        "for words in (['plot', '--help'], ['sample', '--help'], ['plot', 'a']):\n"
        "    assert main(words) == 0\nassert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={"PYTHONIOENCODING": "ascii", "PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "a  8.0000 to 1.0000 in 4 steps\n" in done.stdout
