"""Plain text in files: how a file is opened, decoded and, where something in it is bad, reported.

In: a `TextFile`. Out: its text as `Part`s of bounded size, so that a file of any size can be read; what cannot be read
goes into a `FaultList`, with file and line (or byte), and reading goes on behind it.
"""

from __future__ import annotations

import codecs
import gzip
import io
import logging
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple, TypeVar

from hp_protocols.errors import ConfigError, Fault

__all__ = [
    "TEXT_READERS",
    "BadLinePolicy",
    "FaultList",
    "Part",
    "Skipped",
    "TextFile",
    "bom_length",
    "open_bytes",
    "readable",
    "undecodable",
    "whole_gzip",
]

log = logging.getLogger(__name__)

MAX_LISTED_FAULTS = 10
CHUNK_BYTES = 4 * 2**20

BadLinePolicy = Literal["error", "skip"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file of a corpus. `kind` says how to read it: "txt", "py", "jsonl", "json" or "parquet"."""

    path: Path
    name: str
    kind: str
    size: int
    mtime_ns: int
    gzipped: bool = False


class Part(NamedTuple):
    """A stretch of a document; `first` and `last` say where the document begins and ends."""

    text: str
    first: bool = True
    last: bool = True


@dataclass(frozen=True, slots=True)
class Skipped:
    """Bad places that were left out: how many, and the first ten in words."""

    total: int = 0
    first: tuple[str, ...] = ()

    def __str__(self) -> str:
        more = f"\n  … and {self.total - len(self.first)} more" if self.total > len(self.first) else ""
        return f"{self.total} bad places skipped:\n  " + "\n  ".join(self.first) + more


class FaultList:
    """Collects bad places: the first ten word for word, the rest as a number. `policy` says what becomes of them."""

    def __init__(self, where: str, policy: BadLinePolicy = "error") -> None:
        self.where, self.policy, self.listed, self.total = where, policy, list[Fault](), 0

    def add(self, fault: Fault) -> None:
        self.total += 1
        if len(self.listed) < MAX_LISTED_FAULTS:
            self.listed.append(fault)

    def extend(self, others: FaultList) -> None:
        """Take over what another list has found."""
        self.total += others.total
        self.listed = [*self.listed, *others.listed][:MAX_LISTED_FAULTS]

    def raise_if_any(self) -> None:
        """Raise ConfigError with all bad places, unless the policy is to skip them."""
        if self.policy == "skip" or not self.listed:
            return
        faults = list(self.listed)
        if self.total > len(faults):
            faults.append(Fault(self.where, f"{self.total} bad places in all; the first {len(faults)} are listed"))
        raise ConfigError(faults)

    @property
    def skipped(self) -> Skipped:
        return Skipped(self.total, tuple(str(fault) for fault in self.listed))


class readable:
    """Turn a file that cannot be read into a fault that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise ConfigError(Fault(str(self.path), f"cannot be read: {error.strerror or error}")) from error


def open_bytes(file: TextFile) -> IO[bytes]:
    """The content of a file, unpacked if it is a gzip file."""
    if file.gzipped:
        return gzip.open(file.path, "rb")  # type: ignore[return-value]  # GzipFile is what IO[bytes] asks for
    return open(file.path, "rb")


def whole_gzip(file: TextFile, faults: FaultList, items: Iterable[T]) -> Iterator[T]:
    """`items`, read from `file`; a gzip file that is damaged or cut short is a bad place."""
    try:
        yield from items
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        hint = "it may be a copy that was cut short; gzip -t tests it" if file.gzipped else None
        faults.add(Fault(str(file.path), f"is damaged as a gzip file: {error}", hint=hint))


def bom_length(raw: bytes) -> int:
    return 3 if raw.startswith(codecs.BOM_UTF8) else 0


def undecodable(where: str, raw: bytes, index: int, offset: int) -> Fault:
    """The fault of byte `index` in `raw`, which lies at `offset` in its file."""
    hint = "save it as UTF-8, for example: iconv -f LATIN1 -t UTF-8"
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        hint = "it looks like UTF-16: iconv -f UTF-16 -t UTF-8"
    if raw.startswith(b"\x1f\x8b"):
        hint = "it looks like a gzip file: name it so that it ends in .gz"
    return Fault(where, f"byte 0x{raw[index]:02x} at byte offset {offset} is not UTF-8", hint=hint)


def _read_text(file: TextFile, faults: FaultList) -> Iterator[Part]:
    """The whole file as one document; a byte order mark goes, CRLF becomes LF."""
    with readable(file.path):
        # First all of it is checked, so that a file with a bad byte is left out whole and not from there on.
        if (fault := _first_bad_byte(file)) is not None:
            faults.add(fault)
            return
        waiting, first = "", True
        for text in _decoded(file):
            if waiting:
                yield Part(waiting, first, False)
                first = False
            waiting = text
        yield Part(waiting, first, True)


def _first_bad_byte(file: TextFile) -> Fault | None:
    decoder, done = codecs.getincrementaldecoder("utf-8-sig")(), 0
    with open_bytes(file) as handle:
        while True:
            chunk = handle.read(CHUNK_BYTES)
            done += len(chunk)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                # The decoder has the bytes of a character that an earlier chunk began before this one.
                offset = done - len(error.object) + error.start
                start = error.object if done <= CHUNK_BYTES else b""
                bad = error.object[error.start : error.start + 1]
                return undecodable(str(file.path), start or bad, error.start if start else 0, offset)
            if not chunk:
                return None


def _decoded(file: TextFile) -> Iterator[str]:
    """Stretches of text, none of them empty."""
    decoder, held = codecs.getincrementaldecoder("utf-8-sig")(), ""
    with open_bytes(file) as handle:
        while chunk := handle.read(CHUNK_BYTES):
            text = held + decoder.decode(chunk)
            # The line feed of a CRLF may come with the next chunk.
            held = "\r" if text.endswith("\r") else ""
            if text := text.removesuffix("\r").replace("\r\n", "\n"):
                yield text
    if held:
        yield held


def _read_python(file: TextFile, faults: FaultList) -> Iterator[Part]:
    """A Python source, in the encoding that it declares."""
    with readable(file.path), open_bytes(file) as handle:
        raw = handle.read()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        faults.add(Fault(str(file.path), f"is no Python source: {error}"))
        return
    yield Part(text.replace("\r\n", "\n"))


TEXT_READERS: dict[str, Callable[[TextFile, FaultList], Iterator[Part]]] = {"txt": _read_text, "py": _read_python}
