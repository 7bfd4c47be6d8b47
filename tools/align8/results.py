"""What a finished run says: the numbers of each step, and every tensor of its last checkpoint.

In: a run folder, as `hp train` leaves it. Out: a `Result`; `difference` and `distance` compare two of them.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

__all__ = ["Difference", "Distance", "Result", "difference", "distance", "read_result"]

NUMBERS = ("loss", "grad_norm", "lr", "tokens")
WEIGHTS, OPTIMIZER = "model.", "optimizer."


@dataclass(frozen=True, slots=True)
class Result:
    """`steps`: loss, gradient norm, rate and tokens of each step. `tensors`: weights and optimizer state, whole."""

    steps: list[dict[str, float]]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """Two runs that are not the same: the first step where, by how much at most, and what differs."""

    step: int
    largest: float
    what: str


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two runs are from each other, relative to the second: loss and norm at worst over steps, weights at
    worst over tensors."""

    loss: float
    grad_norm: float
    weights: float

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}, gradient norm {self.grad_norm:.1e}, weights {self.weights:.1e}"

    @property
    def largest(self) -> float:
        return max(self.loss, self.grad_norm, self.weights)


def read_result(run_folder: Path) -> Result:
    """Read metrics.jsonl and the newest checkpoint, with torch's own reader.

    Raises:
        ValueError: a step or a number is missing, or was left out by the trainer; a checkpoint without tensors.
    """
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    if events := [line for line in lines if "event" in line]:
        raise ValueError(f"metrics.jsonl tells of {events}")
    if [line["step"] for line in lines] != list(range(1, len(lines) + 1)):
        raise ValueError("metrics.jsonl does not hold every step once")
    for line in lines:
        if wrong := [f"{name} {line[name]!r}" for name in NUMBERS if not isinstance(line[name], int | float)]:
            raise ValueError(f"metrics.jsonl, step {line['step']}: {', '.join(wrong)} is no number")
    checkpoint = run_folder / "checkpoint" / f"step-{len(lines)}"
    return Result([{name: line[name] for name in NUMBERS} for line in lines], read_tensors(checkpoint))


def read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of model and optimizer; both have some."""
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith((WEIGHTS, OPTIMIZER))
    }
    if empty := [kind for kind in (WEIGHTS, OPTIMIZER) if not any(name.startswith(kind) for name in tensors)]:
        raise ValueError(f"{checkpoint.name} has no tensor of {' and '.join(f'{kind}*' for kind in empty)}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    return tensors


def difference(result: Result, reference: Result) -> Difference | None:
    """None where the two are the same to the last bit."""
    if len(result.steps) != len(reference.steps):
        return Difference(0, math.inf, f"{len(result.steps)} steps, not {len(reference.steps)}")
    if names := result.tensors.keys() ^ reference.tensors.keys():
        return Difference(0, math.inf, f"tensors that only one of the two has: {', '.join(sorted(names)[:4])}")
    differing = [
        (step, name, relative(mine[name], theirs[name]))
        for step, (mine, theirs) in enumerate(zip(result.steps, reference.steps, strict=True), start=1)
        for name in NUMBERS
        if mine[name] != theirs[name]
    ]
    differing += [
        (len(result.steps), f"{name}{unlike(tensor, other)}", tensor_distance(tensor, other))
        for name, tensor in result.tensors.items()
        if unlike(tensor, other := reference.tensors[name]) or not torch.equal(tensor, other)
    ]
    if not differing:
        return None
    first = min(step for step, _, _ in differing)
    what = list(dict.fromkeys(name for step, name, _ in differing if step == first))
    return Difference(first, max(size for _, _, size in differing), ", ".join(what[:4]))


def distance(result: Result, reference: Result) -> Distance:
    """The sizes of the differences between two layouts; infinity where there is nothing to subtract."""
    weights = [name for name in reference.tensors if name.startswith(WEIGHTS)]
    if len(result.steps) != len(reference.steps) or not result.tensors.keys() >= set(weights):
        return Distance(math.inf, math.inf, math.inf)

    def worst(name: str) -> float:
        pairs = zip(result.steps, reference.steps, strict=True)
        return max(relative(mine[name], theirs[name]) for mine, theirs in pairs)

    return Distance(
        worst("loss"),
        worst("grad_norm"),
        max(tensor_distance(result.tensors[name], reference.tensors[name]) for name in weights),
    )


def unlike(tensor: torch.Tensor, reference: torch.Tensor) -> str:
    """What makes two tensors incomparable, as a remark behind their name; empty where they can be compared."""
    if tensor.shape == reference.shape and tensor.dtype == reference.dtype:
        return ""
    mine, theirs = (f"{value.dtype} {list(value.shape)}" for value in (tensor, reference))
    return f" ({mine}, not {theirs})"


def relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference) if reference else abs(value)


def tensor_distance(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """‖tensor − reference‖₂ / ‖reference‖₂, or infinity where that is no number."""
    if unlike(tensor, reference):
        return math.inf
    norm = reference.double().norm().item()
    gap = (tensor.double() - reference.double()).norm().item()
    found = gap / norm if norm else gap
    return found if math.isfinite(found) else math.inf
