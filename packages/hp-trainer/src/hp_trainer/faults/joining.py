"""The ranks find each other: every one says who it is, and those that do not come are named.

In: the launcher's variables. Out: `Joined`: all members, and a store that all of them reach.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import tempfile
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from hp_protocols.errors import ConfigError, Fault
from hp_trainer.faults.activity import RecordFile, Status, activity, name_of
from hp_trainer.faults.failure import RankFailure

__all__ = ["Joined", "Member", "join"]

LIMIT = "comm.init_timeout_seconds"
HINT = "start the ranks with `hp train --nproc` or torchrun, which set it"
_incarnations = itertools.count()


@dataclass(frozen=True, slots=True)
class Member:
    """A rank's process. `record`: the file with what it does, on its machine; `launcher`: who started it."""

    rank: int
    host: str
    pid: int
    record: str
    launcher: str
    world_size: int

    @property
    def who(self) -> str:
        return name_of(self.rank, self.host, self.pid)


@dataclass(frozen=True, slots=True)
class Joined:
    """All ranks, by number. `store` has keys of this meeting only; `server` keeps its process listening."""

    rank: int
    members: list[Member]
    store: dist.PrefixStore
    server: dist.TCPStore

    @property
    def own(self) -> Member:
        return self.members[self.rank]

    def local_records(self) -> dict[int, RecordFile]:
        """The records of the other ranks on this machine, as far as they can be read."""
        found = {}
        for member in self.members:
            if member.host == self.own.host and member.rank != self.rank:
                try:
                    found[member.rank] = RecordFile(Path(member.record))
                except (OSError, ValueError):
                    continue  # another container of the same name: as good as another machine
        return found


def join(timeout_seconds: float) -> Joined:
    """Meet the other ranks.

    Raises:
        ConfigError: the launcher's variables make no sense, or their address cannot be used.
        RankFailure: some ranks have not come in time.
    """
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ConfigError(Fault("RANK", f"{rank} is no rank of {world_size} (WORLD_SIZE)", f"0 to {world_size - 1}"))
    activity.rank = rank
    activity.now("meeting the other ranks")
    timeout = timedelta(seconds=timeout_seconds)
    server = _connect(rank, timeout)
    # A process may join anew after it has left; a launcher that starts ranks again keeps the store.
    meeting = f"hp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_incarnations)}"
    store = dist.PrefixStore(meeting, server)
    own = Member(rank, socket.gethostname(), os.getpid(), str(_record_file()), _launcher(), world_size)
    text = json.dumps(asdict(own))
    if (there := store.compare_set(f"member/{rank}", "", text).decode()) != text:
        other = Member(**json.loads(there))
        raise ConfigError(Fault("RANK", f"{rank} was started twice: pid {own.pid} on {own.host}, and {other.who}"))
    keys = [f"member/{number}" for number in range(world_size)]
    try:
        store.wait(keys, timeout)
    except dist.DistError as error:
        raise RankFailure(_tell_missing(store, keys, timeout_seconds, own)) from error
    members = [Member(**json.loads(value)) for value in store.multi_get(keys)]
    if wrong := [member for member in members if member.world_size != world_size]:
        said = f"{wrong[0].who} was started with {wrong[0].world_size}, rank {rank} with {world_size}"
        raise ConfigError(Fault("WORLD_SIZE", f"is not the same on every rank: {said}"))
    return Joined(rank, members, store, server)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise ConfigError(Fault(name, f"{text!r} is no number", hint=HINT)) from None


def _connect(rank: int, timeout: timedelta) -> dist.TCPStore:
    """The store at MASTER_ADDR:MASTER_PORT, which the launcher holds, or rank 0."""
    host, port = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT")
    if not host:
        raise ConfigError(Fault("MASTER_ADDR", "is not set", hint=HINT))
    held_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        # Whoever is missing is named by `join`, and not waited for here.
        return dist.TCPStore(
            host, port, None, rank == 0 and not held_by_launcher, timeout, wait_for_workers=False, multi_tenant=True
        )
    except (dist.DistError, ValueError) as error:
        raise ConfigError(_address_fault(host, port, timeout, error)) from error


def _address_fault(host: str, port: int, timeout: timedelta, error: Exception) -> Fault:
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        problem = f"{port} on {host} is in use by another program"
        return Fault("MASTER_PORT", problem, hint="choose another one, the same for all ranks")
    problem = f"{host}:{port} (MASTER_PORT) could not be reached within {timeout.total_seconds():g} s ({LIMIT})"
    hint = "it is the machine of rank 0, as the other machines call it, and a port that no firewall closes"
    return Fault("MASTER_ADDR", problem, hint=hint)


def _tell_missing(store: dist.Store, keys: list[str], seconds: float, own: Member) -> str:
    """Name the ranks that have not come: on every machine the first of those that have. Returns the message."""
    present = {number: key for number, key in enumerate(keys) if store.check([key])}
    missing = [number for number in range(len(keys)) if number not in present]
    text = (
        f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {len(keys)} did not come within "
        f"{seconds:g} s ({LIMIT}); {own.who} has waited. Were all {len(keys)} processes started (WORLD_SIZE), and do "
        "they reach this machine?"
    )
    neighbours = [
        number for number, key in present.items() if Member(**json.loads(store.get(key))).launcher == own.launcher
    ]
    if own.rank == min(neighbours):
        os.write(2, f"hp train: {text}\n".encode())
        activity.end(Status.TOLD)
    else:
        activity.end(Status.QUIET)
    return text


def _record_file() -> Path:
    """Where this process's record is: with the launcher's, or in a file that `activity.withdraw` removes."""
    if activity.file is None:
        handle, name = tempfile.mkstemp(prefix="hp-rank-")
        os.close(handle)
        activity.publish(Path(name))
    assert activity.file is not None
    return activity.file


def _launcher() -> str:
    return f"{socket.gethostname()}/{os.getppid()}"
