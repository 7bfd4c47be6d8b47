"""What the command line says to a person: mistakes, the opening and the closing of a run.

In: faults, a trainer, a result. Out: text; nothing here decides anything.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hp_protocols.errors import ConfigError

if TYPE_CHECKING:
    from hp_components import CheckpointManager
    from hp_protocols.distributed import ParallelDims
    from hp_trainer.hyper_trainer import HyperTrainer, TrainResult
    from hp_trainer.launch import Launch


TRACE_VIEWER = "https://ui.perfetto.dev or chrome://tracing"
MEMORY_VIEWER = "https://pytorch.org/memory_viz"

STARTED_BY = "HP_STARTED_BY"
"""Environment variable with the command line that stands for `hp train` and its recipe, for the hints at the end."""


def print_mistakes(command: str, error: ConfigError) -> None:
    """All faults of `error` on standard error, one paragraph each."""
    number = len(error.faults)
    head = f"{command}: " + ("a mistake" if number == 1 else f"{number} mistakes") + "; nothing was run"
    body = "\n".join("  " + str(fault).replace("\n", "\n  ") for fault in error.faults)
    print(f"{head}\n{body}", file=sys.stderr)


def fail(command: str, why: str) -> int:
    """Say on standard error why a command could not do its work; returns the exit code of that."""
    print(f"{command}: {why}", file=sys.stderr)
    return 1


def opening(trainer: HyperTrainer) -> str:
    """What is about to be trained, where, on what."""
    config, environment, training = trainer.config, trainer.environment, trainer.config.training
    rows = training.local_batch_size * trainer.training_step.micro_batches * environment.dp_degree
    spec = config.model_spec
    lines = [
        f"model      {spec.name}/{spec.flavor}, {trainer.model.parameters / 1e6:,.2f} M parameters, {training.dtype}",
        f"data       {trainer.dataloader}",
        f"batch      {rows} rows of {training.seq_len} tokens, {training.steps} steps",
        f"processes  {environment.world_size} on {environment.device.type}{describe_layout(environment.parallel_dims)}",
        f"run folder {trainer.run_folder.path}",
    ]
    if trainer.state.step:
        lines.append(f"resuming   after step {trainer.state.step}")
    return "\n".join(lines)


def describe_layout(dims: ParallelDims) -> str:
    """The degrees above 1, as ` (dp_shard 2)`; nothing for one process."""
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    shown = ", ".join(f"{name} {getattr(dims, name)}" for name in names if getattr(dims, name) > 1)
    return f" ({shown})" if shown else ""


def closing(trainer: HyperTrainer, result: TrainResult, launch: Launch) -> str:
    """How the run ended, where everything is, and what to try next."""
    folder = result.run_folder
    module, _, recipe = trainer.config.recipe.partition(".")
    # `nox -s train` has `hp` in an environment of its own, which is not on the user's path.
    started_by = os.environ.get(STARTED_BY)
    start = started_by or f"hp train --module {module} --config {recipe}"
    hp = os.path.relpath(Path(sys.executable).with_name("hp")) if started_by else "hp"
    resume = f"{hp} train {folder / 'resolved.yaml'}" + (f" --nproc {launch.nproc}" if launch.nproc > 1 else "")
    data = trainer.config.dataloader
    takes_text, own_text = hasattr(data, "dataset_path"), getattr(data, "dataset_path", None) is not None
    if own_text or not trainer.config.tokenizer.trains_on_corpus:
        # The recipe alone would not do: another run with the options of this one.
        start = f"{hp} train {folder / 'resolved.yaml'} --dump_folder {folder}-2"
    if result.reason == "already_finished":
        return (
            f"{folder} is finished: {result.step} steps are done, nothing to train.\n"
            f"Train longer:  {resume} --training.steps {result.step * 2}"
        )
    how = how_it_ended(result, trainer.first_step)
    at_end = result.reason in ("finished", "data_exhausted")
    checkpoint = trainer.config.checkpoint
    weights_only = at_end and checkpoint.last_save_model_only
    weights_in_hf = weights_only and checkpoint.last_save_in_hf
    unsaved = "checkpoint.load_only is on" if checkpoint.load_only else "checkpoint.enable is off"
    lines = [
        how if result.saved else f"{how} Nothing was saved: {unsaved}.",
        "",
        f"  {folder}",
        "    loss.png        the loss curve",
        "    metrics.jsonl   one record per log step",
        *_curve_lines(trainer.config, folder),
        *(["    checkpoint/     the states to resume from"] if result.saved and not weights_only else []),
        *(_weights_lines(checkpoint, result.step) if result.saved and at_end else []),
        "    tokenizer/      the tokenizer of this run",
        "    resolved.yaml   every option as it was used",
        "",
    ]
    if result.reason == "finished":
        lines += [
            "Try next:",
            *([f"  what it writes {hp} sample {folder}"] if result.saved and not weights_in_hf else []),
            f"  longer         {start} --training.steps {result.step * 4}",
            *([f"  your own text  {start} --dataloader.dataset_path my_folder"] if takes_text and not own_text else []),
            *([f"  2 processes    {start} --nproc 2"] if launch.nproc == 1 else []),
            *([] if weights_only else [f"  go on          {resume} --training.steps {result.step * 2}"]),
        ]
    elif result.saved:
        lines.append(f"Resume:  {resume}")
    return "\n".join(lines)


def how_it_ended(result: TrainResult, first_step: int) -> str:
    """One sentence; two where nothing could be trained."""
    if result.reason == "data_exhausted" and result.step == first_step:
        return (
            f"No data are left after step {result.step}, so that nothing was trained. "
            "More epochs (--dataloader.epochs) or other data go on."
        )
    return {
        "finished": f"Finished {result.step} steps.",
        "data_exhausted": f"The data ended after step {result.step}.",
    }.get(result.reason, f"Stopped by {result.reason} after step {result.step}.")


def _curve_lines(config: HyperTrainer.Config, folder: Path) -> list[str]:
    """What TensorBoard, W&B and the profiler have left, and how to look at it."""
    lines = []
    if config.metrics.enable_tensorboard:
        tensorboard = folder / config.metrics.save_tb_folder
        lines.append(f"    {config.metrics.save_tb_folder + '/':15} curves: tensorboard --logdir {tensorboard}")
    if config.metrics.enable_wandb:
        sent = "curves for W&B; those that were kept offline: wandb sync"
        lines.append(f"    {'wandb/':15} {sent} {folder / 'wandb' / 'offline-run-*'}")
    for enabled, name, pattern, how in (
        (config.profiler.enable_profiling, config.profiler.save_traces_folder, "*.pt.trace.json*", TRACE_VIEWER),
        (
            config.profiler.enable_memory_snapshot,
            config.profiler.save_memory_snapshot_folder,
            "*.pickle",
            MEMORY_VIEWER,
        ),
    ):
        if enabled:
            count = sum(1 for _ in (folder / name).glob(f"*/{pattern}"))
            lines.append(f"    {name + '/':15} {count} files, for {how}")
    return lines


def _weights_lines(checkpoint: CheckpointManager.Config, step: int) -> list[str]:
    """What the options `last_save_…` have left."""
    if checkpoint.last_save_in_hf:
        return [f"    {checkpoint.folder}/step-{step}-hf  the weights, as transformers loads them"]
    return [f"    {checkpoint.folder}/step-{step}  the weights"] if checkpoint.last_save_model_only else []
