"""How long a save holds training up: CheckpointManager beside training, blocking, and torch's own dcp.async_save.

In: options below. Out: medians and paired ratios. All three save the same weights and optimizer state in one process;
rounds alternate, so that a machine whose speed drifts treats them alike.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hp_components import CheckpointManager, OptimizersContainer

WIDTH = 2048


class State:
    """Weights and two moments each, changed between saves so that nothing can be left out."""

    def __init__(self, gigabytes: float) -> None:
        layers = max(1, round(gigabytes * 1e9 / (WIDTH * WIDTH * 4 * 3)))
        self.model = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
        self.optimizers = OptimizersContainer.Config(lr=1e-3).build(model_parts=[self.model])
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizers.step()
        self.optimizers.zero_grad()
        tensors = [value for value in self.optimizers.state_dict().values() if isinstance(value, torch.Tensor)]
        self.gigabytes = sum(tensor.nbytes for tensor in [*self.model.parameters(), *tensors]) / 1e9

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 1


# (seconds that training is held up, seconds until everything is on disk)
Times = tuple[float, float]


def ours(state: State, folder: Path, mode: str) -> Callable[[int], Times]:
    manager = CheckpointManager.Config(interval=1, keep_latest_k=1, async_mode=mode).build(
        run_folder=folder, model_parts=[state.model], optimizers=state.optimizers
    )

    def save(step: int) -> Times:
        began = time.perf_counter()
        manager.save(step)
        held_up = time.perf_counter() - began
        while manager.latest() != step:
            time.sleep(0.005)
        on_disk = time.perf_counter() - began
        manager.poll()
        return held_up, on_disk

    return save


def torchs(state: State, folder: Path) -> Callable[[int], Times]:
    def save(step: int) -> Times:
        target = folder / f"step-{step}"
        tree = {"model": state.model.state_dict(), "optimizer": state.optimizers.state_dict()}
        began = time.perf_counter()
        future = dcp.async_save(tree, checkpoint_id=target, no_dist=True)
        held_up = time.perf_counter() - began
        future.result()
        on_disk = time.perf_counter() - began
        shutil.rmtree(target)
        return held_up, on_disk

    return save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to save (default: the system's temporary folder)")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        state, folder = State(arguments.gigabytes), Path(name)
        sides = {
            "async": ours(state, folder / "async", "async"),
            "blocking": ours(state, folder / "blocking", "disabled"),
            "dcp.async_save": torchs(state, folder / "torch"),
        }
        seen: dict[str, list[Times]] = {side: [] for side in sides}
        for number in range(arguments.rounds + 1):
            for side, save in sides.items():
                state.change()
                times = save(number + 1)
                if number:  # the first save of a run also gets memory and makes a plan
                    seen[side].append(times)
                else:
                    print(f"{side:15} first save: training held up {times[0]:.3f} s")
    report(state.gigabytes, seen)


def report(gigabytes: float, seen: dict[str, list[Times]]) -> None:
    print(f"\n{gigabytes:.2f} GB of state, medians of {len(seen['async'])} rounds")
    for side, times in seen.items():
        held_up, on_disk = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{side:15} training held up {held_up:.3f} s, on disk after {on_disk:.2f} s")
    for other in ("blocking", "dcp.async_save"):
        ratios = [theirs[0] / mine[0] for theirs, mine in zip(seen[other], seen["async"], strict=True)]
        spread = f"({min(ratios):.1f} to {max(ratios):.1f})"
        print(f"{other} / async: held up {statistics.median(ratios):.1f} × as long {spread}")


if __name__ == "__main__":
    main()
