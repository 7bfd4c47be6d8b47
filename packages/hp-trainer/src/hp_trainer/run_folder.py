"""The folder of a run: where it is, that only one run uses it, and the resolved configuration in it.

In: `dump_folder` of the config. Out: a `RunFolder`; nothing is written before `open()`.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import yaml

from hp_components import RunLock
from hp_components.checkpoint.lock import FolderInUse
from hp_protocols.errors import ConfigError, Fault

RESOLVED = "resolved.yaml"


def default_run_folder(recipe: str) -> Path:
    """A new folder for a run that named none: outputs/<recipe>/<date-time>.

    `recipe` is a config's `<module>.<recipe>`; "" (a config made by hand) gives outputs/run/<date-time>.
    """
    # To the microsecond: the folder is made much later, so that a run which starts in the same second cannot see it.
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    folder = Path("outputs") / (recipe.rpartition(".")[2] or "run") / stamp
    number = 2
    while folder.exists():
        folder = folder.with_name(f"{stamp}-{number}")
        number += 1
    return folder


class RunFolder:
    """One run's folder. Only rank 0 opens it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: RunLock | None = None
        self._seen_free = False

    def require_usable(self) -> None:
        """Look, without writing, whether a run could be written here.

        Raises:
            ConfigError: something on the way is no folder, or may not be written.
        """
        nearest = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not nearest.is_dir():
            problem = f"cannot be used as a run folder: {nearest} is no folder"
        elif not os.access(nearest, os.W_OK | os.X_OK):
            problem = f"cannot be used as a run folder: {nearest} may not be written"
        else:
            self._seen_free = not self.holds_a_run
            return
        raise ConfigError(Fault(str(self.path), problem, hint="choose another one with --dump_folder"))

    @property
    def holds_a_run(self) -> bool:
        """Whether a run has been started in this folder before."""
        return (self.path / RESOLVED).exists()

    def open(self) -> None:
        """Create the folder if need be and hold it for this run.

        Raises:
            FolderInUse: another run holds it, or was written here since `require_usable` saw none.
            ConfigError: it cannot be made.
        """
        if self._lock is not None:
            return
        lock = RunLock(self.path)
        lock.acquire()
        if self._seen_free and self.holds_a_run:
            lock.release()
            problem = "another run was written here while this one was prepared"
            raise FolderInUse(Fault(str(self.path), problem, hint="choose another one with --dump_folder"))
        self._lock = lock

    def write_resolved(self, text: str, step: int) -> None:
        """Save the configuration that this run really uses; an older, different one is kept beside it."""
        target = self.path / RESOLVED
        self._seen_free = False  # from here on the run that it holds is this one
        if target.exists():
            before = target.read_text()
            if before == text:
                return
            target.rename(self._free_name(f"resolved.before-step-{step + 1}"))
        partial = target.with_suffix(".partial")
        partial.write_text(text)
        os.replace(partial, target)

    def recorded_seed(self) -> int | None:
        """The seed of the run that this folder holds, if it holds one."""
        resolved = self.path / RESOLVED
        if not resolved.exists():
            return None
        return yaml.safe_load(resolved.read_text())["trainer"]["debug"]["seed"]

    def _free_name(self, stem: str) -> Path:
        names = (self.path / f"{stem}{suffix}.yaml" for suffix in ["", *(f".{n}" for n in range(2, 1000))])
        return next(name for name in names if not name.exists())

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
