"""Whether ranks that hold the same part of a parameter hold the same bits; a checkpoint keeps one copy and cannot tell.

In: a trainer that has trained. Out: a digest of each part on this rank; and, from those of all ranks, what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from hp_compile import distributed_view
from hp_trainer import HyperTrainer, LLMTrainer

__all__ = ["differing_copies", "digests"]


def digests(trainer: HyperTrainer | LLMTrainer) -> dict[str, str]:
    """`name[axis index …]` of each part of a parameter on this rank → a digest of its bytes."""
    graph = isinstance(trainer, HyperTrainer) and trainer.config.compile.mode == "graph"
    module = trainer.model.module if isinstance(trainer, HyperTrainer) else trainer.model
    found = {}
    for name, parameter in module.named_parameters():
        # Graph Mode's parameters are plain shards.
        value = distributed_view(parameter) if graph else parameter
        found[f"{name}{part_of(value)}"] = digest(value.to_local() if isinstance(value, DTensor) else value)
    if not found:
        raise RuntimeError("the model has no parameter, so no copies could be compared")
    return found


def part_of(value: torch.Tensor) -> str:
    """Which part of the whole it is: this rank's index on each axis that cuts it."""
    if not isinstance(value, DTensor):
        return ""
    mesh = value.device_mesh
    places = zip(mesh.mesh_dim_names or (), value.placements, mesh.get_coordinate() or (), strict=True)
    # Anything but a copy counts as a cut, also what cuts in strides.
    cuts = [f"{axis} {index}" for axis, placement, index in places if not placement.is_replicate()]
    return f"[{', '.join(cuts)}]" if cuts else ""


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def differing_copies(per_rank: Iterable[Mapping[str, str]], replicas: int = 1) -> list[str]:
    """The parts of which two ranks have different bits, or which fewer ranks have than there are replicas."""
    seen: dict[str, list[str]] = {}
    for parts in per_rank:
        for name, value in parts.items():
            seen.setdefault(name, []).append(value)
    if not seen:
        return ["no rank has any part"]
    few = [f"{name} is on {len(values)} ranks only" for name, values in seen.items() if len(values) < replicas]
    return [name for name, values in seen.items() if len(set(values)) > 1] + few
