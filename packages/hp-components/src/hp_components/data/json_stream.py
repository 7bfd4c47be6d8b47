"""A .json file value by value, so that its size does not matter.

In: a `TextFile` that holds an array, or values one after the other (also spread over lines). Out: (line, value) pairs;
what is not JSON goes into a `FaultList`.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO

from hp_components.data.formats import CHUNK_BYTES, FaultList, TextFile, open_bytes, readable, undecodable
from hp_protocols.errors import Fault

__all__ = ["read_json"]

_BLANK = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
# What json says of a string that goes on behind the end of the text, at the place where the string begins. Its other
# complaints about a text that just ends are about the end of it.
_UNFINISHED = "Unterminated string"


class _Broken(Exception):
    """Not JSON from here on; `fault` says why."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


class _Text:
    """The text of a file from the current place on, with the number of its line."""

    def __init__(self, file: TextFile, handle: IO[bytes]) -> None:
        self.file, self._handle = file, handle
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._bytes_read = 0
        self.buffer, self.place, self.line, self.ended = "", 0, 1, False

    @property
    def where(self) -> str:
        return f"{self.file.path}:{self.line}"

    def grow(self) -> None:
        """Read on: a chunk, or as much as there is already, so that a long value costs linear time."""
        chunk = self._handle.read(max(CHUNK_BYTES, len(self.buffer) - self.place))
        self._bytes_read += len(chunk)
        try:
            text = self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            offset = self._bytes_read - len(error.object) + error.start
            fault = undecodable(str(self.file.path), error.object, error.start, offset)
            raise _Broken(fault) from error
        self.buffer, self.place, self.ended = self.buffer[self.place :] + text, 0, not chunk

    def advance(self, end: int) -> None:
        self.line += self.buffer.count("\n", self.place, end)
        self.place = end

    def skip_blank(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            blank = _BLANK.match(self.buffer, self.place)
            self.advance(blank.end() if blank else self.place)
            if self.place < len(self.buffer):
                return self.buffer[self.place]
            if self.ended:
                return ""
            self.grow()

    def skip_line(self) -> None:
        """To the next line that begins with an object, or the end."""
        while True:
            end = self.buffer.find("\n{", self.place)
            if end >= 0:
                self.advance(end + 1)
                return
            self.advance(max(self.place, len(self.buffer) - 1))
            if self.ended:
                self.advance(len(self.buffer))
                return
            self.grow()

    def value(self) -> object:
        """The value that begins here."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.buffer, self.place)
            except json.JSONDecodeError as error:
                near_end = error.pos >= len(self.buffer) - 16 or error.msg.startswith(_UNFINISHED)
                if near_end and not self.ended:
                    self.grow()
                    continue
                line = self.line + self.buffer.count("\n", self.place, error.pos)
                column = error.pos - self.buffer.rfind("\n", 0, error.pos)
                fault = Fault(f"{self.file.path}:{line}", f"is not JSON: {error.msg} at column {column}")
                raise _Broken(fault) from error
            except (ValueError, RecursionError) as error:
                raise _Broken(Fault(self.where, f"cannot be read as JSON: {error}")) from error
            if end == len(self.buffer) and not self.ended:
                self.grow()  # a number may go on
                continue
            self.advance(end)
            return value


def read_json(file: TextFile, faults: FaultList) -> Iterator[tuple[int, object]]:
    """(line, value) for each element of the array, or for each value that stands by itself."""
    with readable(file.path), open_bytes(file) as handle:
        text = _Text(file, handle)
        try:
            if text.skip_blank() == "[":
                yield from _elements(text)
            else:
                yield from _values(text, faults)
        except _Broken as broken:
            faults.add(broken.fault)


def _values(text: _Text, faults: FaultList) -> Iterator[tuple[int, object]]:
    """Values one after the other; behind a bad one it goes on at the next line that begins with an object."""
    while text.skip_blank():
        line = text.line
        try:
            value = text.value()
        except _Broken as broken:
            faults.add(broken.fault)
            text.skip_line()
        else:
            yield line, value


def _elements(text: _Text) -> Iterator[tuple[int, object]]:
    """The elements of an array; a bad one ends it, as nothing says where the next begins."""
    text.advance(text.place + 1)
    if text.skip_blank() == "]":
        text.advance(text.place + 1)
    else:
        while True:
            text.skip_blank()
            line = text.line
            yield line, text.value()
            after = text.skip_blank()
            if after not in (",", "]"):
                problem = f"has {after!r} behind an element of the array" if after else "ends within the array"
                raise _Broken(Fault(text.where, problem, allowed="a comma or ]"))
            text.advance(text.place + 1)
            if after == "]":
                break
    if text.skip_blank():
        raise _Broken(Fault(text.where, "goes on behind the end of the array"))
