"""Start one process per rank with torch's elastic agent, as torchrun does, and forward signals to the ranks.

In: a `Launch` (how many processes, on which node) and the arguments of `hp_trainer.train`. Out: the exit code of
the run: 0, or that of the first rank that failed. The ranks end when this process dies, however it dies.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hp_protocols.errors import ConfigError, Fault
from hp_trainer.faults.activity import LAUNCHER_FOLDER, Record, RecordFile, Status, activity
from hp_trainer.signals import STOPPING

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SHUTDOWN_SECONDS = 10
MEETING_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Launch:
    """How many processes run on how many machines; the defaults are one process, in place."""

    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None

    @property
    def world_size(self) -> int:
        return self.nproc * self.nnodes

    def faults(self) -> list[Fault]:
        """What cannot be launched, by flag."""
        found = []
        if self.nproc < 1:
            found.append(Fault("--nproc", f"{self.nproc} processes cannot run", allowed="at least 1"))
        if self.nnodes < 1:
            found.append(Fault("--nnodes", f"{self.nnodes} machines cannot run", allowed="at least 1"))
        elif not 0 <= self.node_rank < self.nnodes:
            found.append(Fault("--node-rank", f"{self.node_rank} is no rank", allowed=f"0 to {self.nnodes - 1}"))
        if self.nnodes > 1 and not self.rdzv_endpoint:
            hint = "give the address and a free port of machine 0: --rdzv-endpoint host:29500"
            found.append(Fault("--rdzv-endpoint", "is needed with --nnodes above 1", hint=hint))
        if inside_torchrun() and self != Launch():
            hint = "leave --nproc and its siblings away, or start `hp train` itself without torchrun"
            found.append(Fault("--nproc", "is refused inside torchrun, which has started the ranks", hint=hint))
        return found


def inside_torchrun() -> bool:
    """Whether torchrun, or a launcher like it, has started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_ranks(launch: Launch, arguments: list[str], meeting_seconds: int = MEETING_SECONDS) -> int:
    """Run `python -m hp_trainer.train <arguments>` on every rank of this machine; returns the exit code.

    SIGTERM, SIGINT and SIGUSR1 are forwarded to the ranks, which save and end; a second SIGINT ends at once.

    Args:
        meeting_seconds: how long to wait for the other machines.

    Raises:
        ConfigError: the launch itself is impossible, or the machines did not meet.
    """
    if found := launch.faults():
        raise ConfigError(found)
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    # It would name the rank that ended first, which often only waited for the one that is to blame.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="hp-launch-") as folder:
        forwarder = _Forwarder(Path(folder))
        os.environ[LAUNCHER_FOLDER] = folder
        previous = {number: signal.signal(number, forwarder) for number in STOP_SIGNALS}
        try:
            elastic_launch(_elastic_config(launch, meeting_seconds), sys.executable)(
                "-u", "-m", "hp_trainer.train", *arguments
            )
            return 0
        except ChildFailedError as error:
            if forwarder.forced:
                if not any(record.status is Status.QUIET for record in _records(Path(folder)).values()):
                    print("hp train: ended at once, nothing was saved since the last checkpoint", file=sys.stderr)
                return 130
            return _tell_end(error, _records(Path(folder)))
        except (RendezvousError, DistError, TimeoutError) as error:
            raise ConfigError(_meeting_fault(launch, error)) from error
        finally:
            os.environ.pop(LAUNCHER_FOLDER, None)
            for number, handler in previous.items():
                signal.signal(number, handler)


def _records(folder: Path) -> dict[int, Record]:
    """What the ranks of this machine were doing last, by pid."""
    found = {}
    for pid in _pids(folder):
        record = RecordFile(folder / str(pid)).read()
        found[pid] = record
    return found


def _pids(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


def _tell_end(error: Any, records: dict[int, Record]) -> int:
    """Say which rank ended the run, unless a rank has said so; returns the exit code."""
    by_status: dict[Status, list[tuple[int, Any]]] = {status: [] for status in Status}
    for rank, failure in error.failures.items():
        record = records.get(failure.pid)
        by_status[Status.RUNNING if record is None else record.status].append((rank, failure))
    if told := by_status[Status.TOLD]:
        return max(told[0][1].exitcode, 1)
    if any(record.status is Status.TOLD for record in records.values()):
        return 1
    # Those that end because of another rank may have been noticed before it; those that the agent ended come last.
    silent = sorted(
        by_status[Status.RUNNING], key=lambda pair: (pair[1].exitcode == -signal.SIGTERM, pair[1].timestamp)
    )
    rank, failure = silent[0] if silent else error.get_first_failure()
    record = records.get(failure.pid)
    who = record.who if record else f"rank {rank} (pid {failure.pid})"
    where = f"in {record.where}" if record else "before it had started"
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        print(f"hp train: {who} was ended by {name} {where}; the run ends on all ranks", file=sys.stderr)
        if -failure.exitcode == signal.SIGKILL:
            print("    the system sends SIGKILL when memory runs out: `dmesg` tells", file=sys.stderr)
        return 1
    if record is None or record.status is Status.RUNNING:
        said = f"ended without a word (exit code {failure.exitcode})"
        print(f"hp train: {who} {said} {where}; the run ends on all ranks", file=sys.stderr)
    return failure.exitcode


def _meeting_fault(launch: Launch, error: Exception) -> Fault:
    """The machines have not met, or the port is taken."""
    where = launch.rdzv_endpoint or "127.0.0.1"
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return Fault("--rdzv-endpoint", f"{where}: the port is in use by another program", hint="choose another port")
    hint = "it is machine 0 as the others call it; is `hp train` running on each, with the same endpoint?"
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return Fault("--rdzv-endpoint", f"the {launch.nnodes} machines did not meet at {where} ({why})", hint=hint)


def _elastic_config(launch: Launch, meeting_seconds: int) -> Any:
    from torch.distributed.launcher.api import LaunchConfig

    one_machine = launch.nnodes == 1
    return LaunchConfig(
        min_nodes=launch.nnodes,
        max_nodes=launch.nnodes,
        nproc_per_node=launch.nproc,
        run_id=f"hp-{os.getpid()}" if one_machine else "hp",
        rdzv_backend="c10d" if one_machine else "static",
        rdzv_endpoint="127.0.0.1:0" if one_machine else str(launch.rdzv_endpoint),
        rdzv_configs={} if one_machine else {"rank": launch.node_rank, "timeout": meeting_seconds},
        local_addr="127.0.0.1" if one_machine else None,
        max_restarts=0,
        # Ours forwards to the ranks, which save before they end; the agent's would stop them after 30 s.
        signals_to_handle="SIGHUP",
        shutdown_timeout=SHUTDOWN_SECONDS,
    )


class _Forwarder:
    """A signal handler of the launching process: hands the signal on to the ranks that have said their pid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.interrupts = 0

    @property
    def forced(self) -> bool:
        return self.interrupts > 1

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += number == signal.SIGINT
        pids = _pids(self.folder)
        if not pids:
            raise SystemExit(f"hp train: {signal.Signals(number).name} before the ranks had started; nothing was run")
        (self.folder / STOPPING).touch()
        # A second Ctrl-C ends at once. The first one reaches the ranks from the terminal as well: they count
        # signals that come within a second as one.
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL if self.forced else number)
            except ProcessLookupError:
                continue  # that rank has ended by itself


def announce_rank() -> None:
    """Called by a rank as it starts: makes it known to the launcher, and ends it when its parent dies."""
    folder = os.environ.get(LAUNCHER_FOLDER)
    if folder:
        activity.publish(Path(folder) / str(os.getpid()))
    if inside_torchrun():
        parent = os.getppid()
        threading.Thread(target=_end_with, args=(parent,), name="hp-parent-watch", daemon=True).start()


def _end_with(parent: int) -> None:
    """A launcher that was killed cannot stop its ranks; left alone they would train on and hold the run folder."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.write(2, f"hp train: the launcher (pid {parent}) is gone; this rank ends\n".encode())
    os._exit(1)
