"""How to partition: the degrees, modes and switches that the passes read.

In: plain values, from code or projected from a trainer's config. Out: a validated `PassConfig`.
Nothing here imports torch or probes a process group: a config states an intent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Final

__all__ = [
    "DP_MODES",
    "PP_SCHEDULES",
    "PassConfig",
    "build_pass_config_from_trainer_config",
    "normalize_dp_mode",
]

DP_MODES: Final[tuple[str, ...]] = ("fsdp", "ddp", "hsdp")
PP_SCHEDULES: Final[tuple[str, ...]] = ("gpipe", "1f1b")
GRAD_REDUCTIONS: Final[tuple[str, ...]] = ("avg", "sum")
REDUCE_MOMENTS: Final[tuple[str, ...]] = ("train_step", "optimizer_step")
DTYPES: Final[tuple[str, ...]] = ("bfloat16", "float16", "float32", "float64")

# Keys are compared without white space and in lower case.
_DP_ALIASES: Final[dict[str, str]] = {
    **{mode: mode for mode in DP_MODES},
    "fully_shard": "fsdp",
    "fullyshard": "fsdp",
    "replicate": "ddp",
    "hybrid_shard": "hsdp",
    "hybridshard": "hsdp",
}


def normalize_dp_mode(value: str) -> str:
    """The canonical name of a data-parallel mode; ignores case and white space.

    Raises:
        ValueError: the mode is unknown; the text lists modes and aliases.
    """
    if isinstance(value, str):
        mode = _DP_ALIASES.get("".join(value.split()).lower())
        if mode is not None:
            return mode
    raise ValueError(
        f"dp_mode={value!r} is not a data-parallel mode; allowed: {', '.join(DP_MODES)} "
        "(aliases: fully_shard = fsdp, replicate = ddp, hybrid_shard = hsdp)"
    )


@dataclass
class PassConfig:
    """How a captured step is partitioned and scheduled; checked when built and by `validate()`.

    Attributes:
        enable_overlap: run the overlap pass.
        fsdp_enabled: run the data-parallel pass. An intent only: the pass itself steps aside where
            torch.distributed is not initialised or the data-parallel group is one rank.
        fsdp_reshard_after_forward: free gathered parameters after forward and gather them again for
            backward; False keeps them for the whole step.
        fsdp_degree: size of the shard axis; None is resolved at run time (mesh context, else world).
        dp_mode: `fsdp` (shard), `ddp` (replicate) or `hsdp` (both); aliases are accepted.
        dp_replicate_degree: size of the replicate axis of ddp and hsdp; None is resolved at run time.
        tp_size, sequence_parallel, loss_parallel: for information; tensor-parallel collectives are
            already inside the captured forward.
        pp_enabled, pp_degree, pp_microbatch_size, pp_schedule: pipeline split. Validated here;
            `GraphTrainer` refuses `pp_enabled` until the pass exists.
        param_dtype, reduce_dtype: mixed precision as FSDP2 means it, by name (`"bfloat16"`).
        grad_reduce: `avg` or `sum` over the data-parallel group.
        bucket_mb: None is one collective per unit, kind and dtype; a number splits at parameter
            boundaries; 0 is one collective per parameter.
        reduce_every: reduce gradients in every `train_step`, or once per `optimizer_step`.
    """

    enable_overlap: bool = True
    fsdp_enabled: bool = True
    fsdp_reshard_after_forward: bool = True
    fsdp_degree: int | None = None
    dp_mode: str = "fsdp"
    dp_replicate_degree: int | None = None
    tp_size: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    pp_enabled: bool = False
    pp_degree: int | None = None
    pp_microbatch_size: int = 1
    pp_schedule: str = "gpipe"
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    grad_reduce: str = "avg"
    bucket_mb: float | None = None
    reduce_every: str = "train_step"

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every field, and bring the names of modes into canonical form.

        Raises:
            ValueError: names the field, the value given and what is allowed.
        """
        for field in fields(self):
            if field.type == "bool" and not isinstance(getattr(self, field.name), bool):
                raise _fault(field.name, getattr(self, field.name), "True or False")
        self.dp_mode = normalize_dp_mode(self.dp_mode)
        self.pp_schedule = _choice("pp_schedule", self.pp_schedule, PP_SCHEDULES)
        self.grad_reduce = _choice("grad_reduce", self.grad_reduce, GRAD_REDUCTIONS)
        self.reduce_every = _choice("reduce_every", self.reduce_every, REDUCE_MOMENTS)
        for name in ("tp_size", "pp_microbatch_size"):
            _positive_int(name, getattr(self, name))
        for name in ("fsdp_degree", "dp_replicate_degree", "pp_degree"):
            if getattr(self, name) is not None:
                _positive_int(name, getattr(self, name), or_none=True)
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(self, name) is not None and getattr(self, name) not in DTYPES:
                raise _fault(name, getattr(self, name), f"None or one of the names {', '.join(DTYPES)}")
        self._validate_bucket()
        self._validate_degrees()

    def _validate_bucket(self) -> None:
        size = self.bucket_mb
        if size is None:
            return
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not math.isfinite(size) or size < 0:
            raise _fault(
                "bucket_mb", size, "None (one collective per unit), 0 (one per parameter) or a size in MiB above 0"
            )

    def _validate_degrees(self) -> None:
        if self.dp_mode == "fsdp" and self.dp_replicate_degree not in (None, 1):
            raise _fault(
                "dp_replicate_degree",
                self.dp_replicate_degree,
                "None or 1 with dp_mode='fsdp'; to shard and replicate, set dp_mode='hsdp'",
            )
        if self.dp_mode == "ddp" and self.fsdp_degree not in (None, 1):
            raise _fault(
                "fsdp_degree",
                self.fsdp_degree,
                "None or 1 with dp_mode='ddp', which shards nothing; to shard and replicate, set dp_mode='hsdp'",
            )


def build_pass_config_from_trainer_config(
    config: Any, *, fsdp_enabled: bool | None = None, enable_overlap: bool = False
) -> PassConfig:
    """Project a trainer's config onto a `PassConfig`.

    Args:
        config: anything with `accelerator.{tp_size, sequence_parallel, loss_parallel}` and
            `fsdp_config.{dp_shard_size, edp_shard_size}`.
        fsdp_enabled: None means "either shard size is above 1".
        enable_overlap: run the overlap pass.

    Raises:
        ValueError: an attribute is missing (its dotted path is named), or a value is not allowed.
    """
    dp_shard_size = _positive_int("fsdp_config.dp_shard_size", _read(config, "fsdp_config.dp_shard_size"))
    edp_shard_size = _positive_int("fsdp_config.edp_shard_size", _read(config, "fsdp_config.edp_shard_size"))
    if fsdp_enabled is None:
        fsdp_enabled = dp_shard_size > 1 or edp_shard_size > 1
    return PassConfig(
        enable_overlap=enable_overlap,
        fsdp_enabled=fsdp_enabled,
        fsdp_degree=dp_shard_size if fsdp_enabled else None,
        tp_size=_read(config, "accelerator.tp_size"),
        sequence_parallel=_read(config, "accelerator.sequence_parallel"),
        loss_parallel=_read(config, "accelerator.loss_parallel"),
    )


def _read(config: Any, path: str) -> Any:
    value = config
    for name in path.split("."):
        if not hasattr(value, name):
            raise ValueError(
                f"trainer config: {path} is missing; allowed: a config with accelerator.tp_size, "
                "accelerator.sequence_parallel, accelerator.loss_parallel, fsdp_config.dp_shard_size "
                "and fsdp_config.edp_shard_size"
            )
        value = getattr(value, name)
    return value


def _fault(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{name}={value!r} is not allowed; allowed: {allowed}")


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in allowed:
        return value
    raise _fault(name, value, ", ".join(repr(choice) for choice in allowed))


def _positive_int(name: str, value: Any, *, or_none: bool = False) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _fault(name, value, "None or an integer of at least 1" if or_none else "an integer of at least 1")
    return value
