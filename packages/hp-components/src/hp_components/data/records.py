"""Records in files: JSON lines, JSON and Parquet.

In: a `TextFile` of one of these kinds. Out: `Record`s, each an object with the place where it stands; and the text in
a record. What is no record goes into a `FaultList`, and reading goes on behind it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hp_components.data.extras import require
from hp_components.data.formats import FaultList, TextFile, bom_length, open_bytes, readable, undecodable
from hp_components.data.json_stream import read_json
from hp_protocols.errors import Fault, nearest

__all__ = ["RECORD_READERS", "Record", "json_type", "lone_surrogate", "text_of"]

# Rows of a Parquet file that are unpacked at once.
PARQUET_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Record:
    """An object of a file. `where` is its place (file:line, or file and row)."""

    where: str
    value: Mapping[str, Any]


def text_of(record: Record, text_key: str, faults: FaultList) -> str | None:
    """The text of a record, or None where it has none (which is then among the faults)."""
    value = record.value
    if text_key not in value:
        faults.add(no_key(record, text_key, "text_key"))
    elif not isinstance(text := value[text_key], str):
        faults.add(Fault(record.where, f"{text_key!r} is a {json_type(text)}", allowed="a string"))
    elif (bad := lone_surrogate(text)) is not None:
        code = f"\\u{ord(text[bad]):04x}"
        faults.add(Fault(record.where, f"{text_key!r} has half a surrogate pair ({code}) at character {bad}"))
    else:
        return text
    return None


def no_key(record: Record, key: str, option: str) -> Fault:
    """The fault of a record without the field `key`, with the field that may be meant."""
    strings = [name for name, value in record.value.items() if isinstance(value, str)]
    close = nearest(key, record.value) or (strings[0] if len(strings) == 1 else None)
    keys = ", ".join(repr(name) for name in list(record.value)[:8]) or "none"
    return Fault(
        record.where,
        f"has no field {key!r} (its fields: {keys})",
        hint=f"--dataloader.{option} {close}" if close else f"--dataloader.{option} NAME",
    )


def lone_surrogate(text: str) -> int | None:
    """Where `text` has half a surrogate pair, which JSON can write and no text can hold."""
    if text.isascii():
        return None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def json_type(value: object) -> str:
    """What JSON calls the type of a value."""
    names = {
        dict: "object",
        list: "array",
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


def _read_jsonl(file: TextFile, faults: FaultList) -> Iterator[Record]:
    """One record per line that is not blank. Lines end at a line feed only: U+2028 and its like are text."""
    offset = 0
    with readable(file.path), open_bytes(file) as handle:
        for number, raw in enumerate(handle, start=1):
            start, offset = offset, offset + len(raw)
            bom = bom_length(raw) if number == 1 else 0
            line = raw[bom:].rstrip(b"\r\n")
            if not line.strip():
                continue
            where = f"{file.path}:{number}"
            value = _parse_line(line, where, start + bom, faults)
            if isinstance(value, dict):
                yield Record(where, value)


def _parse_line(raw: bytes, where: str, offset: int, faults: FaultList) -> object:
    """The object of a line; None where there is none."""
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        faults.add(undecodable(where, raw, error.start, offset + error.start))
    except json.JSONDecodeError as error:
        spread = raw.strip() in (b"[", b"{")
        hint = "every line of a .jsonl file is an object of its own; this one spreads over lines" if spread else None
        faults.add(Fault(where, f"is not JSON: {error.msg} at column {error.colno}", hint=hint))
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        faults.add(Fault(where, f"cannot be read as JSON: {error}"))
    else:
        if isinstance(value, dict):
            return value
        faults.add(_no_object(where, value))
    return None


def _no_object(where: str, value: object) -> Fault:
    return Fault(where, f"is a JSON {json_type(value)}", allowed='an object like {"text": "…"}')


def _read_json(file: TextFile, faults: FaultList) -> Iterator[Record]:
    """The elements of an array, or objects one after the other."""
    for line, value in read_json(file, faults):
        where = f"{file.path}:{line}"
        if isinstance(value, dict):
            yield Record(where, value)
        else:
            faults.add(_no_object(where, value))


def _read_parquet(file: TextFile, faults: FaultList) -> Iterator[Record]:
    """The rows of a Parquet file, in their order."""
    parquet = require("pyarrow.parquet", "parquet", "reading .parquet files")
    arrow = require("pyarrow", "parquet", "reading .parquet files")
    number = 0
    with readable(file.path):
        try:
            # A Parquet file is read from its end, which a gzip stream does not offer.
            source = io.BytesIO(open_bytes(file).read()) if file.gzipped else file.path
            with parquet.ParquetFile(source) as table:
                for batch in table.iter_batches(batch_size=PARQUET_ROWS):
                    for value in batch.to_pylist():
                        number += 1
                        yield Record(f"{file.path}: row {number}", value)
        except arrow.ArrowInvalid as error:
            place = f" behind row {number}" if number else ""
            faults.add(Fault(str(file.path), f"cannot be read as Parquet{place}: {error}"))


RECORD_READERS: dict[str, Callable[[TextFile, FaultList], Iterator[Record]]] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "parquet": _read_parquet,
}
