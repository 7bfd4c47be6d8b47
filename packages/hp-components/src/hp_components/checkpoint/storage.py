"""Reading and writing one checkpoint folder through torch.distributed.checkpoint.

In: a tree of live tensors and packed states, and a folder. Out: the folder written and synced, or the tree
overwritten with what the folder holds, after checking that the two fit.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn

from hp_components._rank_zero import log
from hp_components.checkpoint.agreement import on_all_ranks
from hp_components.checkpoint.contents import ModelParts, compare
from hp_components.checkpoint.folder import read_info
from hp_protocols.errors import ConfigError, Fault
from hp_protocols.platform import get_platform

__all__ = ["load_model", "matching_contents", "read", "require_states", "write"]

logger = logging.getLogger(__name__)


def load_model(model: nn.Module | Sequence[nn.Module], path: str | os.PathLike[str]) -> None:
    """Load only the weights of the checkpoint folder `path` (`…/step-N`) into `model`, whatever its layout.

    Raises:
        ConfigError: there is no whole checkpoint, or it is of another model (every name that does not fit is told).
    """
    parts = ModelParts([model] if isinstance(model, nn.Module) else model)
    info = read_info(Path(path))
    if info is None:
        raise ConfigError(Fault(str(path), "is no whole checkpoint", allowed="a folder …/checkpoint/step-N"))
    reader = dcp.FileSystemReader(info.path)
    contents = matching_contents(reader, lambda: {"model": parts.state_dict()}, str(info.path))
    on_all_ranks(f"load {info.path}", lambda: read(contents, reader))
    on_all_ranks(f"restore {info.path}", lambda: parts.load_state_dict(contents["model"]))


def matching_contents(
    reader: dcp.FileSystemReader, collect: Callable[[], dict[str, Any]], where: str
) -> dict[str, Any]:
    """What `collect` gives, to be overwritten by a load, after comparing it with what the checkpoint holds."""
    contents, metadata = on_all_ranks(f"read {where}", lambda: (collect(), reader.read_metadata()))
    flat = {f"{part}.{name}": value for part, values in contents.items() for name, value in values.items()}
    # With pipeline stages each rank wants only its own part; left over is what no rank wants.
    everywhere = set().union(*get_platform().all_gather_object(set(flat)))
    prefixes = tuple(f"{part}." for part in contents)

    def require_fit() -> None:
        if faults := compare(flat, everywhere, metadata, where, prefixes):
            raise ConfigError(faults)

    on_all_ranks(f"load {where}", require_fit)
    saved = metadata.state_dict_metadata
    return {
        part: {name: value for name, value in values.items() if f"{part}.{name}" in saved}
        for part, values in contents.items()
    }


def require_states(contents: Mapping[str, Mapping[str, Any]], saved: Mapping[str, Any], path: Path) -> None:
    """Check that the folder holds every packed state of `contents`; say which of its own are not wanted.

    Raises:
        ConfigError: one is missing.
    """
    wanted = {f"{part}.{name}" for part in ("states", "rng") for name in contents[part]}
    if missing := sorted(wanted - saved.keys()):
        raise ConfigError(Fault(str(path), f"holds no {', '.join(missing)}"))
    if unknown := sorted(name for name in saved if name.startswith("states.") and name not in wanted):
        log(logger, logging.WARNING, "%s: not loaded, since this run has no such part: %s", path, ", ".join(unknown))


def write(contents: dict[str, Any], path: Path) -> None:
    """Write `contents` into the empty folder `path`; on return every file is on disk."""
    writer = dcp.FileSystemWriter(path, sync_files=True, overwrite=False)
    with _single_process_is_meant():
        dcp.save(contents, storage_writer=writer, no_dist=not get_platform().is_initialized())


def read(contents: dict[str, Any], reader: dcp.FileSystemReader) -> None:
    """Overwrite `contents` with what the folder holds: tensors in place, everything else replaced."""
    with _single_process_is_meant():
        dcp.load(contents, storage_reader=reader, no_dist=not get_platform().is_initialized())


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """Without torch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
