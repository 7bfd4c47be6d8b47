"""Shared by the integration tests: run `hp` as a user does, in a folder and a cache of its own.

In: arguments of `hp`. Out: what it printed and returned, and readers for what it left in a run folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RECIPE = ("--module", "qwen3_5_v2", "--config", "qwen3_5_v2_debugmodel")
# A run of a few seconds: short rows, few steps, every step recorded.
SMALL = ("--training.seq_len", "64", "--training.steps", "12", "--metrics.log_freq", "1", "--checkpoint.interval", "4")


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


class Hp:
    """The `hp` command of this environment, or of another one's `python`, started in `cwd`."""

    def __init__(self, cwd: Path, cache: Path, python: str = sys.executable) -> None:
        self.cwd, self.python = cwd, python
        self.env = {**os.environ, "HP_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, module: str = "hp_trainer") -> subprocess.Popen[str]:
        """Start `python -m module arguments`; the fixture ends it if the test does not."""
        process = subprocess.Popen(
            [self.python, "-m", module, *arguments],
            cwd=self.cwd,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def __call__(self, *arguments: str, module: str = "hp_trainer", timeout: float = 240) -> Finished:
        process = self.start(*arguments, module=module)
        out, err = process.communicate(timeout=timeout)
        return Finished(process.returncode, out, err)

    def train(self, *arguments: str, **options: object) -> Finished:
        return self("train", *RECIPE, *arguments, **options)  # type: ignore[arg-type]

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()


def records(run: Path) -> list[dict[str, object]]:
    """The log records of a run, without its events."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def losses(run: Path) -> list[tuple[object, object, object, object]]:
    return [(record["step"], record["loss"], record["grad_norm"], record["lr"]) for record in records(run)]


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait until `condition()` is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{condition} did not come true in {seconds} s"
        time.sleep(0.02)


def checkpoint_tensors(folder: Path) -> dict[str, object]:
    """Every tensor of a checkpoint, read with torch's own reader, not ours."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, object] = {}
    _load_state_dict(state, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    flat: dict[str, object] = {}

    def collect(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                collect(f"{prefix}.{key}", item)
        elif isinstance(value, torch.Tensor):
            flat[prefix] = value

    collect("", state)
    return flat
