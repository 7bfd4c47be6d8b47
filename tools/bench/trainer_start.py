"""Seconds from `hp train` to the end of its first step, beside a bare torch script that does the same step.

    python tools/bench/trainer_start.py --nproc 1

In: options below. Out: medians and ratios, paired: each round starts every contestant once. The bare script imports
torch and hp-models, builds the debug model, makes up a batch and does one step: what nobody can do without. The text
of the demo and its tokenizer are in the cache, as in every run but the first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = """
import torch
from hp_protocols import get_spec
model = get_spec("qwen3_5_v2", "debugmodel").model.build()
model.init_states(seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.randint(2048, (8, 257))
logits = model(ids[:, :-1])
torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
"""
RECIPE = ("--module", "qwen3_5_v2", "--config", "qwen3_5_v2_debugmodel", "--training.steps", "2")


def seconds_to_first_step(mode: str, nproc: int, folder: Path) -> float:
    """From the start of the process to the line that the first step leaves in metrics.jsonl."""
    record = folder / "metrics.jsonl"
    options = ("--compile.mode", mode, "--checkpoint.enable=false", "--dump_folder", str(folder), "--nproc", str(nproc))
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "hp_trainer", "train", *RECIPE, *options], stdout=subprocess.DEVNULL
    )
    while process.poll() is None and not (record.is_file() and '"loss"' in record.read_text()):
        time.sleep(0.005)
    taken = time.perf_counter() - began
    if process.wait():
        raise SystemExit(f"hp train ended with {process.returncode}")
    return taken


def seconds_of_bare_script() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", BARE], check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    times: dict[str, list[float]] = {"bare script": [], "hp train": [], "hp train, graph": []}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds + 1):
            taken = {"bare script": seconds_of_bare_script()}
            for name, mode in (("hp train", "none"), ("hp train, graph", "graph")):
                taken[name] = seconds_to_first_step(mode, options.nproc, Path(scratch) / f"{mode}-{number}")
            if number:  # the first round fills caches
                for name, seconds in taken.items():
                    times[name].append(seconds)
    print(f"to the end of the first step, {options.nproc} processes, {options.rounds} rounds, {os.cpu_count()} cores")
    for name, found in times.items():
        ratio = statistics.median(ours / bare for ours, bare in zip(found, times["bare script"], strict=True))
        print(f"  {name:16s} median {statistics.median(found):6.2f} s   paired ratio to the bare script {ratio:.2f}")


if __name__ == "__main__":
    main()
