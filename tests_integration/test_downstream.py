"""A package of somebody else's: its model, optimizer, dataloader and recipes work by being installed.

The package is `downstream/`: built, installed into an environment of its own which also sees the six packages.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Hp, assert_same_checkpoint, checkpoint_tensors, losses

HERE = Path(__file__).parent
COUNTING = ("--module", "shift_lm", "--config", "shift_lm_counting")
SMALL = (
    "--training.seq_len=32", "--training.steps=4", "--lr_scheduler.warmup_steps=2",
    "--metrics.log_freq=1", "--checkpoint.interval=2", "--debug.seed=7",
)  # fmt: skip


@pytest.fixture(scope="module")
def their_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with the wheel in it; what it requires comes from this environment."""
    folder = tmp_path_factory.mktemp("downstream")
    shutil.copytree(HERE / "downstream", folder / "package")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(build, cwd=folder / "package", check=True, capture_output=True)
    (wheel,) = (folder / "dist").iterdir()
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
    python = str(folder / "env" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    theirs = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    ours = sysconfig.get_paths()["purelib"]
    (Path(theirs) / "beside.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return python


@pytest.fixture(scope="module")
def trained(their_python: str, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Hp]:
    """`run`: four steps of the counting recipe, with an option of each of its own components."""
    command = Hp(tmp_path_factory.mktemp("trained"), cache, their_python)
    options = ("--optimizer.clip_value=0.002", "--dataloader.largest_stride", "3", "--dump_folder=run")
    try:
        done = command("train", *COUNTING, *SMALL, *options)
        assert done.code == 0, done.text
        assert "shift_lm/small" in done.out
        assert "counting in steps of 1 to 3" in done.out
        yield command
    finally:
        command.close()


def test_the_package_is_listed_without_loading_torch(their_python: str, hp: Hp) -> None:
    code = "import sys; from hp_trainer.cli import main; assert main(['list']) == 0; assert 'torch' not in sys.modules"
    told = subprocess.run([their_python, "-c", code], check=True, capture_output=True, text=True, cwd=hp.cwd).stdout
    assert "  shift_lm\n    shift_lm_counting\n    shift_lm_small\n" in told
    assert "shift_lm: small, wide" in told
    assert "qwen3_5_v2_debugmodel" in told


def test_options_of_its_own_stand_in_the_help_and_act(trained: Hp) -> None:
    told = trained("train", *COUNTING, "--help")
    assert told.code == 0
    for part in ("--optimizer.clip_value FLOAT", "No element of a gradient is larger", "--dataloader.largest_stride"):
        assert part in told.out
    changed = trained("config", "diff", "run/resolved.yaml").out
    assert "optimizer.clip_value: 0.5 → 0.002" in changed
    assert "dataloader.largest_stride: 5 → 3" in changed
    done = trained("train", *COUNTING, *SMALL, "--dataloader.largest_stride=3", "--dump_folder=loose")
    assert done.code == 0, done.text
    clipped, loose = losses(trained.cwd / "run"), losses(trained.cwd / "loose")
    assert clipped[0] == loose[0], "the same data, seed and first loss"
    assert clipped[3] != loose[3], "the optimizer's own option acts"


def test_all_mistakes_are_told_at_once_also_those_of_its_own_options(trained: Hp) -> None:
    wrong = ("--optimizer.clip_value=0", "--dataloader.largest_strid=2", "--parallelism.tensor_parallel_degree=2")
    told = trained("train", *COUNTING, *wrong, "--nproc", "2")
    assert told.code == 2
    assert "--optimizer.clip_value: 0.0 would erase gradients; allowed: above 0" in told.err
    assert "did you mean --dataloader.largest_stride?" in told.err
    assert "--parallelism.tensor_parallel_degree: 2: ShiftLM has no tensor parallelism" in told.err
    assert "Traceback" not in told.text


def test_a_resumed_run_ends_with_the_same_bits(trained: Hp) -> None:
    shutil.copytree(trained.cwd / "run", trained.cwd / "resumed")
    shutil.rmtree(trained.cwd / "resumed" / "checkpoint" / "step-4")
    done = trained("train", "resumed/resolved.yaml")
    assert done.code == 0, done.text
    assert "resuming   after step 2" in done.out
    assert losses(trained.cwd / "resumed") == losses(trained.cwd / "run")
    assert_same_checkpoint(*(trained.cwd / name / "checkpoint" / "step-4" for name in ("run", "resumed")))


def test_graph_mode_trains_the_same_bits(trained: Hp) -> None:
    done = trained("train", "run/resolved.yaml", "--dump_folder=graph", "--compile.mode=graph")
    assert done.code == 0, done.text
    assert losses(trained.cwd / "graph") == losses(trained.cwd / "run")
    assert_same_weights(trained.cwd, "run", "graph")


def test_processes_share_it_and_one_of_them_writes_what_it_has_learnt(trained: Hp) -> None:
    (trained.cwd / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    options = ("--dataloader.dataset_path=text.txt", "--loss.num_chunks=4", "--activation_checkpoint.mode=full")
    small = ("--module", "shift_lm", "--config", "shift_lm_small")
    done = trained("train", *small, *SMALL, *options, "--tokenizer.vocab_size=300", "--nproc=2", "--dump_folder=two")
    assert done.code == 0, done.text
    assert "(dp_shard 2)" in done.out
    told = trained("sample", "two", "--prompt", "The quick", "--max_new_tokens", "4")
    assert told.code == 0, told.text
    assert told.out.startswith("The quick")


def test_its_layout_is_planned(trained: Hp) -> None:
    told = trained("plan", *COUNTING, "--world-size", "2")
    assert told.code == 0, told.text
    assert "shift_lm" in told.out


def test_the_readme_of_hp_trainer_shows_files_of_this_package() -> None:
    readme = (HERE.parent / "packages" / "hp-trainer" / "README.md").read_text()
    section = readme.partition("## Bring your own model")[2].partition("\n## ")[0]
    shown = re.findall(r"```(?:python|toml)\n(.*?)```", section, flags=re.DOTALL)
    files = [path.read_text() for path in (HERE / "downstream").rglob("*") if path.suffix in (".py", ".toml")]
    assert len(shown) >= 4
    for block in shown:
        assert any(block in text for text in files), block


def assert_same_weights(folder: Path, one: str, other: str) -> None:
    import torch

    left, right = (checkpoint_tensors(folder / name / "checkpoint" / "step-4") for name in (one, other))
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]
