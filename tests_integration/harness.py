"""Shared by the integration tests: run `hp` as a user does, in a folder and a cache of its own.

In: arguments of `hp`. Out: what it printed and returned, and readers for what it left in a run folder.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPE = ("--module", "qwen3_5_v2", "--config", "qwen3_5_v2_debugmodel")
# A run of a few seconds: short rows, few steps, every step recorded.
SMALL = ("--training.seq_len", "64", "--training.steps", "12", "--metrics.log_freq", "1", "--checkpoint.interval", "4")

# `python -m torch.distributed.run` with these: two processes that meet without asking how this machine is called.
TORCHRUN = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
# How long to wait for what comes in a second on a quiet machine: it costs nothing where all is well.
PATIENCE = 180.0


def environment(**variables: str) -> dict[str, str]:
    """This process's variables for a command under test: no launcher's, one device, one width of the terminal."""
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in launched and not name.startswith(("MASTER_", "TORCHELASTIC_"))
    }
    return {**kept, "HP_DEVICE": "cpu", "COLUMNS": "80", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", **variables}


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
        self.env = environment(HP_CACHE_DIR=str(cache))
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
            start_new_session=True,  # a group of its own, which `close` can end
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
        """End what still runs, with all that it has started: ranks lead groups of their own."""
        for process in self.started:
            if process.poll() is None:
                ranks = descendants(process.pid)
                os.killpg(process.pid, signal.SIGKILL)
                for pid in ranks:
                    if is_alive(pid):
                        os.kill(pid, signal.SIGKILL)
            process.communicate(timeout=10)


def _stat(pid: int) -> tuple[str, int] | None:
    """State and parent of a process, None if there is none."""
    try:
        # The name before them, in parentheses, may hold anything.
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return state, int(parent)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def is_alive(pid: int) -> bool:
    """Whether a process has not ended. A zombie has: whoever started it has only not asked for its code yet."""
    found = _stat(pid)
    return found is not None and found[0] not in "ZX"


def descendants(pid: int) -> list[int]:
    """The living processes that a process has started, and those that these have."""
    parents = {child: found[1] for child in _pids() if (found := _stat(child)) and found[0] not in "ZX"}
    wanted = [pid]
    for one in wanted:
        wanted += [child for child, parent in parents.items() if parent == one]
    return wanted[1:]


def processes_in(folder: Path) -> list[int]:
    """The living processes whose current folder is `folder`."""
    found = []
    for pid in _pids():
        try:
            if os.readlink(f"/proc/{pid}/cwd") == str(folder.resolve()) and is_alive(pid):
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, or is somebody else's
    return found


def records(run: Path) -> list[dict[str, object]]:
    """The log records of a run, without its events."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def losses(run: Path) -> list[tuple[object, object, object, object]]:
    return [(record["step"], record["loss"], record["grad_norm"], record["lr"]) for record in records(run)]


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until `condition()` is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{condition} did not come true in {seconds} s"
        time.sleep(0.02)


def checkpoint_tensors(folder: Path) -> dict[str, Any]:
    """Every tensor of model and optimizer in a checkpoint, read with torch's own reader, not ours."""
    kinds = (".model.", ".optimizer.")
    found = {name: value for name, value in _checkpoint(folder).items() if name.startswith(kinds)}
    assert found, f"no tensors in {folder}"
    return found


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Two runs that must be the same have saved the same: tensors, schedule, data, steps, seeds, torch's generator.

    Not the seconds that a run took, and not the generators of Python and numpy, which training does not seed.
    """
    ours, theirs = _checkpoint(one), _checkpoint(other)
    for parts in (
        ".model.",
        ".optimizer.",
        ".hyperparameters.",
        ".states.dataloader.",
        ".states.train_state.",
        ".rng.",
    ):
        assert any(name.startswith(parts) for name in ours), f"nothing of {parts} in {one}"
    assert ours.keys() == theirs.keys()
    differing = [name for name in ours if not _same(ours[name], theirs[name])]
    own = [name for name in differing if name.endswith(("_seconds", ".seconds")) or _is_unseeded(name)]
    assert differing == own


def _is_unseeded(name: str) -> bool:
    return name.startswith(".rng.") and name.endswith((".python", ".numpy"))


def _same(one: Any, other: Any) -> bool:
    import torch

    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def _checkpoint(folder: Path) -> dict[str, Any]:
    """Everything in a checkpoint by its path; what is no tensor was saved as the bytes of torch.save."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    flat: dict[str, Any] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, bytes):
            value = torch.load(io.BytesIO(value), weights_only=True)
        if isinstance(value, dict):
            for key, item in value.items():
                collect(f"{prefix}.{key}", item)
        else:
            flat[prefix] = value

    collect("", state)
    return flat
