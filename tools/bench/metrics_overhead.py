"""What MetricsProcessor adds to a training step: seconds per step, beside the same loop without it.

In: options below. Out: the mean and the worst added time, for each place where records can go, and for all together.
Rounds alternate, so that a machine whose speed drifts treats both loops alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hp_components import MetricsProcessor

SIDES: dict[str, dict[str, object]] = {
    "metrics.jsonl + console": {},
    "+ TensorBoard": {"enable_tensorboard": True},
    "+ W&B (offline)": {"enable_wandb": True},
    "+ both": {"enable_tensorboard": True, "enable_wandb": True},
}
# The goal is one of the default interval, for records, TensorBoard and console; W&B's time is its own.
GOAL_MS, GOAL_LOG_FREQ, GOAL_SIDES = 0.5, 10, ("metrics.jsonl + console", "+ TensorBoard")


def work() -> float:
    """A step of some tens of microseconds, so that the two loops are loops over something."""
    return sum(number * 0.5 for number in range(500))


def bare_loop(first: int, count: int) -> None:
    for _ in range(first, first + count):
        work()


def with_metrics(metrics: MetricsProcessor) -> Callable[[int, int], None]:
    def loop(first: int, count: int) -> None:
        for step in range(first, first + count):
            work()
            metrics.record(step, loss=5.0, grad_norm=1.0, lr=1e-3, tokens=2048, data_wait_s=1e-4)

    return loop


@contextmanager
def terminal(real: bool) -> Iterator[object]:
    """A stream for the console: a pseudo-terminal that is read and forgotten, or a plain file."""
    if not real:
        with open(os.devnull, "w") as stream:
            yield stream
        return
    import pty
    import threading

    ours, theirs = pty.openpty()
    stop = threading.Event()

    def drain() -> None:
        while not stop.is_set():
            try:
                os.read(ours, 65536)
            except OSError:
                return

    threading.Thread(target=drain, daemon=True).start()
    with os.fdopen(theirs, "w") as stream:
        yield stream
        stop.set()


def measure(knobs: dict[str, object], log_freq: int, rounds: int, steps: int, on_terminal: bool) -> list[float]:
    """Added milliseconds per step, of each round."""
    with tempfile.TemporaryDirectory() as folder, terminal(on_terminal) as stream:
        config = MetricsProcessor.Config(log_freq=log_freq, **knobs)  # type: ignore[arg-type]
        metrics: MetricsProcessor = config.build(
            run_folder=Path(folder), total_steps=(rounds + 1) * steps, stream=stream
        )
        metrics.begin()
        loop = with_metrics(metrics)
        added = []
        for number in range(rounds + 1):
            first = number * steps + 1
            began = time.perf_counter()
            bare_loop(first, steps)
            between = time.perf_counter()
            loop(first, steps)
            ended = time.perf_counter()
            if number:  # the first round warms up
                added.append(((ended - between) - (between - began)) / steps * 1e3)
        metrics.close()
    return added


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=500, help="steps per round and side")
    parser.add_argument("--log_freq", type=int, nargs="+", default=[1, 10], help="1 is the worst case: always a record")
    arguments = parser.parse_args()
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    missed = 0
    for on_terminal in (False, True):
        for log_freq in arguments.log_freq:
            where = "on a terminal" if on_terminal else "off a terminal"
            print(f"{where}, a record every {log_freq} steps")
            for name, knobs in SIDES.items():
                added = measure(knobs, log_freq, arguments.rounds, arguments.steps, on_terminal)
                mean = statistics.mean(added)
                goal = ""
                if log_freq == GOAL_LOG_FREQ and name in GOAL_SIDES:
                    missed += mean >= GOAL_MS
                    goal = f", goal {GOAL_MS} ms: {'reached' if mean < GOAL_MS else 'missed'}"
                print(f"  {name:26} mean {mean:.4f} ms, worst round {max(added):.4f} ms{goal}", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
