"""CheckpointCallback and SafetensorsExportCallback: the states to go on from, and the weights for transformers.

In: `train.checkpoint`, `model.weights_path`. Out: `<run folder>/checkpoint/step-N` and `step-N-hf`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_protocols.errors import ConfigError, Fault
from hp_trainer._legacy.callbacks.base import Callback
from hp_trainer.faults import activity

if TYPE_CHECKING:
    from hp_components import CheckpointManager
    from hp_protocols import BaseStateDictAdapter
    from hp_trainer._legacy.callbacks.logging import LoggingCallback
    from hp_trainer._legacy.llm_trainer import LLMTrainer
    from hp_trainer.training_step import StepResult

__all__ = ["CheckpointCallback", "SafetensorsExportCallback"]

NO_KEY = "which no key of the older file changes (hp migrate)"


class CheckpointCallback(Callback):
    """Loads before training; saves every `save_steps` and at the end, whatever ended the run."""

    def __init__(self, trainer: LLMTrainer, logging: LoggingCallback) -> None:
        section, place = trainer.args.train.checkpoint, trainer.place
        weights = trainer.args.model.weights_path
        loads_weights = weights is not None and section.load_path is None
        changes: dict[str, Any] = {"load_step": place.load_step, "last_save_in_hf": section.save_hf_weights}
        if loads_weights:
            changes |= {"initial_load_path": weights, "initial_load_in_hf": True}
        elif place.initial_load_path is not None:
            changes |= {"initial_load_path": place.initial_load_path, "initial_load_model_only": False}
        self.source = weights if loads_weights else place.initial_load_path
        translates = loads_weights or section.save_hf_weights
        adapter = trainer.environment.agree(lambda: _adapter(trainer, weights) if translates else None)
        self.manager: CheckpointManager = trainer.sections.checkpoint.replace(**changes).build(
            run_folder=trainer.run_folder.path,
            model_parts=[trainer.model],
            optimizers=trainer.optimizer,
            states={
                "lr_scheduler": trainer.lr_scheduler,
                "dataloader": trainer.dataloader,
                "train_state": trainer.state,
                "metrics": logging.metrics,
            },
            state_dict_adapter=adapter,
            tokenizer=trainer.tokenizer,
        )

    def on_init_end(self, trainer: LLMTrainer) -> None:
        step = self.manager.load()
        if step is not None and self.source is None:
            trainer.notify("on_load", self.manager.folder / f"step-{step}")
        elif self.source is not None:
            trainer.notify("on_load", Path(self.source))

    def on_train_begin(self, trainer: LLMTrainer) -> None:
        self.first_step = trainer.state.step

    def on_step_end(self, trainer: LLMTrainer, result: StepResult) -> None:
        step = trainer.state.step
        if step == self.first_step + 1:
            # Lazy start-up is over; a rank that is late from here on is late for another reason.
            trainer.environment.limit_waiting(
                trainer.sections.comm, leave=self.manager.process_group, name=f"comm.train_timeout_seconds, {NO_KEY}"
            )
        self.manager.poll()
        activity.now("saving a checkpoint")
        if step < trainer.total_steps and self.manager.should_save(step) and self.manager.save(step):
            trainer.notify("on_save", self.manager.folder / f"step-{step}")

    def on_train_end(self, trainer: LLMTrainer) -> None:
        step = trainer.state.step
        activity.now("saving the last checkpoint")
        trainer.saved = self.manager.save(step, force=True)
        trainer.notify("on_save", self.manager.folder / f"step-{step}")

    def close(self, trainer: LLMTrainer) -> None:
        # Also after an error: a save in the background is of a step before it, and worth waiting for.
        self.manager.close()


class SafetensorsExportCallback(Callback):
    """`save_hf_weights`: where training ends by itself, also `step-N-hf`, which transformers loads."""

    def __init__(self, checkpoint: CheckpointCallback) -> None:
        self.checkpoint = checkpoint

    def on_train_end(self, trainer: LLMTrainer) -> None:
        if trainer.ended_by_itself:
            # The state is on disk already; this adds the export.
            self.checkpoint.manager.save(trainer.state.step, last=True)


def _adapter(trainer: LLMTrainer, folder: str | None) -> BaseStateDictAdapter | None:
    """The translator from and to Hugging Face's names."""
    adapter = trainer.spec.state_dict_adapter
    if adapter is None:
        return None
    config: Any = trainer.model.config
    try:
        return adapter(config, folder if folder and Path(folder).is_dir() else None)
    except (OSError, ValueError) as error:
        raise ConfigError(Fault("model.weights_path", str(error))) from error
