"""One run per folder at a time, also after a crash.

In: a run folder. Out: `RunLock`, held by the process until it releases it or dies, however it dies.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from hp_protocols.errors import ConfigError, Fault

__all__ = ["FolderInUse", "RunLock", "held_by_another"]

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class FolderInUse(ConfigError):
    """Another run has the folder."""


class RunLock:
    """An exclusive lock on `<run folder>/.lock`; the file names the process that holds it.

    Take it on rank 0 before anything in the folder is read or written. It is a kernel lock (flock): it ends with
    the process, so a file left behind by a crash is no obstacle. On a file system without locks a line says that
    the run is not protected. Usable as a context manager.
    """

    def __init__(self, run_folder: str | os.PathLike[str]) -> None:
        self.path = Path(run_folder) / LOCK_NAME
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._fd is not None

    def acquire(self) -> None:
        """Take the lock, making the folder if needed.

        Raises:
            FolderInUse: another run holds it.
            ConfigError: the folder cannot be written.
            RuntimeError: this object holds it already.
        """
        if self.held:
            raise RuntimeError(f"{self.path} is held by this object already")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                Fault(
                    str(self.path.parent),
                    f"cannot be used as a run folder: {error.strerror}",
                    hint="choose another --dump_folder",
                )
            ) from error
        try:
            self._lock(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        # A forked worker must not keep the lock alive after this process has died.
        os.register_at_fork(after_in_child=self._forget_in_child)

    def release(self) -> None:
        """Give the lock back; nothing to do if it is not held."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(fd) or "it does not say which"
            raise FolderInUse(
                Fault(
                    str(self.path.parent),
                    f"another run is using this folder ({holder})",
                    hint="wait for it, stop it, or choose another --dump_folder",
                )
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
            logger.warning(
                "%s: this file system has no locks (%s); nothing keeps a second run out of the folder",
                self.path.parent,
                error.strerror,
            )
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{_this_process()}\n".encode(), 0)

    def _forget_in_child(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def held_by_another(run_folder: str | os.PathLike[str]) -> bool:
    """Whether a run in another process holds the folder's lock."""
    try:
        fd = os.open(Path(run_folder) / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(fd) != _this_process()
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise
    finally:
        os.close(fd)
    return False


def _this_process() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _holder(fd: int) -> str:
    return os.pread(fd, 200, 0).decode(errors="replace").strip()
