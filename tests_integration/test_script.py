"""The training script of one's own (tools/train_lm.py): a recipe alone, a file of the older trainer on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness import RECIPE, TORCHRUN, Hp, losses

SCRIPT = Path(__file__).parent.parent / "tools" / "train_lm.py"
OLD = """
model:
  num_hidden_layers: 2
  hidden_size: 32
  intermediate_size: 48
  vocab_size: 300
  config_overrides: {head_dim: 16}
data: {max_seq_len: 16}
train: {max_steps: 2, global_batch_size: 4}
"""


def run(hp: Hp, *words: str) -> None:
    done = subprocess.run([sys.executable, *words], cwd=hp.cwd, env=hp.env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_recipe_trains_as_with_hp_train(hp: Hp) -> None:
    options = (*RECIPE, "--training.steps", "2", "--training.seq_len", "64", "--metrics.log_freq", "1")
    run(hp, str(SCRIPT), *options, "--dump_folder", "script")
    assert hp("train", *options, "--dump_folder", "command").code == 0
    assert losses(hp.cwd / "script") == losses(hp.cwd / "command")


def test_an_older_file_trains_under_torchrun(hp: Hp) -> None:
    (hp.cwd / "old.yaml").write_text(OLD)
    torchrun = ("-m", "torch.distributed.run", *TORCHRUN)
    run(hp, *torchrun, str(SCRIPT), "old.yaml", "--train.checkpoint.output_dir=old")
    assert (hp.cwd / "old" / "metrics.jsonl").is_file()
