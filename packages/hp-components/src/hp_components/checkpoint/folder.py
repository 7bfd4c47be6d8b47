"""The folder of checkpoints: what is whole, what is left over, what may be deleted. Needs no torch.

In: `<run>/checkpoint`. Out: whole checkpoints by step; a partial one becomes `step-N` in one rename, and only
what this package wrote is ever deleted.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CheckpointInfo", "list_checkpoints"]

logger = logging.getLogger(__name__)

MARKER = "hp_checkpoint.json"
METADATA = ".metadata"

_STEP = re.compile(r"step-(0|[1-9]\d*)")
_LEFTOVER = re.compile(r"\.(step-(?:0|[1-9]\d*)(?:-hf)?)\.(partial|replaced|deleting)-[0-9a-f]{8}")
_OWN_FILE = re.compile(rf"__\d+_\d+\.distcp|{re.escape(METADATA)}(\.tmp)?|{re.escape(MARKER)}")
_OWN_HF_FILE = re.compile(
    rf"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json|{re.escape(MARKER)}"
    r"|tokenizer(_config)?\.json|tokenizer\.model|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)"
    r"|merges\.txt|chat_template\.(jinja|json)"
)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One whole checkpoint.

    Attributes:
        step: the optimizer step after which it was saved.
        path: its folder.
        world_size: the number of processes that saved it; None if another program wrote it.
        files: the size of each data file when it was saved; empty if another program wrote it.
        model_only: whether it holds only the weights, so that a run cannot go on from it.
    """

    step: int
    path: Path
    world_size: int | None
    files: dict[str, int]
    model_only: bool = False

    @property
    def own(self) -> bool:
        """Whether this package wrote it."""
        return self.world_size is not None

    def damage(self) -> list[str]:
        """What differs from the moment of saving: missing or shortened files."""
        found = []
        for name, size in self.files.items():
            file = self.path / name
            if not file.is_file():
                found.append(f"{name} is missing")
            elif (actual := file.stat().st_size) != size:
                found.append(f"{name} has {actual:,} bytes instead of {size:,}")
        return found


def list_checkpoints(folder: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """The whole checkpoints in `<run>/checkpoint`, by step; empty if there is no such folder."""
    return sorted(_whole(Path(folder)), key=lambda info: info.step)


def read_info(path: Path) -> CheckpointInfo | None:
    """The checkpoint at `path`, or None if there is no whole one."""
    match = _STEP.fullmatch(path.name)
    if not match or not (path / METADATA).is_file():
        return None
    info = info_of(path)
    # A marker of another step: a copy that somebody made, not what we wrote there.
    return info if info.step == int(match[1]) else CheckpointInfo(int(match[1]), path, None, {})


def info_of(path: Path) -> CheckpointInfo:
    """The checkpoint in a folder of any name, which has its `.metadata`; step 0 if another program wrote it."""
    marker = _marker(path)
    if "world_size" not in marker:
        return CheckpointInfo(0, path, None, {})
    return CheckpointInfo(marker["step"], path, marker["world_size"], marker["files"], marker.get("model_only", False))


def partial_folder(folder: Path, name: str, token: str) -> Path:
    """Where `name` grows; hidden, and never mistaken for a checkpoint."""
    return folder / f".{name}.partial-{token}"


def publish(partial: Path, name: str, token: str, about: dict[str, Any]) -> Path:
    """Turn a fully written partial folder into `name`, in one rename, on disk when this returns.

    Args:
        about: what `hp_checkpoint.json` says besides the names and sizes of the files.
    """
    files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    _write_durably(partial / MARKER, {"format": 1, **about, "files": files})
    sync_folder(partial)
    target = partial.parent / name
    replaced = partial.parent / f".{name}.replaced-{token}"
    if target.exists():
        target.rename(replaced)
    try:
        partial.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    sync_folder(partial.parent)
    if replaced.exists():
        logger.info("checkpoint %s replaces the one an earlier run had saved there", name)
        _delete_own(replaced)
    return target


def discard(partial: Path) -> None:
    """Remove a partial folder after a failed save."""
    if partial.exists():
        _delete_own(partial)


def tidy(folder: Path) -> None:
    """Deal with what a killed process left: bring back a checkpoint that was being replaced, drop partial ones."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if not match or path.is_symlink() or not path.is_dir():
            continue
        target = folder / match[1]
        if match[2] == "replaced" and not target.exists():
            path.rename(target)
            sync_folder(folder)
            logger.warning("%s: brought back; a save that would have replaced it was killed", target)
        elif _delete_own(path):
            what = {
                "partial": "a save that was killed",
                "replaced": "a replaced checkpoint",
                "deleting": "a deletion that was killed",
            }[match[2]]
            logger.warning("%s: removed, left over from %s", path, what)


def retire(folder: Path, keep: int, newest: int, token: str) -> list[Path]:
    """Take all but the `keep` latest own checkpoints out of the way, `newest` (just saved) kept; 0 keeps all.

    Returns:
        The hidden folders that are to be deleted with `delete`; a start after a crash deletes them too.
    """
    if keep == 0:
        return []
    doomed = []
    others = [info for info in list_checkpoints(folder) if info.own and info.step != newest]
    for info in others[: max(0, len(others) - (keep - 1))]:
        if foreign := _foreign_entries(info.path):
            logger.warning(
                "%s: kept although keep_latest_k is %d, since it holds files that are not ours: %s",
                info.path,
                keep,
                ", ".join(foreign[:3]),
            )
            continue
        # Renamed first: a deletion that is killed half-way must not leave something that looks whole.
        hidden = folder / f".step-{info.step}.deleting-{token}"
        info.path.rename(hidden)
        doomed.append(hidden)
    return doomed


def delete(retired: list[Path]) -> None:
    """Delete what `retire` has taken out of the way."""
    for path in retired:
        _delete_own(path)


def sync_folder(path: Path) -> None:
    """Make the folder's entries durable."""
    sync_file(path)


def sync_file(path: Path) -> None:
    """Make a file's content durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _whole(folder: Path) -> Iterator[CheckpointInfo]:
    if folder.is_dir():
        for path in folder.iterdir():
            if (info := read_info(path)) is not None:
                yield info


def _marker(path: Path) -> dict[str, Any]:
    try:
        marker = json.loads((path / MARKER).read_text())
    except (OSError, ValueError):
        return {}
    return marker if isinstance(marker, dict) and marker.get("format") == 1 else {}


def _write_durably(path: Path, content: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _foreign_entries(path: Path) -> list[str]:
    own = _OWN_HF_FILE if "-hf" in path.name else _OWN_FILE
    return sorted(entry.name for entry in path.iterdir() if not own.fullmatch(entry.name) or entry.is_dir())


def _delete_own(path: Path) -> bool:
    """Delete a folder of ours; one that holds anything else stays, and a line says so."""
    if foreign := _foreign_entries(path):
        logger.warning("%s: left alone, since it holds files that are not ours: %s", path, ", ".join(foreign[:3]))
        return False
    shutil.rmtree(path)
    return True
