"""Which values of the older YAML are out of range, or name something that does not exist here.

In: a section and its path. Out: `Fault`s. The older trainer accepted all of these and ignored them in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hp_protocols.errors import Fault

__all__ = ["section_faults"]

_NEEDS_VISION = "acts only with data.type: vl_dummy, which needs a vision model; none is available yet"
_NEEDS_EXPERTS = "needs a mixture-of-experts model; none is available yet"

# Section → key → (the values that are accepted, why no other, what to do).
_ONLY: dict[str, dict[str, tuple[tuple[Any, ...], str, str | None]]] = {
    "ModelConfig": {
        "ep_modules": ((None, []), _NEEDS_EXPERTS, "remove the key"),
    },
    "DataConfig": {
        "type": (
            ("dummy", "hf_datasets", "json_file", "preset_pt"),
            "needs a vision model; none is available yet",
            "dummy gives random text tokens",
        ),
        "image_key": (("image",), _NEEDS_VISION, "remove the key"),
        "image_token_id": ((151655,), _NEEDS_VISION, "remove the key"),
        "vl_grid_t": ((2,), _NEEDS_VISION, "remove the key"),
        "vl_grid_h": ((2,), _NEEDS_VISION, "remove the key"),
        "vl_grid_w": ((2,), _NEEDS_VISION, "remove the key"),
        "streaming": (
            (False,),
            "a stream cannot be resumed exactly, so it is not read here",
            "local files are read without being held in memory: streaming: false",
        ),
        "template": (("empty", "default"), "is not a template", None),
    },
    "AcceleratorConfig": {
        "pp": ((1,), "pipeline parallelism is not available yet", "dp_shard shards the weights meanwhile"),
        "ep": ((1,), _NEEDS_EXPERTS, "ep: 1"),
        "etp": ((1,), _NEEDS_EXPERTS, "etp: 1"),
        "zero_stage": (
            (0, 2, 3),
            "sharding the optimizer alone is not offered",
            "2 keeps weights gathered until backward, 3 gathers them twice; dp_replicate shards nothing",
        ),
        "async_cp": ((False,), "overlapped context parallelism is not available yet", "async_cp: false"),
        "ulysses_degree": (
            (None, 1),
            "head-parallel context parallelism is not available yet",
            "cp splits the sequence and gathers keys and values",
        ),
        "comm_fusion": ((True,), "weights always travel one transformer block at a time", "comm_fusion: true"),
    },
    "OptimizerConfig": {
        "bsz_warmup_ratio": ((0.0,), "a growing batch size is not available yet", "lr_warmup_ratio warms up the rate"),
    },
    "MoEMonitorConfig": {
        "enabled": ((False,), _NEEDS_EXPERTS, "enabled: false"),
    },
    "TrainConfig": {
        "backend": (("torch",), "only torch can train here", "backend: torch"),
        "init_device": (("meta", "cpu", "cuda", "npu"), "is not a device that weights can be made on", None),
    },
}

_POSITIVE = {
    "ModelConfig": (
        "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "max_position_embeddings",
    ),
    "DataConfig": ("max_seq_len", "train_size", "prefetch_factor"),
    "AcceleratorConfig": ("dp_replicate", "tp", "cp"),
    "CheckpointConfig": ("save_steps",),
    "LoggingConfig": ("log_steps", "model_flops_per_token", "peak_tflops"),
    "TensorBoardConfig": ("log_steps",),
    "WandbConfig": ("log_steps",),
    "ProfileConfig": ("active_steps",),
    "MemoryMonitorConfig": ("log_steps",),
    "MoEMonitorConfig": ("lr", "num_recomputations"),
    "TrainConfig": ("max_steps", "num_train_epochs", "global_batch_size", "micro_batch_size"),
    "OptimizerConfig": ("max_grad_norm",),
}  # fmt: skip

_NOT_NEGATIVE = {
    "DataConfig": ("num_workers",),
    "OptimizerConfig": ("lr", "lr_min", "lr_warmup_ratio", "weight_decay", "eps"),
    "ProfileConfig": ("wait_steps", "warmup_steps"),
    "EvalConfig": ("eval_steps",),
    "DebugConfig": ("gc_steps",),
    "TrainConfig": ("seed", "local_rank"),
}


_NOT_POSITIVE_HINTS = {
    "max_grad_norm": ".inf measures the norm and clips nothing",
    "save_steps": "a number above max_steps saves at the end only",
}


def section_faults(section: Any, path: str) -> list[Fault]:
    """Everything in one section that is out of range or could not act."""
    name = type(section).__name__
    faults: list[Fault] = []
    for key, (accepted, reason, hint) in _ONLY.get(name, {}).items():
        value = getattr(section, key)
        if value not in accepted:
            allowed = ", ".join("nothing" if item is None else str(item).lower() for item in accepted)
            faults.append(Fault(f"{path}.{key}", f"{value!r}: {reason}", allowed, hint))
    for key in _POSITIVE.get(name, ()):
        # Written so that nan, which compares with nothing, is refused too.
        if (value := getattr(section, key)) is not None and not value > 0:
            faults.append(Fault(f"{path}.{key}", f"{value!r} is not positive", hint=_NOT_POSITIVE_HINTS.get(key)))
    for key in _NOT_NEGATIVE.get(name, ()):
        if not 0 <= (value := getattr(section, key)) < math.inf:
            faults.append(Fault(f"{path}.{key}", f"{value!r} is out of range", "0 or more"))
    return faults + _TOGETHER.get(name, _nothing)(section, path)


def _nothing(section: Any, path: str) -> list[Fault]:
    return []


_WAYS = ("colwise", "rowwise", "replicate")


def _model_together(model: Any, path: str) -> list[Fault]:
    return [
        Fault(f"{path}.tp_plan[{glob}]", f"{way!r} is no way to split a matrix", ", ".join(_WAYS))
        for glob, way in (model.tp_plan or {}).items()
        if way not in _WAYS
    ]


def _data_together(data: Any, path: str) -> list[Fault]:
    faults = []
    if data.type in ("dummy", "vl_dummy"):
        if data.train_path is not None:
            faults.append(Fault(f"{path}.train_path", f"is not read by data.type: {data.type}", hint="type: json_file"))
    elif data.train_path is None:
        faults.append(Fault(f"{path}.train_path", f"is missing; data.type: {data.type} reads it"))
    if data.subset is not None and data.type != "hf_datasets":
        faults.append(Fault(f"{path}.subset", f"is not read by data.type: {data.type}", hint="type: hf_datasets"))
    if data.template == "default" and data.type not in ("json_file", "hf_datasets"):
        faults.append(Fault(f"{path}.template", f"is not read by data.type: {data.type}", hint="template: empty"))
    # Records have one key that is read: their text, or their conversation.
    records = data.type in ("json_file", "hf_datasets")
    for key, standard, read_by in (("text_key", "text", "empty"), ("messages_key", "messages", "default")):
        if getattr(data, key) != standard and not (records and data.template == read_by):
            problem = f"is read only by json_file and hf_datasets with template: {read_by}"
            faults.append(Fault(f"{path}.{key}", problem, hint=f"remove the key, or template: {read_by}"))
    if data.prefetch_factor is not None and data.num_workers == 0:
        faults.append(Fault(f"{path}.prefetch_factor", "acts only with worker processes", hint="num_workers: 1"))
    return faults


def _accelerator_together(accelerator: Any, path: str) -> list[Fault]:
    faults = []
    if accelerator.dp is not None and accelerator.dp_shard is not None and accelerator.dp != accelerator.dp_shard:
        problem = f"{accelerator.dp} contradicts dp_shard: {accelerator.dp_shard}"
        faults.append(Fault(f"{path}.dp", problem, hint="dp is the old name of dp_shard: keep one"))
    for key in ("dp", "dp_shard"):
        value = getattr(accelerator, key)
        if value is not None and value < 1 and value != -1:
            faults.append(Fault(f"{path}.{key}", f"{value} is no degree", "-1 or a positive number"))
    if accelerator.zero_stage in (2, 3) and accelerator.shard_degree == 1:
        problem = f"{accelerator.zero_stage} shards the weights, and dp_shard: 1 leaves nothing to shard"
        faults.append(Fault(f"{path}.zero_stage", problem, hint="zero_stage: 0, or more ranks in dp_shard"))
    if accelerator.zero_stage == 2 and accelerator.reshard_after_forward:
        hint = "reshard_after_forward: false for stage 2, true for stage 3"
        faults.append(Fault(f"{path}.zero_stage", "2 contradicts reshard_after_forward: true", hint=hint))
    if accelerator.zero_stage == 3 and not accelerator.reshard_after_forward:
        hint = "reshard_after_forward: false for stage 2, true for stage 3"
        faults.append(Fault(f"{path}.zero_stage", "3 contradicts reshard_after_forward: false", hint=hint))
    return faults


def _train_together(train: Any, path: str) -> list[Fault]:
    if train.global_batch_size % train.micro_batch_size:
        problem = f"{train.global_batch_size} is not a multiple of micro_batch_size {train.micro_batch_size}"
        return [Fault(f"{path}.global_batch_size", problem)]
    return []


def _precision_together(section: Any, path: str) -> list[Fault]:
    if section.output_dtype is not None and not section.enabled:
        return [Fault(f"{path}.output_dtype", "acts only with enabled: true", hint="enabled: true")]
    return []


def _optimizer_together(optimizer: Any, path: str) -> list[Fault]:
    faults = []
    constant = optimizer.lr_decay_style == "constant"
    if constant and optimizer.lr_min != type(optimizer)().lr_min:
        hint = "remove the key, or lr_decay_style: cosine"
        faults.append(Fault(f"{path}.lr_min", "is never reached with lr_decay_style: constant", hint=hint))
    if optimizer.lr_warmup_ratio > 1:
        faults.append(Fault(f"{path}.lr_warmup_ratio", f"{optimizer.lr_warmup_ratio!r} is more than 1", "0 to 1"))
    if not constant and optimizer.lr_min > optimizer.lr:
        faults.append(Fault(f"{path}.lr_min", f"{optimizer.lr_min!r} is above lr {optimizer.lr!r}"))
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        faults.append(Fault(f"{path}.betas", f"{optimizer.betas} are not between 0 and 1"))
    return faults


def _evaluation_together(section: Any, path: str) -> list[Fault]:
    if section.eval_steps and section.eval_dataset is None:
        return [Fault(f"{path}.eval_dataset", f"is missing; eval_steps: {section.eval_steps} evaluates on it")]
    if section.eval_dataset is not None and not section.eval_steps:
        return [Fault(f"{path}.eval_dataset", "is never read with eval_steps: 0", hint="eval_steps: 100")]
    return []


def _debug_together(section: Any, path: str) -> list[Fault]:
    if section.deterministic_warn_only and not section.deterministic:
        where = f"{path}.deterministic_warn_only"
        return [Fault(where, "acts only with deterministic: true", hint="deterministic: true")]
    return []


_TOGETHER: dict[str, Callable[[Any, str], list[Fault]]] = {
    "ModelConfig": _model_together,
    "DataConfig": _data_together,
    "AcceleratorConfig": _accelerator_together,
    "TrainConfig": _train_together,
    "MixedPrecisionConfig": _precision_together,
    "OptimizerConfig": _optimizer_together,
    "EvalConfig": _evaluation_together,
    "DebugConfig": _debug_together,
}
