"""EvalCallback: the loss on held-out data every `eval_steps`. In: the dataset. Out: `on_evaluate` with its numbers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hp_trainer._legacy.callbacks.base import Callback
from hp_trainer.validation import Validator

if TYPE_CHECKING:
    from hp_trainer._legacy.llm_trainer import LLMTrainer
    from hp_trainer.training_step import StepResult

__all__ = ["EvalCallback"]

logger = logging.getLogger(__name__)


class EvalCallback(Callback):
    """`train.eval`: every `eval_steps` and after the last step; equal weight per token on any number of ranks."""

    def __init__(self, trainer: LLMTrainer) -> None:
        assert trainer.eval_config is not None
        args = trainer.args
        config = Validator.Config(enable=True, freq=args.train.eval.eval_steps, dataloader=trainer.eval_config)
        self.validator: Validator = config.build(
            environment=trainer.environment,
            training_step=trainer.training_step,
            tokenizer=trainer.tokenizer,
            seq_len=args.data.max_seq_len,
            local_batch_size=args.train.micro_batch_size,
            seed=args.train.seed,
        )

    def on_step_end(self, trainer: LLMTrainer, result: StepResult) -> None:
        step = trainer.state.step
        if self.validator.should_validate(step, trainer.total_steps):
            found = self.validator.validate()
            logger.info("evaluation after step %d: %s", step, found)
            numbers = {"nll": found.nll, "perplexity": found.perplexity, "tokens": float(found.tokens)}
            trainer.notify("on_evaluate", numbers)
