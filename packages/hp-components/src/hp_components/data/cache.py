"""The cache folder: work that is done once per machine and found again by its key.

In: a key that names everything the result depends on. Out: a path under the cache root that holds a complete
file or nothing, whatever is killed and however many processes want it at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hp_protocols.errors import ConfigError, Fault

try:
    import fcntl
except ImportError:  # not a POSIX system: processes may then do the same work twice, with the same result
    fcntl = None  # type: ignore[assignment]

__all__ = ["cache_key", "cache_root", "exclusive", "open_atomic"]

log = logging.getLogger(__name__)


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """`cache_dir`, else `$HP_CACHE_DIR`, else `$XDG_CACHE_HOME/hyper-parallel`, else `~/.cache/hyper-parallel`."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    if own := os.environ.get("HP_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "hyper-parallel"
    try:
        return Path.home() / ".cache" / "hyper-parallel"
    except RuntimeError as error:
        raise ConfigError(
            Fault("HP_CACHE_DIR", f"no home folder to keep the cache in ({error})", hint="set HP_CACHE_DIR")
        ) from error


def cache_key(*parts: object) -> str:
    """A file name for everything that a result depends on."""
    return hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).hexdigest()[:32]


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Let one process at a time work on `path`. The lock ends with its process, however that ends.

    Only saves double work: publication is atomic, so results are right without it. Hence a file system that cannot
    lock is logged, not refused.
    """
    with contextlib.ExitStack() as stack:
        with _writable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(open(path.with_name(path.name + ".lock"), "ab"))
        if fcntl is not None:
            try:
                _lock(handle, path)
            except OSError as error:
                log.warning("%s cannot be locked (%s): several processes may do the same work at once", path, error)
            else:
                # Whoever holds the lock is alone, so what lies there was left by a killed process.
                for stale in path.parent.glob(f"{path.name}.*.tmp"):
                    stale.unlink(missing_ok=True)
        yield


def _lock(handle: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("waiting for another process that works on %s", path)
        fcntl.flock(handle, fcntl.LOCK_EX)


@contextlib.contextmanager
def open_atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which appears as `path` when the block ends well, and never otherwise."""
    with _writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not `tempfile`: its files are for their owner alone, and a cache may be shared.
        name = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            with open(name, "x+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            name.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Say what to do when the cache cannot be written (read-only, full, a file in the way)."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            Fault(
                str(path.parent),
                f"cannot write the cache: {error.strerror or error}",
                hint="free space or permissions there, or set HP_CACHE_DIR to another folder",
            )
        ) from error
