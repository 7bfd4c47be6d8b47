"""What the command line says of an older run. In: a trainer, a result. Out: text."""

from __future__ import annotations

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
    return f"{how}\n\n  {folder}\n\nGo on with it:  --train.checkpoint.load_path={folder}"
