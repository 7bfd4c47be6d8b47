"""What HyperTrainer costs beside a hand-written torch loop: seconds per step, paired in one process.

In: options below. Out: the medians and their ratio. Both train the debug model on the same batches; rounds alternate,
so that a machine whose speed drifts treats both alike.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from trainer_lib import SteppedTrainer

from hp_protocols import get_spec
from hp_trainer.recipes.qwen3_5_v2 import qwen3_5_v2_debugmodel


def build_trainer(steps: int, folder: str) -> SteppedTrainer:
    config = qwen3_5_v2_debugmodel()
    config.training.steps = steps
    config.training.local_batch_size = config.training.global_batch_size
    config.checkpoint.interval = steps + 1
    config.dump_folder = folder
    return SteppedTrainer(config)


def bare_loop(trainer: SteppedTrainer) -> Callable[[], None]:
    """One step as a person would write it in torch, on a model of the same size and the trainer's own batches."""
    model = get_spec("qwen3_5_v2", "debugmodel").model.build()
    model.init_states(seed=0)
    options = trainer.config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=options.betas, weight_decay=options.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    batches = iter(trainer.dataloader)

    def step() -> None:
        batch = next(batches)
        logits = model(batch["input"]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="steps per round and side")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer((arguments.rounds + 1) * arguments.steps, folder)
        sides = {"HyperTrainer": trainer.step, "bare loop": bare_loop(trainer)}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        with trainer.running():
            for round_number in range(arguments.rounds + 1):
                for name, step in sides.items():
                    started = time.perf_counter()
                    for _ in range(arguments.steps):
                        step()
                    if round_number:  # the first round warms up
                        seconds[name].append((time.perf_counter() - started) / arguments.steps)
        trainer.close()
    ratios = [ours / bare for ours, bare in zip(*seconds.values(), strict=True)]
    for name, values in seconds.items():
        print(f"{name:14} median {statistics.median(values):.4f} s per step")
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    print(f"ratio          median {middle:.3f} (from {low:.3f} to {high:.3f}, {len(ratios)} pairs)")


if __name__ == "__main__":
    main()
