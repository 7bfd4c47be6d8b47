"""Ranks of a training run without a launcher: what they do when nobody ends them but themselves.

In: arguments of `hp train`, variables, a number of ranks. Out: exit codes and output of each rank. The processes are
forked from one that has imported everything, so that a world takes seconds; no agent, no signals, a store that stays.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

from harness import PATIENCE, environment
from torch.distributed import TCPStore

_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Ended:
    """A world that has ended. `codes`: exit codes by rank, None where a rank had to be killed; `seconds`: by rank."""

    codes: list[int | None]
    texts: list[str]
    seconds: list[float]

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


class World:
    """Started when made. Every rank's output goes to a file in `folder`."""

    def __init__(self, folder: Path, path: str, size: int, arguments: list[str], **variables: str) -> None:
        folder.mkdir(parents=True)
        self.store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        preload(path)
        common = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **variables,
        }
        self.started = time.monotonic()
        self.logs = [folder / f"rank-{rank}.log" for rank in range(size)]
        self.ranks = []
        for rank, log in enumerate(self.logs):
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = _CONTEXT.Process(target=_rank, args=(common | numbers, str(log), path, arguments))
            process.start()
            self.ranks.append(process)

    def wait(
        self,
        seconds: float = PATIENCE,
        *,
        between: Callable[[], None] = lambda: None,
        seconds_between: float = math.inf,
    ) -> Ended:
        """Wait until every rank has ended; those that have not by then are killed, and have no code.

        Args:
            between: called again and again meanwhile, `seconds_between` apart and not at once.
        """
        ends: dict[int, float] = {}
        deadline, called = time.monotonic() + seconds, time.monotonic()
        while len(ends) < len(self.ranks) and time.monotonic() < deadline:
            for rank, process in enumerate(self.ranks):
                if rank not in ends and process.exitcode is not None:
                    ends[rank] = time.monotonic() - self.started
            if time.monotonic() - called > seconds_between:
                between()
                called = time.monotonic()
            time.sleep(0.02)
        codes = [process.exitcode for process in self.ranks]
        self.close()
        return Ended(codes, [log.read_text() for log in self.logs], [ends.get(r, seconds) for r in range(len(codes))])

    def close(self) -> None:
        for process in self.ranks:
            if process.exitcode is None:
                process.kill()
            process.join(10)


def preload(path: str) -> None:
    """Start the server of the forks, with the variables of a command under test and with what ranks import.

    It runs until this process ends: only the first call does anything.
    """
    names = ["faulty", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "hp_compile"]
    _CONTEXT.set_forkserver_preload([*names, "hp_trainer.cli.train", "hp_trainer.graph_mode", "hp_trainer._legacy"])
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment(PYTHONPATH=os.pathsep.join(filter(None, [path, before.get("PYTHONPATH", "")]))))
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _rank(variables: dict[str, str], log: str, path: str, arguments: list[str]) -> None:
    os.environ.update(variables)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.path.insert(0, path)
    import faulty

    from hp_trainer.cli.train import run_rank
    from hp_trainer.process_end import end_process

    train = faulty.train_older if "OLDER" in variables else run_rank
    end_process(train(arguments))
