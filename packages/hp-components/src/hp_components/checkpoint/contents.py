"""What a checkpoint holds, as torch.distributed.checkpoint sees it, and whether it fits what is to be loaded.

In: model parts, optimizers, other states. Out: `model.*` and `optimizer.*` (tensors, resharded on load),
`hyperparameters.*`, `states.*` and `rng.*` (opaque), and a list of everything that does not fit.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from hp_components._rank_zero import log
from hp_protocols.errors import Fault

__all__ = ["ModelParts", "compare", "listed", "pack", "split_optimizer_state", "tell_new_hyperparameters", "unpack"]

logger = logging.getLogger(__name__)

_SHOWN = 8


class ModelParts:
    """The parts of one model as a single state under canonical names, without the wrappers' infixes."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts = list(parts)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and persistent buffers: the live tensors, not copies."""
        merged: dict[str, Any] = {}
        for part in self.parts:
            state = get_model_state_dict(part)
            if twice := merged.keys() & state.keys():
                raise ValueError(f"two model parts have the same parameter names: {sorted(twice)[:3]}")
            merged.update(state)
        return merged

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the values into the parts."""
        for part in self.parts:
            own = get_model_state_dict(part).keys()
            set_model_state_dict(part, {name: state_dict[name] for name in own})


def split_optimizer_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors, everything else). A group's hyperparameters are listed for each of its parameters: as pieces of their
    own they would be most of a checkpoint's entries, and most of the time of a save."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def tell_new_hyperparameters(own: Set[str], saved: Set[str], where: str) -> None:
    """Say which hyperparameters only one side has: a release of torch may add some and drop others."""
    for names, what in (
        (own - saved, "not in the checkpoint, this run's are used"),
        (saved - own, "in the checkpoint, not used"),
    ):
        if names:
            kinds = sorted({name.rsplit(".", 1)[-1] for name in names})
            log(logger, logging.WARNING, "%s: hyperparameters %s: %s", where, what, ", ".join(kinds))


def pack(name: str, state: Any) -> bytes:
    """A state as opaque bytes, which load without running code.

    torch.distributed.checkpoint looks into dicts and lists and then demands the same structure on load; the
    state of a dataloader may well have changed its structure.

    Raises:
        TypeError: the state holds more than tensors, numbers, strings, bytes and containers of these.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    packed = buffer.getvalue()
    try:
        unpack(packed)
    except Exception as error:
        raise TypeError(
            f"the state {name!r} cannot be saved: a checkpoint holds tensors, numbers, strings, bytes and "
            f"containers of these; torch says: {error}"
        ) from error
    return packed


def unpack(packed: bytes) -> Any:
    """The state that `pack` was given; tensors on the cpu."""
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)


def compare(
    wanted: Mapping[str, Any], everywhere: Set[str], metadata: Metadata, where: str, prefixes: tuple[str, ...]
) -> list[Fault]:
    """Compare what is to be loaded with what the checkpoint holds, without reading tensors.

    Args:
        wanted: this rank's flat state dict.
        everywhere: the names that any rank wants.
        metadata: the checkpoint's.
        where: the checkpoint, for the faults.
        prefixes: the parts to compare (`model.`, `optimizer.`); within them nothing may be missing or left over.

    Returns:
        One fault each for missing, left-over and misshapen names.
    """
    saved = metadata.state_dict_metadata
    missing = [name for name in wanted if name not in saved and name.startswith(prefixes)]
    extra = [name for name in saved if name not in everywhere and name.startswith(prefixes)]
    # Hyperparameters as entries of their own: another program's checkpoint. This run's config decides anyway.
    foreign = {name for name in extra if name.startswith("optimizer.param_groups.")}
    extra = [name for name in extra if name not in foreign]
    tell_new_hyperparameters(set(), foreign, where)
    misshapen, converted = _misfits(wanted, saved)
    if converted:
        log(logger, logging.WARNING, "%s: %d tensors change type: %s", where, len(converted), listed(converted))
    problems = [
        f"{len(names)} {problem}: {listed(names)}"
        for names, problem in (
            (missing, "names of this run are missing in the checkpoint"),
            (extra, "names in the checkpoint are unknown to this run"),
            (misshapen, "tensors have another shape"),
        )
        if names
    ]
    hints = [None] * (len(problems) - 1) + [_HINT]
    return [Fault(where, problem, hint=hint) for problem, hint in zip(problems, hints, strict=False)]


def _misfits(wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(tensors of another shape, tensors of another type), each with both."""
    shapes, types = [], []
    for name, value in wanted.items():
        entry = saved.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
            continue
        if tuple(entry.size) != tuple(value.shape):
            shapes.append(f"{name} (checkpoint {tuple(entry.size)}, here {tuple(value.shape)})")
        elif entry.properties.dtype != value.dtype:
            types.append(f"{name} ({entry.properties.dtype} → {value.dtype})")
    return shapes, types


_HINT = (
    "resume with the model and optimizer that saved it (resolved.yaml in the run folder), or use a new --dump_folder"
)


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
