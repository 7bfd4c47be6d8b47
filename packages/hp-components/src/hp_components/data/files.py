"""Which files a path, a glob or a folder means, in which order.

In: what a user gave as `dataset_path`. Out: `TextFile`s in a fixed order; what is not there, or cannot be used, is a
ConfigError that says what is.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hp_components.data.formats import TextFile, readable
from hp_protocols.errors import ConfigError, Fault, nearest

__all__ = ["EXTENSIONS", "RECORD_KINDS", "find_all", "find_files", "text_file"]

log = logging.getLogger(__name__)

RECORD_KINDS = ("jsonl", "json", "parquet")
EXTENSIONS = (".txt", ".jsonl", ".json", ".parquet")
# Formats that a user may well have; they get a word of their own instead of "unknown".
LATER = (".csv", ".tsv", ".arrow", ".zst", ".bz2", ".xz", ".zip", ".tar")
_ALLOWED = ", ".join(EXTENSIONS[:-1]) + f" or {EXTENSIONS[-1]} (also with .gz behind it)"
_GLOB = re.compile(r"[*?]|\[.+\]")


def find_all(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], where: str) -> list[TextFile]:
    """The files of one path, folder or glob, or of several, one after the other.

    A file that several of them mean is read once, where it comes first.

    Raises:
        ConfigError: one fault for each that is not there or has nothing of use.
    """
    several = [given] if isinstance(given, str | os.PathLike) else list(given)
    if not several:
        raise ConfigError(Fault(where, "is an empty list", allowed="paths, folders or globs"))
    found, faults, seen, repeated = list[TextFile](), list[Fault](), set[str](), 0
    for one in several:
        try:
            files = _find_one(str(one), where)
        except ConfigError as error:
            faults += error.faults
            continue
        for file in files:
            real = os.path.realpath(file.path)
            repeated += real in seen
            if real not in seen or len(several) == 1:
                found.append(file)
            seen.add(real)
    if faults:
        raise ConfigError(faults)
    if repeated and len(several) > 1:
        log.warning("%s: %d files are given more than once and read once", where, repeated)
    return found


def find_files(path: Path, where: str) -> list[TextFile]:
    """The files of use at `path`, sorted. Raises ConfigError when there are none."""
    if not path.exists():
        raise ConfigError(_missing(path, str(path), where))
    if not path.is_dir():
        if _kind(path) is None or not path.is_file():
            raise ConfigError(_unusable_file(path, where))
        return [text_file(path, path.name)]
    found, others = list[TextFile](), Counter[str]()
    _walk(path, path, found, others, set())
    return _usable(str(path), found, others, where)


def text_file(path: Path, name: str, kind: str | None = None) -> TextFile:
    """What is to be known of a file before it is read."""
    with readable(path):
        status = path.stat()
    known = _kind(path) or ("", False)
    return TextFile(path, name, kind or known[0], status.st_size, status.st_mtime_ns, gzipped=known[1])


def _find_one(given: str, where: str) -> list[TextFile]:
    path = Path(given).expanduser()
    if given and path.exists():
        return find_files(path, where)
    if not _GLOB.search(given):
        raise ConfigError(_missing(path, given, where))
    matches = sorted((Path(name) for name in glob.glob(str(path), recursive=True)), key=lambda match: match.parts)
    if not matches:
        raise ConfigError(Fault(where, f"{given!r} matches nothing", hint="** stands for any number of folders"))
    found, others, visited = list[TextFile](), Counter[str](), set[tuple[int, int]]()
    for match in matches:
        _take(match, match, match.as_posix(), found, others, visited)
    # `**` matches a folder and what is in it.
    unique = {os.path.abspath(file.path): file for file in reversed(found)}
    return _usable(given, list(reversed(unique.values())), others, where)


def _usable(given: str, found: list[TextFile], others: Counter[str], where: str) -> list[TextFile]:
    if not found:
        seen = ", ".join(f"{number} {kind}" for kind, number in others.most_common(8)) or "nothing"
        kind = "folder" if Path(given).is_dir() else "files of"
        problem = f"no text in the {kind} {given!r} (it has {seen})"
        raise ConfigError(Fault(where, problem, allowed=f"files that end in {_ALLOWED}"))
    if others:
        counts = ", ".join(f"{number} {kind}" for kind, number in sorted(others.items()))
        log.warning("%s: %d files are text to read, %d others are not (%s)", given, len(found), others.total(), counts)
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
        if entry.name.startswith("."):
            others["hidden"] += 1
        else:
            _take(root, path, path.relative_to(root).as_posix(), found, others, visited)


def _take(
    root: Path, path: Path, name: str, found: list[TextFile], others: Counter[str], visited: set[tuple[int, int]]
) -> None:
    """What is at `path`: a folder's content, a file of use, or one more of the others."""
    if path.is_dir():
        _walk(root, path, found, others, visited)
    elif not path.is_file():
        others["broken link or special file"] += 1
    elif _kind(path) is not None:
        found.append(text_file(path, name))
    else:
        others[path.suffix.lower() or "without extension"] += 1


def _kind(path: Path) -> tuple[str, bool] | None:
    """(how to read it, whether it is a gzip file) by the name of a file; None if that does not say."""
    name = path.name.lower()
    gzipped = name.endswith(".gz")
    suffix = Path(name.removesuffix(".gz")).suffix
    return (suffix[1:], gzipped) if suffix in EXTENSIONS else None


def _missing(path: Path, given: str, where: str) -> Fault:
    """The fault of a path that is not there, with the nearest name beside it."""
    allowed = f"a file that ends in {_ALLOWED}, a folder or a glob of them"
    if not given:
        return Fault(where, "is empty", allowed=allowed)
    parent = path.parent
    while not parent.exists():
        path, parent = parent, parent.parent
    try:
        close = nearest(path.name, [entry.name for entry in parent.iterdir()]) if parent.is_dir() else None
    except OSError:  # the folder may not be listable; then there is just no name to suggest
        close = None
    hint = f"did you mean {parent / close}?" if close else f"{parent} exists, {path.name!r} in it does not"
    return Fault(where, f"{given!r} does not exist", allowed=allowed, hint=hint)


def _unusable_file(path: Path, where: str) -> Fault:
    allowed = f"a file that ends in {_ALLOWED}, or a folder of them"
    if not path.is_file():
        return Fault(where, f"{str(path)!r} is no regular file ({_file_type(path)})", allowed=allowed)
    if path.suffix.lower() in LATER:
        problem = f"{path.suffix} files are not read ({str(path)!r})"
        return Fault(where, problem, allowed=allowed, hint='convert it to .jsonl, one {"text": …} per line')
    hint = "plain text of another name: rename it or link it as .txt"
    return Fault(where, f"cannot tell how to read {str(path)!r}", allowed=allowed, hint=hint)


def _file_type(path: Path) -> str:
    mode = path.stat().st_mode
    kinds = {"pipe": stat.S_ISFIFO, "socket": stat.S_ISSOCK, "device": lambda m: stat.S_ISCHR(m) or stat.S_ISBLK(m)}
    return next((kind for kind, test in kinds.items() if test(mode)), "special file")
