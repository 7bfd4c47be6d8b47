"""Reading and writing one checkpoint folder through torch.distributed.checkpoint.

In: a tree of live tensors and packed states, and a folder. Out: the folder written and synced, or the tree
overwritten with what the folder holds, after checking that the two fit.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter

from hp_components._rank_zero import log
from hp_components.checkpoint.agreement import on_all_ranks, on_rank_zero
from hp_components.checkpoint.contents import ModelParts, compare
from hp_components.checkpoint.folder import read_info
from hp_components.checkpoint.plan import WritePlan, gather_on_rank_zero
from hp_protocols.errors import ConfigError, Fault
from hp_protocols.platform import get_platform

__all__ = ["load_model", "matching_contents", "read", "require_states", "write", "writer_of"]

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
    load_weights(parts, info.path)


def load_weights(parts: ModelParts, path: Path, group: Any = None) -> None:
    """Load only `model.*` of the checkpoint in `path`."""
    reader = FileSystemReader(path)
    contents, _ = matching_contents(reader, lambda: {"model": parts.state_dict()}, str(path), group)
    on_all_ranks(f"load {path}", lambda: read(contents, reader, group), group)
    on_all_ranks(f"restore {path}", lambda: parts.load_state_dict(contents["model"]), group)


def matching_contents(
    reader: FileSystemReader, collect: Callable[[], dict[str, Any]], where: str, group: Any = None
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """(what `collect` gives, to be overwritten by a load, what the checkpoint holds), after comparing them."""
    contents, metadata = on_all_ranks(f"read {where}", lambda: (collect(), reader.read_metadata()), group)
    flat = {f"{part}.{name}": value for part, values in contents.items() for name, value in values.items()}
    # With pipeline stages each rank wants only its own part; left over is what no rank wants.
    everywhere = set().union(*get_platform().all_gather_object(set(flat), group))
    prefixes = tuple(f"{part}." for part in contents)

    def require_fit() -> None:
        if faults := compare(flat, everywhere, metadata, where, prefixes):
            raise ConfigError(faults)

    on_all_ranks(f"load {where}", require_fit, group)
    return contents, metadata.state_dict_metadata


def require_states(
    contents: Mapping[str, Mapping[str, Any]], saved: Mapping[str, Any], path: Path, exclude: Collection[str] = ()
) -> None:
    """Check that the folder holds every packed state of `contents`; say which of its own are not wanted.

    Raises:
        ConfigError: one is missing.
    """
    wanted = {f"{part}.{name}" for part in ("states", "rng") for name in contents[part]}
    if missing := sorted(wanted - saved.keys()):
        raise ConfigError(Fault(str(path), f"holds no {', '.join(missing)}"))
    wanted |= {f"states.{name}" for name in exclude}
    if unknown := sorted(name for name in saved if name.startswith("states.") and name not in wanted):
        log(logger, logging.WARNING, "%s: not loaded, since this run has no such part: %s", path, ", ".join(unknown))


def writer_of(path: Path) -> FileSystemWriter:
    """A writer into the empty folder `path`, which has every file on disk when it is done."""
    # Nothing to copy ahead: what is written in the background lies in host memory already.
    writer = FileSystemWriter(path, sync_files=True, overwrite=False)
    writer.set_up_storage_writer(get_platform().rank() == 0)
    return writer


def write(plan: WritePlan, pieces: DefaultSavePlanner, writer: FileSystemWriter, group: Any = None) -> None:
    """Write every rank's pieces, and on rank 0 what the folder holds."""
    path = writer.checkpoint_id
    results = on_all_ranks(f"write {path}", lambda: writer.write_data(plan.local, pieces).wait(), group)
    everyones = gather_on_rank_zero(results, group)

    def finish() -> None:
        assert plan.metadata is not None
        assert everyones is not None
        writer.finish(replace(plan.metadata), everyones)

    on_rank_zero(f"write {path}", finish, group)


def read(contents: dict[str, Any], reader: FileSystemReader, group: Any = None) -> None:
    """Overwrite `contents` with what the folder holds: tensors in place, everything else replaced."""
    with _single_process_is_meant():
        dcp.load(contents, storage_reader=reader, process_group=group, no_dist=not get_platform().is_initialized())


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """Without torch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
