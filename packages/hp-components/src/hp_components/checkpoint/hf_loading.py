"""Weights from a Hugging Face folder into a model of any layout, each rank reading what it needs.

In: a model's parts, a folder, an adapter. Out: the parameters overwritten. Every name that is missing, unknown or has
another shape is told before anything is changed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hp_components._rank_zero import log
from hp_components.checkpoint.agreement import on_all_ranks
from hp_components.checkpoint.contents import ModelParts, listed
from hp_components.checkpoint.hf_folder import HuggingFaceFolder
from hp_components.checkpoint.hf_names import Names, relate
from hp_protocols.errors import ConfigError, Fault
from hp_protocols.local_pieces import local_piece
from hp_protocols.platform import get_platform
from hp_protocols.state_dict_adapter import BaseStateDictAdapter

__all__ = ["load_hf", "tied_names"]

logger = logging.getLogger(__name__)

# What a narrower type holds exactly.
_EXACT = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
}


def load_hf(parts: ModelParts, path: Path, adapter: BaseStateDictAdapter, group: Any = None) -> None:
    """Load the weights in `path` into `parts`. Types follow the model: a wider file is rounded, and a line says so.

    Raises:
        ConfigError: the folder is not usable, or not of this model.
    """
    live, folder = on_all_ranks(f"read {path}", lambda: (parts.state_dict(), HuggingFaceFolder(path)), group)
    # With pipeline stages the folder also holds what other ranks have.
    everyones = get_platform().all_gather_object({name: tuple(value.shape) for name, value in live.items()}, group)
    shapes = {name: shape for shapes in everyones for name, shape in shapes.items()}
    tied = tied_names(live, group)
    model = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    names = on_all_ranks(f"read {path}", lambda: _fitting(folder, model, live, tied, adapter), group)
    on_all_ranks(f"load {path}", lambda: _copy(names, folder, live, adapter), group)


def _fitting(
    folder: HuggingFaceFolder,
    model: Mapping[str, torch.Tensor],
    live: Mapping[str, Any],
    tied: Mapping[str, list[str]],
    adapter: BaseStateDictAdapter,
) -> Names:
    """How the folder's names relate to the model's, if they fit."""
    names = relate(folder.shapes, model, adapter)
    made = {name: (shape, one.theirs) for one in names.translations for name, shape in one.ours.items()}
    absent = [
        f"{name} (of {', '.join(needed[:3])})" if needed else name
        for name, needed in names.absent.items()
        if not any(other in made for other in tied.get(name, ()))
    ]
    misshapen = [
        f"{name} (folder {tuple(shape)} from {', '.join(theirs[:2])}, here {tuple(model[name].shape)})"
        for name, (shape, theirs) in made.items()
        if shape != model[name].shape
    ]
    types = [
        f"{theirs} ({folder.shapes[theirs].dtype})"
        for one in names.translations
        for theirs in one.theirs
        if any(_other_kind(folder.shapes[theirs], live.get(name)) for name in one.ours)
    ]
    problems = [
        (absent, "parameters of this model are missing in the folder"),
        (sorted(names.unknown), "tensors in the folder are unknown to this model"),
        (misshapen, "tensors have another shape"),
        (types, "tensors are of a type that holds no plain weights (quantised?)"),
    ]
    if faults := [
        Fault(str(folder.path), f"{len(found)} {what}: {listed(found)}") for found, what in problems if found
    ]:
        raise ConfigError(faults)
    if names.unused:
        log(
            logger,
            logging.WARNING,
            "%s: %d tensors that this model does not use: %s",
            folder.path,
            len(names.unused),
            listed(names.unused),
        )
    return names


@torch.no_grad()
def _copy(names: Names, folder: HuggingFaceFolder, live: Mapping[str, Any], adapter: BaseStateDictAdapter) -> None:
    changed: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
    for one in names.translations:
        if not one.ours.keys() & live.keys():
            continue
        for name, whole in adapter.from_hf(folder.tensors(one.theirs)).items():
            if name not in live:
                continue
            target = live[name]
            if whole.dtype != target.dtype:
                changed[whole.dtype, target.dtype] += 1
            if isinstance(target, DTensor):
                mesh = target.device_mesh
                coordinate = mesh.get_coordinate()
                if coordinate is None:
                    continue  # this rank is not in the mesh and holds nothing of it
                target.to_local().copy_(local_piece(whole, target.placements, mesh.shape, coordinate))
            else:
                target.copy_(whole)
    for (theirs, ours), count in changed.items():
        exact = (theirs, ours) in _EXACT
        level, how = (logging.INFO, "exactly") if exact else (logging.WARNING, "rounded")
        log(logger, level, "%s: %d tensors become %s of %s, %s", folder.path, count, ours, theirs, how)


def _other_kind(theirs: torch.Tensor, ours: Any) -> bool:
    if ours is None:
        return False
    narrow = theirs.is_floating_point() and theirs.itemsize < 2
    return narrow or theirs.is_floating_point() != ours.is_floating_point()


def tied_names(live: Mapping[str, Any], group: Any = None) -> dict[str, list[str]]:
    """All names of each tensor that has several, the same on every rank. Collective."""
    by_tensor: dict[int, list[str]] = {}
    for name, value in live.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.numel():  # a rank with an empty shard sees no tie; others do
            by_tensor.setdefault(local.data_ptr(), []).append(name)
    mine = {name: names for names in by_tensor.values() if len(names) > 1 for name in names}
    return {name: names for ties in get_platform().all_gather_object(mine, group) for name, names in ties.items()}
