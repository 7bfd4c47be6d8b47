"""The older YAML in the words of the shared components: one algorithm, two ways in.

In: a `HyperTrainerConfig`. Out: `Sections`, the configs that HyperTrainer's parts are built from, which parallelize
functions read too.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from hp_components import (
    CheckpointManager,
    CrossEntropyLoss,
    LRSchedulersContainer,
    MetricsProcessor,
    OptimizersContainer,
    Profiler,
)
from hp_components.optimizer_kinds import find_kind, kind_names, name_fault
from hp_config import (
    ActivationCheckpointConfig,
    CommConfig,
    CompileConfig,
    DebugConfig,
    HyperTrainerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from hp_protocols.errors import Fault, nearest

__all__ = ["Sections", "in_older_words", "make_sections"]


@dataclass(frozen=True, slots=True)
class Sections:
    """What a run is made of, without model and data."""

    training: TrainingConfig
    parallelism: ParallelismConfig
    activation_checkpoint: ActivationCheckpointConfig
    compile: CompileConfig
    comm: CommConfig
    debug: DebugConfig
    optimizer: OptimizersContainer.Config
    lr_scheduler: LRSchedulersContainer.Config
    loss: CrossEntropyLoss.Config
    checkpoint: CheckpointManager.Config
    metrics: MetricsProcessor.Config
    profiler: Profiler.Config


def make_sections(args: HyperTrainerConfig) -> tuple[Sections, list[Fault]]:
    """The sections, and what in them the components refuse, under the older names."""
    train = args.train
    optimizer, faults = _optimizer(train.optimizer)
    sections = Sections(
        training=_training(args),
        parallelism=_parallelism(train.accelerator),
        activation_checkpoint=ActivationCheckpointConfig(mode=_recomputation(train.gradient_checkpointing)),
        compile=CompileConfig(),
        comm=CommConfig(),
        debug=DebugConfig(
            seed=train.seed,
            deterministic=train.debug.deterministic,
            deterministic_warn_only=train.debug.deterministic_warn_only,
        ),
        optimizer=optimizer,
        lr_scheduler=_schedule(args),
        loss=CrossEntropyLoss.Config(),
        checkpoint=CheckpointManager.Config(
            interval=train.checkpoint.save_steps,
            keep_latest_k=0,
            async_mode="async" if train.checkpoint.save_async else "disabled",
        ),
        metrics=MetricsProcessor.Config(log_freq=train.logging.log_steps, peak_tflops=train.logging.peak_tflops),
        profiler=_profiler(train.profile),
    )
    faults += [] if faults else map(in_older_words, sections.optimizer.faults("optimizer"))
    return sections, faults


def _training(args: HyperTrainerConfig) -> TrainingConfig:
    train, mixed = args.train, args.train.mixed_precision
    return TrainingConfig(
        steps=train.max_steps,
        seq_len=args.data.max_seq_len,
        local_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
        max_norm=train.optimizer.max_grad_norm,
        dtype="float32",
        mixed_precision_param=mixed.param_dtype if mixed.enabled else "float32",
        mixed_precision_reduce=mixed.reduce_dtype if mixed.enabled else "float32",
        gc_freq=train.debug.gc_steps or TrainingConfig().gc_freq,
    )


def _parallelism(accelerator: Any) -> ParallelismConfig:
    reshard = {2: "never", 3: "always", 0: "default" if accelerator.reshard_after_forward else "never"}
    return ParallelismConfig(
        data_parallel_replicate_degree=accelerator.dp_replicate,
        data_parallel_shard_degree=accelerator.shard_degree,
        fsdp_reshard_after_forward=reshard.get(accelerator.zero_stage, "default"),  # type: ignore[arg-type]
        tensor_parallel_degree=accelerator.tp,
        context_parallel_degree=accelerator.cp,
        # The bare model leaves activations whole between its matrices.
        enable_sequence_parallel=False,
    )


def _recomputation(section: Any) -> Any:
    return "none" if section.activation_checkpoint == "off" else section.activation_checkpoint


def _optimizer(section: Any) -> tuple[OptimizersContainer.Config, list[Fault]]:
    """A class of torch.optim in any case of letters; what it does not take is refused if it was set."""
    by_lower = {name.lower(): name for name in kind_names()}
    name = by_lower.get(section.type.lower())
    if name is None:
        wrong = name_fault(section.type, "train.optimizer.type")
        near = nearest(section.type.lower(), by_lower)
        hint = f"did you mean {near}?" if near else None
        allowed = ", ".join(sorted(by_lower))
        problem = f"{section.type!r} is no optimizer" if wrong is None else wrong.problem
        return OptimizersContainer.Config(), [Fault("train.optimizer.type", problem, allowed, hint)]
    # A default that the optimizer has no use for was asked for by nobody.
    kind, older = find_kind(name), type(section)()
    given = {
        field: getattr(section, field)
        for field in ("betas", "eps", "weight_decay")
        if kind.takes_field(field) or getattr(section, field) != getattr(older, field)
    }
    return OptimizersContainer.Config(name=name, lr=section.lr, **given), []


def in_older_words(fault: Fault) -> Fault:
    """A fault of a shared component, with the paths that the older file has."""

    def translate(text: str | None) -> str | None:
        for newer, older in _OLDER_NAMES.items():
            # Not within a longer path, such as train.optimizer.
            text = None if text is None else re.sub(rf"(?<![\w.]){re.escape(newer)}(?=[.,;)\s=]|$)", older, text)
        return text

    where = translate(fault.where) or fault.where
    return Fault(where, fault.problem, fault.allowed, translate(fault.hint))


_OLDER_NAMES = {
    "dump_folder": "train.checkpoint.output_dir",
    "dataloader.dataset_path": "data.train_path",
    "dataloader.dataset": "data.train_path",
    "dataloader.epochs": "train.num_train_epochs",
    "dataloader.on_too_long": "data.max_seq_len",
    "dataloader.split": "data.train_path",
    "dataloader": "data",
    "validation.dataloader": "train.eval.eval_dataset",
    "training.seq_len": "data.max_seq_len",
    "training.steps": "train.max_steps",
    "tokenizer.tokenizer_path": "model.tokenizer_path",
    "tokenizer.vocab_size": "model.vocab_size",
    "model spec": "model.name",
    "optimizer.name": "train.optimizer.type",
    "optimizer": "train.optimizer",
    "lr_scheduler.lr_min": "train.optimizer.lr_min",
    "checkpoint.initial_load_in_hf": "model.weights_path",
    "checkpoint.initial_load_model_only": "train.checkpoint.load_path",
    "checkpoint.initial_load_path": "train.checkpoint.load_path",
    "checkpoint.last_save_in_hf": "train.checkpoint.save_hf_weights",
    "checkpoint.load_step": "train.checkpoint.load_path",
    "checkpoint.async_mode": "train.checkpoint.save_async",
    "metrics.enable_tensorboard": "train.tensorboard.enabled",
    "metrics.enable_wandb": "train.wandb.enabled",
    "metrics.log_freq": "train.logging.log_steps",
    "metrics.peak_tflops": "train.logging.peak_tflops",
    "parallelism": "train.accelerator",
}


def _schedule(args: HyperTrainerConfig) -> LRSchedulersContainer.Config:
    section, steps = args.train.optimizer, args.train.max_steps
    constant = section.lr_decay_style == "constant"
    return LRSchedulersContainer.Config(
        warmup_steps=math.ceil(steps * section.lr_warmup_ratio),
        decay_type=section.lr_decay_style,
        lr_min=None if constant else section.lr_min,
    )


def _profiler(section: Any) -> Profiler.Config:
    """One recording, after the steps to wait and to warm up."""
    return Profiler.Config(
        enable_profiling=section.enabled,
        profile_freq=section.wait_steps + section.warmup_steps + section.active_steps,
        profiler_warmup=section.warmup_steps,
        profiler_active=section.active_steps,
        profiler_repeat=1,
    )
