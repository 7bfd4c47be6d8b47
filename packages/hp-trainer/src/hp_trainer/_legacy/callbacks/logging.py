"""LoggingCallback: one line per log step, the records in metrics.jsonl, and loss.png.

In: the results of steps. Out: `on_log` of every callback, with the numbers of the line.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from torch import nn

from hp_trainer._legacy.callbacks.base import Callback
from hp_trainer.base_trainer import why_skipped

if TYPE_CHECKING:
    from hp_components import MetricsProcessor
    from hp_trainer._legacy.llm_trainer import LLMTrainer
    from hp_trainer.training_step import StepResult

__all__ = ["LoggingCallback", "matrix_flops"]

logger = logging.getLogger(__name__)


class LoggingCallback(Callback):
    """`train.logging`: `log_steps`, `report_global_loss`, `report_throughput`, `model_flops_per_token`, `peak_tflops`.

    metrics.jsonl has the mean over all ranks. The line has it with `report_global_loss`; else that of rank 0's tokens.
    Without `model_flops_per_token` the products with the model's matrices are counted.
    """

    def __init__(self, trainer: LLMTrainer) -> None:
        self.section = trainer.args.train.logging
        # The line is ours, and the bar that of ProgressCallback.
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115
        self.metrics: MetricsProcessor = trainer.sections.metrics.build(
            run_folder=trainer.run_folder.path,
            total_steps=trainer.total_steps,
            rank=trainer.environment.rank,
            world_size=trainer.environment.world_size,
            flops_per_token=self.section.model_flops_per_token or matrix_flops(trainer.model),
            compute_dtype=trainer.sections.training.mixed_precision_param,
            title=trainer.args.model.name,
            stream=self._nowhere,
        )
        self._local: list[float] = []

    def on_train_begin(self, trainer: LLMTrainer) -> None:
        trainer.environment.agree(lambda: self.metrics.begin(trainer.state.step))
        if (skipped := trainer.dataloader.skipped).total:
            self.metrics.event("bad_lines_skipped", count=skipped.total, first=list(skipped.first))

    def on_step_end(self, trainer: LLMTrainer, result: StepResult) -> None:
        record = self.metrics.record(
            trainer.state.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=result.tokens,
            data_wait_s=result.data_wait_seconds,
        )
        if not result.updated:
            self.metrics.event("update_skipped", reason=why_skipped(result), ranks=list(result.astray))
            if trainer.skipped_in_a_row == 1 and trainer.environment.is_main:
                logger.warning("step %d: the update is left out: %s", trainer.state.step, why_skipped(result))
        self._local.append(trainer.local_loss)
        if record is None:
            return
        logs = record.scalars()
        if not self.section.report_global_loss:
            logs["loss"] = sum(self._local) / len(self._local)
        self._local.clear()
        if not self.section.report_throughput:
            for name in ("tokens_per_second", "mfu"):
                logs.pop(name, None)
        trainer.notify("on_log", logs)

    def on_log(self, trainer: LLMTrainer, logs: dict[str, float]) -> None:
        parts = [f"step {trainer.state.step}/{trainer.total_steps}", f"loss {logs['loss']:.4f}"]
        parts += [f"grad_norm {logs['grad_norm']:.4f}", f"lr {logs['lr']:.3g}"]
        if "tokens_per_second" in logs:
            parts.append(f"{logs['tokens_per_second']:,.0f} tokens/s")
        if "mfu" in logs:
            parts.append(f"mfu {logs['mfu']:.1%}")
        logger.info("  ".join(parts))

    def on_evaluate(self, trainer: LLMTrainer, metrics: dict[str, float]) -> None:
        self.metrics.validation(**metrics)

    def on_train_end(self, trainer: LLMTrainer) -> None:
        if trainer.reason != "finished":
            self.metrics.event("stopped", reason=trainer.reason)
        self.metrics.close(finished=trainer.reason == "data_exhausted")

    def close(self, trainer: LLMTrainer) -> None:
        self.metrics.close()
        self._nowhere.close()


def matrix_flops(model: nn.Module) -> int:
    """Floating-point operations per trained token: 6 for each element of a matrix (2 forward, 4 backward).

    A table of embeddings is looked up and not multiplied, unless it is the output matrix too. What attention itself
    multiplies depends on the length of the text and is left out, so that the share of the peak is a lower bound.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    products = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    matrices = (value for value in model.parameters() if value.dim() > 1 and id(value) not in tables - products)
    return 6 * sum(value.numel() for value in matrices)
