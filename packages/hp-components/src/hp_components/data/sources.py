"""Where text comes from: the files of a corpus and the documents in them.

In: paths (files, folders, globs), or None for the standard-library sources of the running Python. Out: a `Corpus`:
documents in a fixed order, a fingerprint of their content, every bad line reported by file and line.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from hp_components.data.files import RECORD_KINDS, find_all, find_files, text_file
from hp_components.data.formats import TEXT_READERS, BadLinePolicy, FaultList, Part, TextFile, readable, whole_gzip
from hp_components.data.records import RECORD_READERS, Record, text_of
from hp_protocols.errors import ConfigError, Fault

__all__ = [
    "Corpus",
    "FileCorpus",
    "MemoryCorpus",
    "as_corpus",
    "open_corpus",
    "standard_library_corpus",
    "whole_documents",
]

# Up to here a corpus is known by its content, which survives copying and cannot be fooled; hashing takes well under
# a second. Above, by path, size and modification time, as reading it all only to find the cache would cost minutes.
CONTENT_HASH_LIMIT = 256 * 2**20
# How much text a byte of a packed file holds, roughly.
PACKED_TEXT = 3


@runtime_checkable
class Corpus(Protocol):
    """Documents in a fixed order."""

    on_bad_line: BadLinePolicy

    @property
    def name(self) -> str:
        """What to call it in a message."""

    @property
    def size(self) -> int:
        """Bytes of text, at least roughly (it scales samples and progress)."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever a document may have changed."""

    def parts(self, faults: FaultList) -> Iterator[Part]:
        """Every document once, in parts of bounded size where it can be read so. Bad places go into `faults`."""

    def documents(self) -> Iterator[str]:
        """Every document once. Raises ConfigError, after the last one, with all bad places, unless they are skipped."""


def whole_documents(corpus: Corpus) -> Iterator[str]:
    """The documents of a corpus, put together from their parts."""
    faults, begun = FaultList(corpus.name, corpus.on_bad_line), list[str]()
    for part in corpus.parts(faults):
        begun.append(part.text)
        if part.last:
            yield begun[0] if len(begun) == 1 else "".join(begun)
            begun = []
    faults.raise_if_any()


class FileCorpus:
    """The documents of some files, in the order of the files."""

    def __init__(
        self,
        files: Sequence[TextFile],
        *,
        name: str,
        text_key: str = "text",
        on_bad_line: BadLinePolicy = "error",
    ) -> None:
        self.files, self.name, self.text_key, self.on_bad_line = tuple(files), name, text_key, on_bad_line

    def __repr__(self) -> str:
        return f"FileCorpus({self.name!r}, {len(self.files)} files, {self.size} bytes)"

    @property
    def size(self) -> int:
        return sum(file.size * (PACKED_TEXT if file.gzipped or file.kind == "parquet" else 1) for file in self.files)

    @functools.cached_property
    def fingerprint(self) -> str:
        # A corpus with bad lines is another one when they are skipped than when they are refused.
        policy = "" if self.on_bad_line == "error" else f" {self.on_bad_line}"
        digest = hashlib.sha256(f"files 1 {self.text_key!r}{policy}".encode())
        by_content = sum(file.size for file in self.files) <= CONTENT_HASH_LIMIT
        for file in self.files:
            if by_content:
                with readable(file.path), open(file.path, "rb") as handle:
                    identity = hashlib.file_digest(handle, "sha256").hexdigest()
            else:
                identity = f"{file.path} {file.size} {file.mtime_ns}"
            kind = f"{file.kind}.gz" if file.gzipped else file.kind
            digest.update(f"\n{kind} {identity}".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def parts(self, faults: FaultList) -> Iterator[Part]:
        for file in self.files:
            yield from whole_gzip(file, faults, self._parts_of(file, faults))
        self._check_unchanged()

    def documents(self) -> Iterator[str]:
        return whole_documents(self)

    def records(self, faults: FaultList) -> Iterator[Record]:
        """The records of all files. Raises ConfigError where a file has none by its nature."""
        plain = [file for file in self.files if file.kind not in RECORD_KINDS]
        if plain:
            allowed = ", ".join(f".{kind}" for kind in RECORD_KINDS)
            raise ConfigError([Fault(str(file.path), "has text, not records", allowed=allowed) for file in plain[:10]])
        for file in self.files:
            yield from whole_gzip(file, faults, RECORD_READERS[file.kind](file, faults))
        self._check_unchanged()

    def _parts_of(self, file: TextFile, faults: FaultList) -> Iterator[Part]:
        if file.kind in TEXT_READERS:
            yield from TEXT_READERS[file.kind](file, faults)
            return
        for record in RECORD_READERS[file.kind](file, faults):
            if (text := text_of(record, self.text_key, faults)) is not None:
                yield Part(text)

    def _check_unchanged(self) -> None:
        """A file written to while it is read would be kept under the fingerprint of its former self."""
        for file in self.files:
            with readable(file.path):
                now = file.path.stat()
            if (now.st_size, now.st_mtime_ns) != (file.size, file.mtime_ns):
                raise ConfigError(
                    Fault(str(file.path), "changed while it was being read", hint="run again when nothing writes to it")
                )


class MemoryCorpus:
    """Documents from a function that returns them anew at every call."""

    on_bad_line: BadLinePolicy = "error"

    def __init__(self, factory: Callable[[], Iterable[str]], *, name: str = "documents in memory") -> None:
        self.factory, self.name = factory, name

    @functools.cached_property
    def _measured(self) -> tuple[int, str]:
        digest, size = hashlib.sha256(b"memory 1"), 0
        for document in self.factory():
            raw = document.encode("utf-8", errors="surrogatepass")
            digest.update(len(raw).to_bytes(8, "little") + raw)
            size += len(raw)
        return size, digest.hexdigest()

    @property
    def size(self) -> int:
        return self._measured[0]

    @property
    def fingerprint(self) -> str:
        return self._measured[1]

    def parts(self, faults: FaultList) -> Iterator[Part]:
        return (Part(document) for document in self.factory())

    def documents(self) -> Iterator[str]:
        yield from self.factory()


def as_corpus(corpus: Corpus | Callable[[], Iterable[str]] | Sequence[str | os.PathLike[str]]) -> Corpus:
    """A corpus from what a caller has: a corpus, a function that returns documents, or a list of files."""
    if isinstance(corpus, Corpus):
        return corpus
    if callable(corpus):
        return MemoryCorpus(corpus)
    if isinstance(corpus, str | os.PathLike):
        raise TypeError(
            f"a corpus is a Corpus, a function or a list of files, not the single path {corpus!r}: use open_corpus"
        )
    files = [file for path in corpus for file in find_files(Path(path), "corpus")]
    if not files:
        raise ValueError("an empty list of files is no corpus")
    return FileCorpus(files, name=f"{len(files)} files")


def open_corpus(
    dataset_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    *,
    text_key: str = "text",
    on_bad_line: BadLinePolicy = "error",
    where: str = "dataloader.dataset_path",
) -> FileCorpus:
    """The corpus at a path, a glob or several of them, or the running Python's standard-library sources for None.

    A .txt file is one document. A line of .jsonl, an element of .json and a row of .parquet are records, whose
    `text_key` is a document; a .gz file is read as what it packs. A folder is read recursively in the order of its
    names; what has another extension is counted in one log line.

    Raises:
        ConfigError: nothing there, nothing of use there, or not readable.
    """
    if dataset_path is None:
        return standard_library_corpus()
    files = find_all(dataset_path, where)
    several = [dataset_path] if isinstance(dataset_path, str | os.PathLike) else dataset_path
    name = ", ".join(map(str, several[:3])) + (f" and {len(several) - 3} more" if len(several) > 3 else "")
    return FileCorpus(files, name=name, text_key=text_key, on_bad_line=on_bad_line)


def standard_library_corpus() -> FileCorpus:
    """The Python sources that come with every Python, without its tests and installed packages."""
    # Where Python was built to be, and where it is: they differ for a Python that was moved.
    folders = dict.fromkeys([Path(sysconfig.get_path("stdlib")), Path(os.__file__).parent])
    for folder in folders:
        if found := sorted(_python_sources(folder), key=_order):
            return FileCorpus(found, name="Python standard library")
    raise ConfigError(
        Fault(
            "dataloader.dataset_path",
            "is not set, and the running Python has no sources at " + " or ".join(map(str, folders)),
            hint="give a file of text or records, or a folder of them: --dataloader.dataset_path my_text.txt",
        )
    )


def _python_sources(folder: Path) -> Iterator[TextFile]:
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in left_out]
        for path in (Path(parent, name) for name in names if name.endswith(".py")):
            yield text_file(path, path.relative_to(folder).as_posix(), "py")


def _order(file: TextFile) -> tuple[str, ...]:
    return tuple(file.name.split("/"))
