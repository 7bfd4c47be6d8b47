"""Where text comes from: the files of a corpus and the documents in them.

In: a path (a .txt or .jsonl file, a folder of them, or None for the standard-library sources of the running Python).
Out: a `Corpus`: documents in a fixed order, a fingerprint of their content, every bad line reported by file and line.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from hp_components.data.formats import READERS, FaultList, TextFile, readable
from hp_protocols.errors import ConfigError, Fault, nearest

__all__ = ["Corpus", "FileCorpus", "MemoryCorpus", "as_corpus", "open_corpus", "standard_library_corpus"]

log = logging.getLogger(__name__)

EXTENSIONS = (".txt", ".jsonl")
# Formats that a user may well have; they get a word of their own instead of "unknown".
LATER = (".json", ".parquet", ".csv", ".arrow", ".gz", ".zst")
# Up to here a corpus is known by its content, which survives copying and cannot be fooled; hashing takes well under
# a second. Above, by path, size and modification time, as reading it all only to find the cache would cost minutes.
CONTENT_HASH_LIMIT = 256 * 2**20


@runtime_checkable
class Corpus(Protocol):
    """Documents in a fixed order."""

    @property
    def name(self) -> str:
        """What to call it in a message."""

    @property
    def size(self) -> int:
        """Bytes of text, at least roughly (it scales samples and progress)."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever a document may have changed."""

    def documents(self) -> Iterator[str]:
        """Every document once. Raises ConfigError, after the last one, with all bad places met on the way."""


class FileCorpus:
    """The documents of some files, in the order of the files."""

    def __init__(self, files: Sequence[TextFile], *, name: str, text_key: str = "text") -> None:
        self.files, self.name, self.text_key = tuple(files), name, text_key

    def __repr__(self) -> str:
        return f"FileCorpus({self.name!r}, {len(self.files)} files, {self.size} bytes)"

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"files 1 {self.text_key!r}".encode())
        by_content = self.size <= CONTENT_HASH_LIMIT
        for file in self.files:
            if by_content:
                with readable(file.path), open(file.path, "rb") as handle:
                    identity = hashlib.file_digest(handle, "sha256").hexdigest()
            else:
                identity = f"{file.path} {file.size} {file.mtime_ns}"
            digest.update(f"\n{file.kind} {identity}".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        faults = FaultList(self.name)
        for file in self.files:
            yield from READERS[file.kind](file, self.text_key, faults)
        faults.raise_if_any()
        self._check_unchanged()

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
    files = [file for path in corpus for file in _find_files(Path(path))]
    if not files:
        raise ValueError("an empty list of files is no corpus")
    return FileCorpus(files, name=f"{len(files)} files")


def open_corpus(
    dataset_path: str | os.PathLike[str] | None, *, text_key: str = "text", where: str = "dataloader.dataset_path"
) -> Corpus:
    """The corpus at a path, or the running Python's standard-library sources for None.

    A .txt file is one document. A .jsonl file has one object per line, whose `text_key` is a document. A folder is
    read recursively in the order of its names; what has another extension is counted in one log line.

    Raises:
        ConfigError: nothing there, nothing of use there, or not readable.
    """
    if dataset_path is None:
        return standard_library_corpus()
    path = Path(dataset_path).expanduser()
    if not str(dataset_path) or not path.exists():
        raise ConfigError(_missing(path, str(dataset_path), where))
    return FileCorpus(_find_files(path, where), name=str(dataset_path), text_key=text_key)


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
            hint="give a text file, a .jsonl file or a folder of them: --dataloader.dataset_path my_text.txt",
        )
    )


def _python_sources(folder: Path) -> Iterator[TextFile]:
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in left_out]
        for path in (Path(parent, name) for name in names if name.endswith(".py")):
            yield _text_file(path, path.relative_to(folder).as_posix(), "py")


def _missing(path: Path, given: str, where: str) -> Fault:
    """The fault of a path that is not there, with the nearest name beside it."""
    if not given:
        return Fault(where, "is empty", allowed="a .txt or .jsonl file, or a folder of them")
    parent = path.parent
    while not parent.exists():
        path, parent = parent, parent.parent
    try:
        close = nearest(path.name, [entry.name for entry in parent.iterdir()]) if parent.is_dir() else None
    except OSError:  # the folder may not be listable; then there is just no name to suggest
        close = None
    hint = f"did you mean {parent / close}?" if close else f"{parent} exists, {path.name!r} in it does not"
    return Fault(where, f"{given!r} does not exist", allowed="a .txt or .jsonl file, or a folder of them", hint=hint)


def _order(file: TextFile) -> tuple[str, ...]:
    return tuple(file.name.split("/"))


def _text_file(path: Path, name: str, kind: str) -> TextFile:
    with readable(path):
        status = path.stat()
    return TextFile(path=path, name=name, kind=kind, size=status.st_size, mtime_ns=status.st_mtime_ns)


def _find_files(path: Path, where: str = "corpus") -> list[TextFile]:
    """The files of use at `path`, sorted. Raises ConfigError when there are none."""
    if not path.exists():
        raise ConfigError(_missing(path, str(path), where))
    if not path.is_dir():
        kind = path.suffix.lower()
        if kind not in EXTENSIONS or not path.is_file():
            raise ConfigError(_unusable_file(path, where))
        return [_text_file(path, path.name, kind[1:])]
    found, others = list[TextFile](), Counter[str]()
    _walk(path, path, found, others, set())
    if not found:
        seen = ", ".join(f"{number} {kind}" for kind, number in others.most_common(8)) or "nothing"
        raise ConfigError(
            Fault(
                where,
                f"no text in the folder {str(path)!r} (it has {seen})",
                allowed="files that end in " + " or ".join(EXTENSIONS),
            )
        )
    if others:
        counts = ", ".join(f"{number} {kind}" for kind, number in sorted(others.items()))
        log.warning("%s: %d files are text to read, %d others are not (%s)", path, len(found), others.total(), counts)
    return found


def _walk(root: Path, folder: Path, found: list[TextFile], others: Counter[str], visited: set[tuple[int, int]]) -> None:
    """Collect what is below `folder`; links are followed, a folder is entered once."""
    with readable(folder):
        status = folder.stat()
        if (status.st_dev, status.st_ino) in visited:
            return
        visited.add((status.st_dev, status.st_ino))
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        path = Path(entry.path)
        kind = path.suffix.lower()
        if entry.name.startswith("."):
            others["hidden"] += 1
        elif entry.is_dir():
            _walk(root, path, found, others, visited)
        elif not entry.is_file():
            others["broken link or special file"] += 1
        elif kind in EXTENSIONS:
            found.append(_text_file(path, path.relative_to(root).as_posix(), kind[1:]))
        else:
            others[kind or "without extension"] += 1


def _unusable_file(path: Path, where: str) -> Fault:
    allowed = "a file that ends in " + " or ".join(EXTENSIONS) + ", or a folder of them"
    if not path.is_file():
        return Fault(where, f"{str(path)!r} is no regular file ({_file_type(path)})", allowed=allowed)
    if path.suffix.lower() in LATER:
        return Fault(
            where,
            f"{path.suffix} files are not available yet ({str(path)!r})",
            allowed=allowed,
            hint='convert it to .jsonl, one {"text": …} per line',
        )
    return Fault(
        where,
        f"cannot tell how to read {str(path)!r}",
        allowed=allowed,
        hint="plain text of another name: rename it or link it as .txt",
    )


def _file_type(path: Path) -> str:
    mode = path.stat().st_mode
    kinds = {"pipe": stat.S_ISFIFO, "socket": stat.S_ISSOCK, "device": lambda m: stat.S_ISCHR(m) or stat.S_ISBLK(m)}
    return next((kind for kind, test in kinds.items() if test(mode)), "special file")
