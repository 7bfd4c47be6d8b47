"""The file `metrics.jsonl`: one JSON object per line, whole lines only, cut back to the resumed step.

In: records as dicts. Out: lines in the file. A full disk does not stop training: what could not be written is
kept and written with the next record.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["JsonlWriter", "read_records"]

logger = logging.getLogger(__name__)


def read_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of a `metrics.jsonl`, in order; lines that are no JSON object are skipped, and a log line says so."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            record = _parsed(line)
            if record is None:
                logger.warning("%s:%d: skipped, not a JSON object (%d bytes)", path, number, len(line))
            else:
                yield record


class JsonlWriter:
    """Appends records to one file, each durable against a crash of this process as soon as `write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._size = 0  # bytes of whole lines in the file
        self._pending: list[bytes] = []

    def open(self, step: int) -> int:
        """Open the file to go on after `step`; later records are dropped, in one atomic replacement.

        Returns:
            The number of lines dropped.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        dropped = self._cut(step) if self.path.exists() else 0
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size
        return dropped

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        if self._fd is None:
            raise RuntimeError(f"{self.path} is not open: call begin() first")
        self._pending.append(json.dumps(record, allow_nan=False, ensure_ascii=False).encode() + b"\n")
        data = b"".join(self._pending)
        try:
            written = os.write(self._fd, data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes written")
        except OSError as error:
            # Half a line would make the file unreadable.
            os.ftruncate(self._fd, self._size)
            logger.error("%s: %d records not written yet: %s", self.path, len(self._pending), error)
            return
        self._size += len(data)
        self._pending.clear()

    def close(self) -> None:
        """Close the file; records that never found room are given up, and a log line says how many."""
        if self._fd is None:
            return
        if self._pending:
            logger.error("%s: %d records could not be written", self.path, len(self._pending))
        os.close(self._fd)
        self._fd = None

    def _cut(self, step: int) -> int:
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _belongs(line, step)]
        if len(kept) == len(lines):
            return 0
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with temporary.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        return len(lines) - len(kept)


def _belongs(line: bytes, step: int) -> bool:
    record = _parsed(line)
    if record is None or not line.endswith(b"\n"):
        return False
    number = record.get("step", 0)
    return isinstance(number, int) and number <= step


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
