"""Tab completion, asked through a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hp_trainer.cli import COMMANDS, completion

RECIPE = ("--module", "qwen3_5_v2", "--config", "qwen3_5_v2_debugmodel")


@pytest.fixture
def kept(tmp_path: Path):
    """The files that the completion keeps, and when they were written."""
    return lambda: {file: file.stat().st_mtime_ns for file in (tmp_path / "cache" / "completion").glob("*")}


@pytest.fixture
def press_tab(tmp_path: Path):
    """What bash offers at the end of a command line."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "hp").write_text(f'#!/bin/sh\nexec {sys.executable} -m hp_trainer "$@"\n')
    (bin_folder / "hp").chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "HP_CACHE_DIR": str(tmp_path / "cache")}

    def press(*words: str) -> list[str]:
        quoted = " ".join(f"'{word}'" for word in words)
        script = (
            'eval "$(hp completion bash)"; '
            f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _hp; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        told = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=True)
        return told.stdout.split()

    return press


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_recipes_options_and_values(press_tab, kept) -> None:
    assert press_tab("hp", "") == sorted(COMMANDS)
    assert press_tab("hp", "do") == ["doctor"]
    assert press_tab("hp", "train", "--module", "") == ["qwen3_5_v2"]
    assert "qwen3_5_v2_debugmodel" in press_tab("hp", "train", "--module", "qwen3_5_v2", "--config", "qwen")
    assert press_tab("hp", "train", "--mod") == ["--module"]
    assert "--training.seq_len" in press_tab("hp", "train", *RECIPE, "--training.s")
    first = kept()
    assert len(first) == 1
    assert press_tab("hp", "train", *RECIPE, "--compile.mode", "") == ["blocks", "graph", "none"]
    assert press_tab("hp", "train", *RECIPE, "--compile.mode", "=", "bl") == ["blocks"]
    assert {"--world-size", "--device-memory", "--training.seq_len"} <= set(press_tab("hp", "plan", *RECIPE, "--"))
    assert press_tab("hp", "plan", *RECIPE, "--device", "H100") == ["H100-80GB", "H100-NVL"]
    # The recipe was loaded once, for the first Tab; these are answered from the cache.
    assert kept() == first
    # A file name is left to the shell.
    assert press_tab("hp", "train", "outp") == []
    # Two of them, and a word of another option, are not what comes next.
    assert press_tab("hp", "train", *RECIPE, "--module") == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_the_options_of_files_and_of_small_commands(press_tab, tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    old.write_text("model: {name: qwen3_5}\ndata: {type: dummy}\ntrain: {max_steps: 3}\n")
    for command in ("migrate", "train"):
        assert press_tab("hp", command, str(old), "--train.max_st") == ["--train.max_steps"]
    assert press_tab("hp", "migrate", str(old), "-o") == ["-o"]
    assert press_tab("hp", "migrate", str(old), "--train.optimizer.lr_decay_style", "cos") == ["cosine"]
    assert press_tab("hp", "export", "run", "--") == ["--dtype", "--help", "--step", "--to"]
    assert press_tab("hp", "export", "run", "--dtype", "b") == ["bfloat16"]
    assert press_tab("hp", "import", "hf", "--to", "new", "--module", "qw") == ["qwen3_5_v2"]
    assert press_tab("hp", "config", "") == ["diff", "show", "validate"]
    assert press_tab("hp", "doctor", "--") == ["--help", "--json"]
    assert press_tab("hp", "list", "--") == ["--help"]


def test_what_only_the_shell_types_is_quiet_when_a_person_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.answer([]) == completion.answer(["train"]) == 2
    assert capsys.readouterr() == ("", "")


def test_every_shell_has_a_script_and_others_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert completion.main([shell]) == 0
        assert "hp complete" in capsys.readouterr().out
    assert completion.main(["tcsh"]) == 2
    assert "usage: hp completion" in capsys.readouterr().err
