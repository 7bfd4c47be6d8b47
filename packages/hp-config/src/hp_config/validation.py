"""What a whole config must satisfy before anything starts: types, sizes, and fields that must fit together.

In: a trainer config, and the number of processes where it is known. Out: all faults at once, with dotted paths.
Nodes speak for themselves through a method `faults(path)`, and a whole config of other sections than ours through
`layout_faults(world_size)`; this module adds types and cross-field rules.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hp_config.annotations import conforms, describe, is_supported, show, union_members
from hp_config.fields import fields_of
from hp_config.tree import find_nodes, join_path
from hp_protocols.errors import ConfigError, Fault

__all__ = ["check_layout", "find_faults", "validate_config"]


def validate_config(config: Any, world_size: int | None = None) -> None:
    """Check a config from any source.

    Args:
        config: a trainer config; sections it lacks are not checked.
        world_size: the number of processes; None skips what depends on it.

    Raises:
        ConfigError: with every fault that was found.
    """
    faults = find_faults(config, world_size)
    if faults:
        raise ConfigError(faults)


def find_faults(config: Any, world_size: int | None = None, unsure: Collection[str] = ()) -> list[Fault]:
    """All faults of a config.

    Args:
        config: a trainer config.
        world_size: the number of processes; None skips what depends on it.
        unsure: paths whose value the user meant to change but mistyped. Rules that read them are skipped, so that
            one slip is not reported as two.
    """
    doubtful = set(unsure)
    faults: list[Fault] = []
    for path, node in find_nodes(config):
        wrong = [fault for fault in _type_faults(path, node) if fault.where not in doubtful]
        if not wrong and hasattr(node, "faults"):
            wrong = [fault for fault in node.faults(path) if fault.where not in doubtful]
        faults += wrong
    doubtful.update(fault.where for fault in faults)
    for rule in _RULES:
        if not any(path in doubtful or _is_missing(config, path) for path in rule.reads):
            # A rule that comes later may find the same again.
            found = {fault.where for fault in faults}
            faults += [fault for fault in rule.check(config, world_size) if fault.where not in found]
    # A config with degrees of its own says itself what they need; degrees in doubt fit nothing.
    if world_size is not None and not doubtful and hasattr(config, "layout_faults"):
        faults += config.layout_faults(world_size)
    return faults


def check_layout(trainer_config: Any, world_size: int) -> list[Fault]:
    """Whether the degrees of `trainer_config.parallelism` make up `world_size` processes."""
    degrees = _Degrees.of(trainer_config)
    if degrees.shard != -1:
        if degrees.product == world_size:
            return []
        return [
            Fault(
                "parallelism",
                f"{degrees} = {degrees.product}, but the run has {_processes(world_size)}",
                allowed="degrees whose product is the number of processes (data_parallel_shard_degree=-1 fits itself)",
                hint=f"--nproc {degrees.product}",
            )
        ]
    if world_size % degrees.others == 0:
        return []
    return [
        Fault(
            "parallelism",
            f"{degrees} needs a multiple of {degrees.others} processes, but the run has {_processes(world_size)}",
            hint=f"--nproc {math.ceil(world_size / degrees.others) * degrees.others}",
        )
    ]


@dataclass(frozen=True, slots=True)
class _Degrees:
    """The degrees that enter the product; expert parallelism borrows its ranks from shard and tensor."""

    replicate: int
    shard: int
    tensor: int
    context: int
    pipeline: int

    @classmethod
    def of(cls, config: Any) -> _Degrees:
        section = config.parallelism
        return cls(
            section.data_parallel_replicate_degree,
            section.data_parallel_shard_degree,
            section.tensor_parallel_degree,
            section.context_parallel_degree,
            section.pipeline_parallel_degree,
        )

    @property
    def others(self) -> int:
        return self.replicate * self.tensor * self.context * self.pipeline

    @property
    def product(self) -> int:
        return self.others * self.shard

    def data_parallel(self, world_size: int | None) -> int | None:
        """Ranks that read different rows; None while the number of processes is open or does not fit."""
        if self.shard != -1:
            return self.replicate * self.shard
        if world_size is None or world_size % self.others:
            return None
        return world_size // (self.others // self.replicate)

    def __str__(self) -> str:
        named = {
            "data_parallel_replicate_degree": self.replicate,
            "data_parallel_shard_degree": self.shard,
            "tensor_parallel_degree": self.tensor,
            "context_parallel_degree": self.context,
            "pipeline_parallel_degree": self.pipeline,
        }
        shown = {name: value for name, value in named.items() if value != 1} or {
            "data_parallel_shard_degree": self.shard
        }
        return " x ".join(f"{name} {value}" for name, value in shown.items())


def _check_world(config: Any, world_size: int | None) -> list[Fault]:
    return [] if world_size is None else check_layout(config, world_size)


def _check_batch(config: Any, world_size: int | None) -> list[Fault]:
    training, degrees = config.training, _Degrees.of(config)
    if training.global_batch_size == -1:
        return []
    ranks = degrees.data_parallel(world_size)
    # While the number of processes is open, the replicas alone already have to divide the batch.
    rows = training.local_batch_size * (degrees.replicate if ranks is None else ranks)
    if training.global_batch_size % rows == 0:
        return []
    parallel = f"data-parallel degree {ranks}" if ranks else f"data_parallel_replicate_degree {degrees.replicate}"
    near = max(1, round(training.global_batch_size / rows)) * rows
    return [
        Fault(
            "training.global_batch_size",
            f"{training.global_batch_size} rows cannot be shared out: training.local_batch_size "
            f"{training.local_batch_size} x {parallel} = {rows}",
            allowed=f"a multiple of {rows}, or -1 for exactly that",
            hint=f"the nearest is {near}",
        )
    ]


def _check_sequence(config: Any, world_size: int | None) -> list[Fault]:
    degrees, section = _Degrees.of(config), config.parallelism
    tensor = degrees.tensor if section.enable_sequence_parallel else 1
    divisor = degrees.context * tensor
    if config.training.seq_len % divisor == 0:
        return []
    parts = {"context_parallel_degree": degrees.context, "tensor_parallel_degree": tensor}
    product = " x ".join(f"{name} {value}" for name, value in parts.items() if value > 1)
    return [
        Fault(
            "training.seq_len",
            f"{config.training.seq_len} tokens cannot be cut into {divisor} equal parts ({product})",
            allowed=f"a multiple of {divisor}",
            hint=f"the nearest is {max(1, round(config.training.seq_len / divisor)) * divisor}",
        )
    ]


def _check_model(config: Any, world_size: int | None) -> list[Fault]:
    """What the model says of the run; only models of our protocol say anything."""
    run_faults = getattr(config.model_spec.model, "run_faults", None)
    return [] if run_faults is None else run_faults(trainer_config=config)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule over several fields; it runs only where all the fields it reads exist and are sound."""

    check: Callable[[Any, int | None], list[Fault]]
    reads: Sequence[str]


_DEGREES = (
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.context_parallel_degree",
    "parallelism.pipeline_parallel_degree",
)
_RULES = (
    _Rule(_check_world, _DEGREES),
    _Rule(_check_batch, (*_DEGREES, "training.global_batch_size", "training.local_batch_size")),
    _Rule(_check_sequence, (*_DEGREES, "parallelism.enable_sequence_parallel", "training.seq_len")),
    _Rule(
        _check_model,
        (*_DEGREES, "parallelism.enable_sequence_parallel", "training.seq_len", "model_spec.model"),
    ),
)


def _is_missing(config: Any, path: str) -> bool:
    node = config
    for name in path.split("."):
        if not hasattr(node, name):
            return True
        node = getattr(node, name)
    return False


def _type_faults(path: str, node: Any) -> list[Fault]:
    """Fields of one node that hold a value of another type than they declare."""
    return [
        Fault(join_path(path, info.name), f"expected {describe(info.annotation)}, got {show(value)}")
        for info in fields_of(type(node)).values()
        if _is_checkable(info.annotation) and not conforms(info.annotation, value := getattr(node, info.name))
    ]


def _is_checkable(annotation: Any) -> bool:
    """Whether `conforms` can judge: readable types, config classes, and unions of them."""
    return annotation is not None and all(
        is_supported(member) or (isinstance(member, type) and dataclasses.is_dataclass(member))
        for member in union_members(annotation)
    )


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
