"""What the command line says of an older run. In: a trainer, a result. Out: text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hp_trainer.cli.messages import describe_layout

if TYPE_CHECKING:
    from hp_trainer._legacy.llm_trainer import LLMTrainer
    from hp_trainer.base_trainer import TrainResult

__all__ = ["closing", "opening"]


def opening(trainer: LLMTrainer) -> str:
    """What is about to be trained, where, on what."""
    args, environment = trainer.args, trainer.environment
    rows, length = args.train.global_batch_size, args.data.max_seq_len
    lines = [
        f"model      {args.model.name} (bare), {trainer.parameters / 1e6:,.2f} M parameters",
        f"data       {trainer.dataloader}",
        f"batch      {rows} rows of {length} tokens, {trainer.total_steps} steps",
        f"processes  {environment.world_size} on {environment.device.type}{describe_layout(environment.parallel_dims)}",
        f"run folder {trainer.run_folder.path}",
    ]
    if trainer.state.step:
        lines.append(f"resuming   after step {trainer.state.step}")
    return "\n".join(lines)


def closing(trainer: LLMTrainer, result: TrainResult) -> str:
    """How the run ended, and how to go on with it."""
    folder = result.run_folder
    how = {
        "finished": f"Finished {result.step} steps.",
        "already_finished": f"{folder} is finished: {result.step} steps are done, nothing to train.",
        "data_exhausted": (
            f"The data ended after step {result.step}."
            if result.step > trainer.first_step
            else f"No data are left after step {result.step}, so that nothing was trained. More train.num_train_epochs "
            "or other data go on."
        ),
    }.get(result.reason, f"Stopped by {result.reason} after step {result.step}.")
    return f"{how}\n\n  {folder}\n\nGo on with it:  {' '.join(_going_on(trainer, result))}"


def _going_on(trainer: LLMTrainer, result: TrainResult) -> list[str]:
    """What has to be said with the same file, so that training goes on in the same folder and not just ends again."""
    train, folder = trainer.args.train, result.run_folder
    options = [f"--train.checkpoint.load_path={folder}"]
    if folder != Path(train.checkpoint.output_dir):
        options.append(f"--train.checkpoint.output_dir={folder}")
    if result.reason in ("finished", "already_finished"):
        options.append(f"--train.max_steps={2 * result.step}")
    if result.reason == "data_exhausted":
        options.append(f"--train.num_train_epochs={2 * train.num_train_epochs}")
    return options
