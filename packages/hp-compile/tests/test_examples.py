"""The examples run as they stand, in real processes, and their losses are those of eager torch."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script: str, *options: str, ranks: int = 1) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / script), *options],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def losses_in(output: str) -> torch.Tensor:
    """Losses are printed with nine digits, enough to tell every float32 from its neighbours."""
    return torch.tensor([float(found) for found in re.findall(r"^step +\d+ +loss (\S+)$", output, re.M)])


def load(script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_" + Path(script).parent.name, EXAMPLES / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_simple_example_on_one_process_prints_the_losses_of_plain_torch():
    output = run("simple_model/train.py", "--steps", "6")
    assert "check: 6 losses on 1 rank(s), bit for bit those of plain eager torch: yes" in output
    example = load("simple_model/train.py")
    model = example.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=example.LR)
    expected = []
    for step in range(6):
        bytes_BC, next_B = example.batch(step, 0)
        loss = F.cross_entropy(model(bytes_BC), next_B)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    assert torch.equal(losses_in(output), torch.stack(expected))
    assert expected[-1] < expected[0] - 1


def test_the_simple_example_shards_under_torchrun_and_equals_fsdp2():
    output = run("simple_model/train.py", "--steps", "4", ranks=2)
    assert "2 ranks over gloo: FSDP, units from plan.yaml" in output
    assert re.search(r"^blocks\.3 +6 +6 ", output, re.M), "each block is one unit, all of it sharded"
    assert re.search(r"^\(outside the plan\) +1 +0 +replicated", output, re.M), "the embedding stays whole"
    assert "check: 4 losses on 2 rank(s), bit for bit those of eager FSDP2: yes" in output
    losses = losses_in(output)
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 1


def test_the_automodel_example_runs_tp_2_times_fsdp_2_and_equals_fsdp2_over_the_same_model():
    output = run("automodel_tp/train.py", "--steps", "4", ranks=4)
    assert "TP 2 × FSDP 2 over gloo" in output
    assert "layers.0.q.weight: (32, 32) as (8, 32) on this rank" in output
    assert "check: 4 losses on 4 rank(s), bit for bit those of eager FSDP2 over the same TP model: yes" in output
    losses = losses_in(output)
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_the_check_line_says_no_when_eager_differs(monkeypatch, capsys):
    example = load("simple_model/train.py")
    eager = example.train_eager
    monkeypatch.setattr(example, "train_eager", lambda steps, rank: [loss * 1.0000002 for loss in eager(steps, rank)])
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "2"])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert example.main() is False
    assert "plain eager torch: NO" in capsys.readouterr().out


def test_the_automodel_example_says_how_to_start_it():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "automodel_tp/train.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "torchrun --nproc-per-node 4" in done.stderr
