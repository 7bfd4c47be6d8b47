"""What this process is doing right now, kept where others can read it after the process is gone.

In: `activity.now("forward and backward")` at every phase, well below a microsecond. Out: 256 bytes, in memory and, once
`publish` has been called, in a file that a launcher or a neighbour has mapped: a `Record`.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

__all__ = ["LAUNCHER_FOLDER", "Activity", "Record", "RecordFile", "Status", "activity", "describe", "name_of"]

LAUNCHER_FOLDER = "HP_LAUNCH_FOLDER"
"""Environment variable: the folder where `hp train --nproc` reads what its ranks were doing."""

SIZE = 256
_HEAD = struct.Struct("<iiiiq")  # magic, pid, rank, status, step
_STATUS, _STEP = struct.Struct("<i"), struct.Struct("<q")
_STATUS_AT, _STEP_AT = 12, 16
_DOING, _HOST = slice(24, 144), slice(144, SIZE)
_MAGIC = 0x68705F31


class Status(IntEnum):
    """How far a rank is with its end."""

    RUNNING = 0
    FINISHED = 1
    TOLD = 2
    """It has said on standard error why the run ends."""
    QUIET = 3
    """It ends because of another rank, which is told elsewhere."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a rank was doing when its record was read. `step` is 0 outside of training."""

    pid: int
    rank: int
    host: str
    status: Status
    step: int
    doing: str

    @property
    def who(self) -> str:
        return name_of(self.rank, self.host, self.pid)

    @property
    def where(self) -> str:
        return describe(self.step, self.doing)


def name_of(rank: int, host: str, pid: int) -> str:
    """A rank, as a person finds its process."""
    return f"rank {rank} (host {host}, pid {pid})"


def describe(step: int, doing: str) -> str:
    """`step 7, forward and backward`; before and after training only what is done."""
    return f"step {step}, {doing}" if step else doing


class Activity:
    """This process's own record. Every process has one: `activity`."""

    def __init__(self) -> None:
        self.step = 0
        self.doing = "starting"
        self.since = time.monotonic()
        self.rank = int(os.environ.get("RANK", "0"))
        self._map: mmap.mmap | None = None
        self.file: Path | None = None

    def now(self, doing: str) -> None:
        """The main thread begins something else."""
        self.doing = doing
        self.since = time.monotonic()
        if self._map is not None:
            self._map[_DOING] = _padded(doing)

    def at_step(self, step: int) -> None:
        """The main thread begins a step; 0 is outside of training."""
        self.step = step
        if self._map is not None:
            _STEP.pack_into(self._map, _STEP_AT, step)

    def end(self, status: Status) -> None:
        """This process is about to end."""
        if self._map is not None:
            _STATUS.pack_into(self._map, _STATUS_AT, status)

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Something within what is done; afterwards that goes on. After an error it stays, to be reported."""
        before = self.doing
        self.now(doing)
        yield
        self.now(before)

    @property
    def where(self) -> str:
        return describe(self.step, self.doing)

    def publish(self, path: Path) -> None:
        """Keep the record in this file from now on."""
        content = bytearray(SIZE)
        _HEAD.pack_into(content, 0, _MAGIC, os.getpid(), self.rank, Status.RUNNING, self.step)
        content[_DOING] = _padded(self.doing)
        host = socket.gethostname().encode()[: _HOST.stop - _HOST.start]
        content[_HOST] = host.ljust(_HOST.stop - _HOST.start, b"\0")
        # Under its name only when it is whole: a launcher reads the folder at any time.
        partial = path.with_name(f".{path.name}")
        partial.write_bytes(content)
        with partial.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        os.replace(partial, path)
        self.file = path

    def withdraw(self) -> None:
        """Remove the file, unless a launcher holds it; those that have mapped it go on reading."""
        if self.file is not None and LAUNCHER_FOLDER not in os.environ:
            self.file.unlink(missing_ok=True)
            self.file = None


class RecordFile:
    """Another process's record, which stays readable when that process and the name of the file are gone."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError, ValueError: it is not there, or no record.
        """
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
        self.read()

    def read(self) -> Record:
        magic, pid, rank, status, step = _HEAD.unpack_from(self._map, 0)
        if magic != _MAGIC:
            raise ValueError("is no record of a rank")
        doing, host = (bytes(self._map[part]).rstrip(b"\0").decode(errors="replace") for part in (_DOING, _HOST))
        return Record(pid, rank, host, Status(status), step, doing)


@functools.lru_cache(maxsize=256)
def _padded(doing: str) -> bytes:
    size = _DOING.stop - _DOING.start
    return doing.encode()[:size].ljust(size, b"\0")


activity = Activity()
