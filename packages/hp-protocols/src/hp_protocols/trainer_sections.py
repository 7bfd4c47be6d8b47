"""What a model may read of a trainer's config: the sections and fields, as typing protocols.

In: nothing. Out: `TrainerConfig` and its sections. Models type their `update_from_config` and parallelize functions
with them, and so depend on no trainer; any object with these attributes will do. Torch-free.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = [
    "ActivationCheckpointSection",
    "CompileSection",
    "DebugSection",
    "ParallelismSection",
    "TrainerConfig",
    "TrainingSection",
]

# Read-only properties, so that a field of a narrower type (a Literal, an int for a float) satisfies them too.


@runtime_checkable
class TrainingSection(Protocol):
    """Sizes, precision and memory of a step. Dtypes are names (`"bfloat16"`)."""

    @property
    def steps(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def local_batch_size(self) -> int: ...
    @property
    def global_batch_size(self) -> int: ...
    @property
    def max_norm(self) -> float: ...
    @property
    def dtype(self) -> str: ...
    @property
    def mixed_precision_param(self) -> str: ...
    @property
    def mixed_precision_reduce(self) -> str: ...
    @property
    def enable_cpu_offload(self) -> bool: ...


@runtime_checkable
class ParallelismSection(Protocol):
    """The degree of each kind of parallelism."""

    @property
    def data_parallel_replicate_degree(self) -> int: ...
    @property
    def data_parallel_shard_degree(self) -> int: ...
    @property
    def fsdp_reshard_after_forward(self) -> str: ...
    @property
    def tensor_parallel_degree(self) -> int: ...
    @property
    def enable_sequence_parallel(self) -> bool: ...
    @property
    def disable_loss_parallel(self) -> bool: ...
    @property
    def context_parallel_degree(self) -> int: ...
    @property
    def pipeline_parallel_degree(self) -> int: ...
    @property
    def expert_parallel_degree(self) -> int: ...


@runtime_checkable
class ActivationCheckpointSection(Protocol):
    """What is recomputed in backward."""

    @property
    def mode(self) -> str: ...
    @property
    def preserve_rng_state(self) -> bool: ...
    @property
    def determinism_check(self) -> str: ...
    @property
    def early_stop(self) -> bool: ...
    @property
    def debug(self) -> bool: ...


@runtime_checkable
class CompileSection(Protocol):
    """How the step is compiled: `mode` is none, blocks or graph."""

    @property
    def mode(self) -> str: ...
    @property
    def backend(self) -> str: ...


@runtime_checkable
class DebugSection(Protocol):
    """Seed and determinism."""

    @property
    def seed(self) -> int | None: ...
    @property
    def deterministic(self) -> bool: ...


@runtime_checkable
class TrainerConfig(Protocol):
    """The sections of a trainer's config that a model may read."""

    @property
    def training(self) -> TrainingSection: ...
    @property
    def parallelism(self) -> ParallelismSection: ...
    @property
    def activation_checkpoint(self) -> ActivationCheckpointSection: ...
    @property
    def compile(self) -> CompileSection: ...
    @property
    def debug(self) -> DebugSection: ...
