"""Every small command ends alike: usage, mistakes and failures have their text, their stream and their exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hp_components import CheckpointError
from hp_protocols.errors import ConfigError, Fault, MissingExtraError
from hp_trainer.cli import export, import_weights, migrate, plot, sample
from hp_trainer.cli import main as hp
from hp_trainer.cli.arguments import Arguments
from hp_trainer.cli.frame import run_command


def end_with(error: BaseException | None, *words: str) -> int:
    def work(_: list[str]) -> None:
        if error is not None:
            raise error

    return run_command("hp thing", "usage: hp thing WORD", list(words), work)


def test_work_that_is_done_is_0_and_usage_is_no_mistake_where_it_is_asked_for(capsys) -> None:
    assert end_with(None, "word") == 0
    assert end_with(None, "word", "--help") == 0
    assert capsys.readouterr() == ("usage: hp thing WORD\n", "")
    assert end_with(None) == 2
    assert capsys.readouterr() == ("", "usage: hp thing WORD\n")


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError([Fault("--a", "is wrong"), Fault("--b", "too")]), 2, "hp thing: 2 mistakes"),
        (MissingExtraError('needs: pip install "it"'), 2, 'hp thing: needs: pip install "it"'),
        (FileNotFoundError(2, "No such file", "/nowhere/x"), 1, "hp thing: /nowhere/x: No such file"),
        (CheckpointError("the disk is full"), 1, "hp thing: the disk is full"),
    ],
)
def test_what_a_user_or_a_disk_does_wrong_is_told_without_a_traceback(error, code, told, capsys) -> None:
    assert end_with(error, "word") == code
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("error", [RuntimeError("ours"), ValueError("ours"), BrokenPipeError(32, "pipe")])
def test_every_other_exception_passes(error: Exception) -> None:
    with pytest.raises(type(error)):
        end_with(error, "word")


def test_misspelt_options_are_told_at_once_with_the_nearest_and_their_values_are_not() -> None:
    parser = Arguments("hp thing")
    parser.add_argument("folder", metavar="FOLDER")
    parser.flag("max_new_tokens", type=int)
    assert parser.parse_args(["f", "--max-new-tokens", "3"]).max_new_tokens == 3
    with pytest.raises(ConfigError) as refused:
        parser.parse_args(["f", "--max_new_token", "3", "--other=x"])
    first, second = refused.value.faults
    assert (first.where, first.hint) == ("--max_new_token", "did you mean --max_new_tokens?")
    assert (second.where, second.hint) == ("--other", "hp thing --help")
    for words, where in ((["f", "more"], "more"), ([], "FOLDER"), (["f", "--max_new_tokens", "x"], "--max_new_tokens")):
        with pytest.raises(ConfigError) as refused:
            parser.parse_args(words)
        assert [fault.where for fault in refused.value.faults] == [where]


def test_a_yaml_of_the_older_trainer_is_not_written_over_or_where_nothing_can_be(tmp_path: Path, capsys) -> None:
    old = tmp_path / "old.yaml"
    old.write_text("model: {name: qwen3_5}\ndata: {type: dummy}\ntrain: {max_steps: 3}\n")
    assert migrate.main([str(old), "-o", str(tmp_path / "new.yaml"), "--train.max_steps", "5"]) == 0
    assert "steps: 5" in (tmp_path / "new.yaml").read_text()
    assert migrate.main([str(old), "-o", str(tmp_path / "new.yaml")]) == 2
    assert "is not written over" in capsys.readouterr().err
    assert migrate.main([str(old), "-o", str(tmp_path / "no" / "new.yaml")]) == 1
    assert migrate.main(["--train.max_steps=3"]) == 2
    assert "the older file is missing" in capsys.readouterr().err


@pytest.mark.parametrize("module", [export, import_weights, migrate, plot, sample])
def test_help_of_a_command_loads_no_torch(module) -> None:
    code = f"import sys; from {module.__name__} import main; main(['--help']); assert 'torch' not in sys.modules"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told.startswith("usage: hp ")
    assert "exit codes: 0 fine" in told


def test_no_word_at_all_is_a_mistake_and_its_usage_no_output(capsys) -> None:
    for words in ([], ["config"]):
        assert hp(words) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("usage: hp")
    for words in (["--help"], ["config", "--help"], ["config", "show", "--help"]):
        assert hp(words) == 0
        assert capsys.readouterr().out.startswith("usage: hp")


def test_ctrl_c_ends_a_command_without_a_traceback() -> None:
    code = (
        "from hp_trainer import cli\ndef interrupted(): raise KeyboardInterrupt\ncli.main = interrupted\ncli.command()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_reader_who_has_seen_enough_ends_the_command_quietly() -> None:
    show = "config show --module qwen3_5_v2 --config qwen3_5_v2_9b"
    command = f"{sys.executable} -m hp_trainer {show} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hp_config: 1\n", "")
