"""A newcomer's run: what it shows, what it leaves behind, that it learns."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
from pathlib import Path

import yaml
from harness import RECIPE, SMALL, Hp, records


def test_a_run_leaves_its_folder_and_says_where_everything_is(hp: Hp) -> None:
    done = hp.train(*SMALL)
    assert done.code == 0, done.text
    (run,) = (hp.cwd / "outputs" / "qwen3_5_v2_debugmodel").iterdir()
    names = {path.name for path in run.iterdir()}
    assert {"resolved.yaml", "metrics.jsonl", "loss.png", "checkpoint", "tokenizer"} <= names
    assert {path.name for path in (run / "checkpoint").iterdir()} == {"step-4", "step-8", "step-12"}
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    for said in ("loss.png", "metrics.jsonl", "--nproc 2", "--dataloader.dataset_path", "--training.steps"):
        assert said in done.out
    assert next(iter(yaml.safe_load((run / "resolved.yaml").read_text()))) == "hp_config"


def test_the_loss_falls_and_every_record_has_its_keys(hp: Hp) -> None:
    run = hp.cwd / "run"
    done = hp.train("--dump_folder", str(run), "--training.steps", "40", *SMALL[:2], "--metrics.log_freq", "10")
    assert done.code == 0, done.text
    found = records(run)
    assert [record["step"] for record in found] == [1, 10, 20, 30, 40]
    keys = ["step", "time", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "memory_gib", "mfu", "data_wait"]
    assert all(set(record) == set(keys) for record in found)
    first, last = found[0]["loss"], found[-1]["loss"]
    # Before the first update the model knows nothing: a uniform guess, worsened a little by its random logits.
    assert abs(first - math.log(2048)) < 0.5  # type: ignore[operator]
    assert last < first - 1.5  # type: ignore[operator]
    assert found[-1]["tokens"] == 40 * 8 * 64
    assert "\x1b[" not in done.text, "no control characters off a terminal"


def test_your_own_text_is_trained_on(hp: Hp) -> None:
    folder = hp.cwd / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    (folder / "b.jsonl").write_text('{"text": "%s"}\n' % ("pack my box with five dozen jugs " * 200) * 3)
    for path in (folder, folder / "a.txt", folder / "b.jsonl"):
        run = hp.cwd / f"run-{path.name}"
        done = hp.train(*SMALL, "--dump_folder", str(run), "--dataloader.dataset_path", str(path), "--training.steps=3")
        assert done.code == 0, done.text
        assert len(records(run)) == 3


def test_a_finished_run_says_so_and_trains_nothing(hp: Hp) -> None:
    assert hp.train(*SMALL, "--dump_folder", "run", "--training.steps", "2").code == 0
    before = (hp.cwd / "run" / "metrics.jsonl").read_bytes()
    again = hp("train", "run/resolved.yaml")
    assert again.code == 0, again.text
    assert "is finished" in again.out
    assert (hp.cwd / "run" / "metrics.jsonl").read_bytes() == before


def test_help_is_quick_and_does_not_import_torch(hp: Hp) -> None:
    for arguments in (
        ["--help"],
        ["train", "--help"],
        ["sample", "--help"],
        ["list"],
        ["version"],
        ["config", "--help"],
    ):
        code = (
            "import sys; from hp_trainer.cli import main; assert main(sys.argv[1:]) == 0; "
            "assert 'torch' not in sys.modules"
        )
        subprocess.run(
            [sys.executable, "-c", code, *arguments], check=True, capture_output=True, cwd=hp.cwd, env=hp.env
        )
    executable = Path(sys.executable).with_name("hp")
    seconds = []
    for _ in range(5):
        before = _seconds_of_children()
        subprocess.run([executable, "--help"], check=True, capture_output=True, env=hp.env)
        seconds.append(_seconds_of_children() - before)
    # The contract says under a second. Of the processor, and the best of five, since the machine is shared.
    assert min(seconds) < 1.0


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_recipe_help_shows_options_with_defaults(hp: Hp) -> None:
    done = hp("train", *RECIPE, "--help")
    assert done.code == 0, done.text
    for said in ("--training.steps", "256", "--dataloader.dataset", "--checkpoint.interval", "--nproc"):
        assert said in done.out
