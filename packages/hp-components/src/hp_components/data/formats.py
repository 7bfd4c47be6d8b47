"""What is in a file of text: one reader per format.

In: a file and the name of the field that holds text. Out: its documents, one after the other; what cannot be read goes
into a `FaultList`, with file and line (or byte), and reading goes on behind it.
"""

from __future__ import annotations

import io
import json
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hp_protocols.errors import ConfigError, Fault, nearest

__all__ = ["READERS", "FaultList", "TextFile", "readable"]

MAX_LISTED_FAULTS = 10


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file of a corpus. `kind` says how to read it: "txt", "jsonl" or "py"."""

    path: Path
    name: str
    kind: str
    size: int
    mtime_ns: int


class FaultList:
    """Collects bad places: the first ten word for word, the rest as a number."""

    def __init__(self, where: str) -> None:
        self.where, self.listed, self.total = where, list[Fault](), 0

    def add(self, fault: Fault) -> None:
        self.total += 1
        if len(self.listed) < MAX_LISTED_FAULTS:
            self.listed.append(fault)

    def raise_if_any(self) -> None:
        if self.total > len(self.listed):
            self.listed.append(
                Fault(self.where, f"{self.total} bad places in all; the first {MAX_LISTED_FAULTS} are listed")
            )
        if self.listed:
            raise ConfigError(self.listed)


class readable:
    """Turn a file that cannot be read into a fault that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise ConfigError(Fault(str(self.path), f"cannot be read: {error.strerror or error}")) from error


def _read_text(file: TextFile, text_key: str, faults: FaultList) -> Iterator[str]:
    """The whole file as one document; a byte order mark goes, CRLF becomes LF."""
    with readable(file.path):
        raw = file.path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        faults.add(_undecodable(str(file.path), raw, error.start + _bom(raw), error.start + _bom(raw)))
        return
    yield text.replace("\r\n", "\n")


def _read_python(file: TextFile, text_key: str, faults: FaultList) -> Iterator[str]:
    """A Python source, in the encoding that it declares."""
    with readable(file.path):
        raw = file.path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        faults.add(Fault(str(file.path), f"is no Python source: {error}"))
        return
    yield text.replace("\r\n", "\n")


def _bom(raw: bytes) -> int:
    return 3 if raw.startswith(b"\xef\xbb\xbf") else 0


def _undecodable(where: str, raw: bytes, index: int, offset: int) -> Fault:
    hint = "save it as UTF-8, for example: iconv -f LATIN1 -t UTF-8"
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        hint = "it looks like UTF-16: iconv -f UTF-16 -t UTF-8"
    return Fault(where, f"byte 0x{raw[index]:02x} at byte offset {offset} is not UTF-8", hint=hint)


def _read_jsonl(file: TextFile, text_key: str, faults: FaultList) -> Iterator[str]:
    """One document per line that is not blank. Lines end at a line feed only: U+2028 and its like are text."""
    offset = 0
    with readable(file.path), open(file.path, "rb") as handle:
        for number, raw in enumerate(handle, start=1):
            start, offset = offset, offset + len(raw)
            line = (raw[_bom(raw) :] if number == 1 else raw).rstrip(b"\r\n")
            if not line.strip():
                continue
            document = _parse_line(
                line, f"{file.path}:{number}", start + (_bom(raw) if number == 1 else 0), text_key, faults
            )
            if document is not None:
                yield document


def _parse_line(raw: bytes, where: str, offset: int, text_key: str, faults: FaultList) -> str | None:
    try:
        record = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        faults.add(_undecodable(where, raw, error.start, offset + error.start))
        return None
    except json.JSONDecodeError as error:
        spread = raw.strip() in (b"[", b"{")
        hint = "every line of a .jsonl file is an object of its own; this one spreads over lines" if spread else None
        faults.add(Fault(where, f"is not JSON: {error.msg} at column {error.colno}", hint=hint))
        return None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        faults.add(Fault(where, f"cannot be read as JSON: {error}"))
        return None
    if not isinstance(record, dict):
        faults.add(Fault(where, f"is a JSON {_json_type(record)}", allowed=f'an object like {{"{text_key}": "…"}}'))
    elif text_key not in record:
        faults.add(_no_text_key(where, record, text_key))
    elif not isinstance(record[text_key], str):
        faults.add(Fault(where, f"{text_key!r} is a {_json_type(record[text_key])}", allowed="a string"))
    elif b"\\u" in raw and (bad := _lone_surrogate(record[text_key])) is not None:
        faults.add(
            Fault(
                where,
                f"{text_key!r} has half a surrogate pair (\\u{ord(record[text_key][bad]):04x}) at character {bad}",
            )
        )
    else:
        return record[text_key]
    return None


def _no_text_key(where: str, record: dict[str, object], text_key: str) -> Fault:
    strings = [key for key, value in record.items() if isinstance(value, str)]
    close = nearest(text_key, record) or (strings[0] if len(strings) == 1 else None)
    keys = ", ".join(repr(key) for key in list(record)[:8]) or "none"
    return Fault(
        where,
        f"has no field {text_key!r} (its fields: {keys})",
        hint=f"--dataloader.text_key {close}" if close else "--dataloader.text_key NAME",
    )


def _lone_surrogate(text: str) -> int | None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def _json_type(value: object) -> str:
    names = {
        dict: "object",
        list: "array",
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
        type(None): "null",
    }
    return names[type(value)]


READERS: dict[str, Callable[[TextFile, str, FaultList], Iterator[str]]] = {
    "txt": _read_text,
    "py": _read_python,
    "jsonl": _read_jsonl,
}
