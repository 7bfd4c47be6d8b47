"""The sections that every trainer config shares: training, parallelism, compile and their siblings.

In: plain Python values (torch is not needed). Out: dataclasses with torchtitan's field names and meanings
(May 2026), each able to list its own faults. Deviations from torchtitan are named where they stand.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from hp_config.availability import not_yet_faults
from hp_protocols.errors import Fault

__all__ = [
    "ActivationCheckpointConfig",
    "CommConfig",
    "CompileConfig",
    "DType",
    "DebugConfig",
    "ParallelismConfig",
    "TrainingConfig",
]

DType = Literal["bfloat16", "float32", "float16"]
"""Names of the floating-point types a run may use; `TORCH_DTYPE_MAP` maps them to torch's."""


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """Sizes of a run: how many steps, of what batch, in what precision."""

    steps: int = 10000
    """Optimizer steps of the whole run; a resumed run goes on to this total."""

    seq_len: int = 2048
    """Tokens in one row of a batch."""

    local_batch_size: int = 8
    """Rows that one data-parallel rank computes at once (one micro-batch)."""

    global_batch_size: int = -1
    """Rows of one optimizer step over all ranks; -1 means local_batch_size x data-parallel degree, a larger
    multiple of that accumulates gradients over several micro-batches."""

    max_norm: float = 1.0
    """Gradients are scaled down to this global norm; inf measures the norm without clipping."""

    dtype: DType = "float32"
    """Type in which parameters, gradients and optimizer state are kept."""

    mixed_precision_param: DType = "bfloat16"
    """Type in which parameters are gathered and computed with; the kept ones stay in `dtype`."""

    mixed_precision_reduce: DType = "float32"
    """Type in which gradients are summed over ranks."""

    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses (FSDP)."""

    gc_freq: int = 50
    """Python's garbage is collected every so many steps, on all ranks at the same step."""

    def faults(self, path: str) -> list[Fault]:
        """Sizes that no run could have."""
        faults = _too_small(self, path, 1, "steps", "seq_len", "local_batch_size", "gc_freq")
        if self.global_batch_size != -1 and self.global_batch_size < 1:
            faults.append(
                Fault(
                    f"{path}.global_batch_size",
                    f"{self.global_batch_size} is not a batch size",
                    allowed="at least 1, or -1 for local_batch_size x data-parallel degree",
                )
            )
        if not self.max_norm > 0:
            faults.append(
                Fault(
                    f"{path}.max_norm",
                    f"{self.max_norm} would erase every gradient",
                    allowed="more than 0",
                    hint="inf measures the norm without clipping",
                )
            )
        return faults + not_yet_faults(self, path)


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    """How the processes of a run share the work; the product of the degrees is the number of processes."""

    data_parallel_replicate_degree: int = 1
    """Copies of the weights: with a shard degree of 1 plain replication (DDP), otherwise HSDP; 1 is off."""

    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of the weights (FSDP); -1 takes the processes that the other degrees leave."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after the forward pass: always, never, or (default) always unless pipeline
    parallelism is on."""

    tensor_parallel_degree: int = 1
    """Ranks that share each weight matrix; 1 is off."""

    enable_sequence_parallel: bool = True
    """Under tensor parallelism, shard the activations between the matrices along the sequence."""

    disable_loss_parallel: bool = False
    """Under tensor parallelism, gather the logits before the loss instead of computing it on shards."""

    context_parallel_degree: int = 1
    """Ranks that share each sequence; 1 is off."""

    pipeline_parallel_degree: int = 1
    """Ranks that each hold a stretch of the layers; 1 is off."""

    expert_parallel_degree: int = 1
    """Ranks that share the experts; they are taken from the shard and tensor ranks, so this degree does not
    enter the product."""

    def faults(self, path: str) -> list[Fault]:
        """Degrees below 1, and the kinds of parallelism that cannot be had yet."""
        faults = _too_small(
            self,
            path,
            1,
            "data_parallel_replicate_degree",
            "tensor_parallel_degree",
            "context_parallel_degree",
            "pipeline_parallel_degree",
            "expert_parallel_degree",
        )
        shard = self.data_parallel_shard_degree
        if shard != -1 and shard < 1:
            faults.append(
                Fault(
                    f"{path}.data_parallel_shard_degree",
                    f"{shard} is not a degree",
                    allowed="at least 1, or -1 for the processes that are left",
                )
            )
        # A degree of 0 is one mistake, not two.
        wrong = {fault.where for fault in faults}
        return faults + [fault for fault in not_yet_faults(self, path) if fault.where not in wrong]


@dataclass(kw_only=True, slots=True)
class ActivationCheckpointConfig:
    """Which activations are computed again in the backward pass instead of kept."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "selective"
    """none keeps all, full keeps only each block's input, selective also keeps the costly results inside."""

    preserve_rng_state: bool = True
    """Recompute under the random state of the first pass, so that dropout draws the same; costs a little."""

    determinism_check: Literal["default", "none"] = "default"
    """default compares shape, type and device of recomputed tensors with the first pass; none does not."""

    early_stop: bool = False
    """Stop a recomputation as soon as everything that the backward pass needs is there."""

    debug: bool = False
    """Record where each recomputed operation was called, to explain a mismatch; slow."""

    def faults(self, path: str) -> list[Fault]:
        """Modes that cannot be had yet."""
        return not_yet_faults(self, path)


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    """Whether and how the step is compiled (torchtitan's `enable` and `components` are `mode` here)."""

    mode: Literal["none", "blocks", "graph"] = "none"
    """none runs eagerly, blocks compiles each transformer block, graph the whole step with hp-compile."""

    backend: str = "inductor"
    """torch.compile's backend for blocks."""

    def faults(self, path: str) -> list[Fault]:
        """Modes that cannot be had yet, and a backend without a name."""
        faults = not_yet_faults(self, path)
        if not self.backend.strip():
            faults.append(
                Fault(f"{path}.backend", "the name is empty", allowed="a torch.compile backend, e.g. inductor")
            )
        return faults


@dataclass(kw_only=True, slots=True)
class CommConfig:
    """Communication between processes."""

    init_timeout_seconds: int = 300
    """How long a collective may take until the first step is done (start-up, compilation)."""

    train_timeout_seconds: int = 100
    """How long a collective may take from then on."""

    def faults(self, path: str) -> list[Fault]:
        """Timeouts below one second."""
        return _too_small(self, path, 1, "init_timeout_seconds", "train_timeout_seconds") + not_yet_faults(self, path)


@dataclass(kw_only=True, slots=True)
class DebugConfig:
    """Reproducibility and looking inside."""

    seed: int | None = None
    """Seed of initialisation, data order and dropout; without one, a fresh seed is drawn and recorded."""

    deterministic: bool = False
    """Only use operations that give the same bits each time; slower."""

    deterministic_warn_only: bool = False
    """Under `deterministic`, warn about an operation that has no such form instead of stopping."""

    detect_anomaly: bool = False
    """Let autograd name the operation that first made a NaN; slow."""

    print_config: bool = False
    """Print the resolved configuration before the first step."""

    def faults(self, path: str) -> list[Fault]:
        """A seed that no generator takes, and a warning mode without the mode it belongs to."""
        faults = not_yet_faults(self, path)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            faults.append(Fault(f"{path}.seed", f"{self.seed} is not a seed", allowed="0 to 2**63 - 1"))
        if self.deterministic_warn_only and not self.deterministic:
            faults.append(
                Fault(
                    f"{path}.deterministic_warn_only",
                    f"has no effect without {path}.deterministic",
                    hint=f"set {path}.deterministic too",
                )
            )
        return faults


def _too_small(section: Any, path: str, minimum: int, *names: str) -> list[Fault]:
    """One `Fault` per named field of `section` that lies below `minimum`."""
    known = {f.name for f in dataclasses.fields(section)}
    assert known.issuperset(names), sorted(set(names) - known)
    return [
        Fault(f"{path}.{name}", f"{getattr(section, name)} is too small", allowed=f"at least {minimum}")
        for name in names
        if getattr(section, name) < minimum
    ]
