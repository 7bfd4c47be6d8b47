"""The callbacks of the older trainer, and which of them a configuration asks for.

In: a trainer that is built but for them. Out: a list in the order of their hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_components import MetricsProcessor
from hp_protocols.errors import ConfigError, Fault
from hp_trainer._legacy.callbacks.base import Callback
from hp_trainer._legacy.callbacks.checkpoint import CheckpointCallback, SafetensorsExportCallback
from hp_trainer._legacy.callbacks.curves import TensorBoardCallback, WandbCallback
from hp_trainer._legacy.callbacks.evaluation import EvalCallback
from hp_trainer._legacy.callbacks.health import GradientHealthCallback, MoEMonitorCallback
from hp_trainer._legacy.callbacks.logging import LoggingCallback
from hp_trainer._legacy.callbacks.profiling import ProfilerCallback
from hp_trainer._legacy.callbacks.progress import ProgressCallback
from hp_trainer._legacy.callbacks.upkeep import GarbageCallback, MemoryMonitorCallback

if TYPE_CHECKING:
    from hp_trainer._legacy.llm_trainer import LLMTrainer

__all__ = [
    "Callback",
    "CheckpointCallback",
    "EvalCallback",
    "GarbageCallback",
    "GradientHealthCallback",
    "LoggingCallback",
    "MemoryMonitorCallback",
    "MoEMonitorCallback",
    "ProfilerCallback",
    "ProgressCallback",
    "SafetensorsExportCallback",
    "TensorBoardCallback",
    "WandbCallback",
    "default_callbacks",
]


def default_callbacks(trainer: LLMTrainer) -> list[Callback]:
    """What the configuration asks for. Records are written before the checkpoint that holds their sums, and reset the
    device's peak behind the monitor that reads it.

    Raises:
        ConfigError: an extra that is not installed, and all else that a part refuses.
    """
    train = trainer.args.train
    tensorboard = train.tensorboard.enabled or train.logging.report_to in ("tensorboard", "all")
    wandb = train.wandb.enabled or train.logging.report_to in ("wandb", "all")
    # Each machine looks for itself, and all hear of it.
    trainer.environment.agree(lambda: _require_extras(tensorboard=tensorboard, wandb=wandb))
    logging = LoggingCallback(trainer)
    checkpoint = CheckpointCallback(trainer, logging)
    callbacks: list[Callback | None] = [
        GradientHealthCallback() if train.debug.check_nan_inf else None,
        MoEMonitorCallback(train.moe_monitor.lr, train.moe_monitor.num_recomputations)
        if train.moe_monitor.enabled
        else None,
        ProgressCallback(),
        MemoryMonitorCallback(trainer) if train.memory_monitor.enabled else None,
        logging,
        TensorBoardCallback(trainer) if tensorboard else None,
        WandbCallback(trainer) if wandb else None,
        EvalCallback(trainer) if train.eval.eval_steps else None,
        checkpoint,
        SafetensorsExportCallback(checkpoint) if train.checkpoint.save_hf_weights else None,
        GarbageCallback(train.debug.gc_steps) if train.debug.gc_steps else None,
        ProfilerCallback(trainer) if train.profile.enabled else None,
    ]
    return [callback for callback in callbacks if callback is not None]


def _require_extras(*, tensorboard: bool, wandb: bool) -> None:
    asked = MetricsProcessor.Config(enable_tensorboard=tensorboard, enable_wandb=wandb).machine_faults("metrics")
    names = {"metrics.enable_tensorboard": "train.tensorboard.enabled", "metrics.enable_wandb": "train.wandb.enabled"}
    if asked:
        raise ConfigError([Fault(names[f.where], f.problem, f.allowed, f.hint) for f in asked])
