"""`hp train`: check everything, then train in this process or start one process per rank.

In: recipe and options, or a run's resolved.yaml. Out: an exit code; see `hp_trainer.cli`.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from hp_config import HyperTrainerConfig
from hp_protocols.errors import ConfigError, MissingExtraError
from hp_trainer.cli import messages
from hp_trainer.cli.arguments import Arguments
from hp_trainer.faults.activity import Status, activity
from hp_trainer.faults.failure import RankFailure
from hp_trainer.launch import Launch, announce_rank, inside_torchrun, run_ranks
from hp_trainer.signals import EndBeforeTraining

if TYPE_CHECKING:
    from hp_trainer._legacy import LLMTrainer
    from hp_trainer.base_trainer import TrainResult
    from hp_trainer.hyper_trainer import HyperTrainer

SECONDS_FOR_RANK_0 = 5.0

LAUNCH_OPTIONS = """\
  --nproc N           processes on this machine, each one rank (default 1, in place)
  --nnodes N          machines (default 1); then also
  --node-rank R       which machine this is, 0 to N-1
  --rdzv-endpoint H:P address and free port of machine 0"""

USAGE = f"""\
usage: hp train --module MODULE --config RECIPE [--option value …] [--nproc N]
       hp train RUN/resolved.yaml [--option value …] [--nproc N]
       hp train OLD.yaml [--train.max_steps=20 …] [--nproc N]

Train the model of a recipe, or of a YAML of the older trainer (sections model, data, train).
`hp list` shows the recipes;
`hp train --module MODULE --config RECIPE --help` shows every option with its default.

{LAUNCH_OPTIONS}

options of every recipe, among others:
  --training.steps N              optimizer steps in all
  --dataloader.dataset_path PATH  a .txt, .jsonl, .json or .parquet file, a folder or a glob of them
  --dump_folder DIR               the run folder; an existing one is resumed
  --debug.seed N                  seed of initialisation, data order and dropout

exit codes: 0 fine, 1 the run failed, 2 a mistake in the command or configuration"""


def main(arguments: list[str]) -> int:
    """Run `hp train <arguments>`."""
    if not arguments or arguments in (["-h"], ["--help"]):
        print(USAGE)
        return 0 if arguments else 2
    try:
        launch, rest = split_launch(arguments)
        if {"-h", "--help"} & set(rest):
            print(f"processes:\n{LAUNCH_OPTIONS}\n", flush=True)
            return run_rank(rest)  # which prints the recipe's options and exits
        if faults := launch.faults():
            raise ConfigError(faults)
        if launch.world_size == 1:
            return run_rank(rest)
        return launch_ranks(launch, rest)
    except ConfigError as error:
        messages.print_mistakes("hp train", error)
        return 2
    except MissingExtraError as error:
        return refuse_missing_extra(error, rank=0)


def refuse_missing_extra(error: MissingExtraError, rank: int) -> int:
    """Say what to install; the exit code is that of a mistake."""
    speak_after_rank_0(rank)
    activity.end(Status.TOLD)
    print(f"hp train: {error}", file=sys.stderr)
    return 2


def speak_after_rank_0(rank: int) -> None:
    """Mistakes are the same on every rank, nearly always: rank 0 tells them, and the launcher then ends the others.

    The others wait for that, since the first rank to end takes the rest with it, and speak if rank 0 has none.
    """
    if rank:
        time.sleep(SECONDS_FOR_RANK_0)


def split_launch(arguments: Sequence[str]) -> tuple[Launch, list[str]]:
    """Take --nproc and its siblings out of the arguments.

    Raises:
        ConfigError: one of them has no value or not a number.
    """
    parser = Arguments("hp train")
    for flag, kind in (("--nproc", int), ("--nnodes", int), ("--node-rank", int), ("--rdzv-endpoint", str)):
        parser.add_argument(flag, type=kind, default=argparse.SUPPRESS)
    found, rest = parser.parse_known_args(list(arguments))
    return Launch(**vars(found)), rest


def launch_ranks(launch: Launch, arguments: list[str]) -> int:
    """Check the configuration here, once, fill the caches, and start the ranks."""
    from hp_trainer.preparation import load_config, prepare

    config = load_config(arguments, launch.world_size)
    configure_logging(is_main=True)
    if isinstance(config, HyperTrainerConfig):
        return run_ranks(launch, arguments)
    prepare(config)
    # The ranks must not each choose a folder of their own.
    folder = f"--dump_folder={config.dump_folder}"
    return run_ranks(launch, [*arguments, folder], config.comm.init_timeout_seconds)


def run_rank(arguments: list[str]) -> int:
    """Train as one rank of however many torchrun has started; returns the exit code."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    started = False
    try:
        # The launcher hands signals on to a rank from its announcement on; training has a taker of its own.
        with EndBeforeTraining():
            announce_rank()
            # A crash in compiled code shows at least where Python was.
            faulthandler.enable(file=sys.__stderr__ or sys.stderr)  # not one that a program has put in its place
            configure_logging(is_main=rank == 0)
            from hp_trainer.preparation import build_trainer, load_config

            trainer = build_trainer(load_config(arguments, world_size))
            if rank == 0:
                print(opening(trainer) + "\n", flush=True)
            started = True
            result = trainer.train()
    except ConfigError as error:
        speak_after_rank_0(rank)
        activity.end(Status.TOLD)
        messages.print_mistakes("hp train" if rank == 0 else f"hp train (rank {rank})", error)
        return 1 if started and trainer.state.step > trainer.first_step else 2
    except MissingExtraError as error:
        return refuse_missing_extra(error, rank)
    except RankFailure:
        return 1  # told already, by one rank for all
    except BaseException as error:
        if isinstance(error, SystemExit) and not started:
            raise  # --help of a recipe
        where = f"in {activity.where}" + (f" (rank {rank} of {world_size})" if world_size > 1 else "")
        print(f"hp train: the run failed {where}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        activity.end(Status.TOLD)
        return 1
    if rank == 0:
        launch = Launch(nproc=world_size if inside_torchrun() else 1)
        print("\n" + closing(trainer, result, launch), flush=True)
    trainer.close()
    activity.end(Status.FINISHED)
    return 0


def opening(trainer: HyperTrainer | LLMTrainer) -> str:
    """What is about to be trained."""
    if hasattr(trainer, "args"):
        from hp_trainer._legacy import messages as older

        return older.opening(cast("LLMTrainer", trainer))
    return messages.opening(cast("HyperTrainer", trainer))


def closing(trainer: HyperTrainer | LLMTrainer, result: TrainResult, launch: Launch) -> str:
    """How the run has ended."""
    if hasattr(trainer, "args"):
        from hp_trainer._legacy import messages as older

        return older.closing(cast("LLMTrainer", trainer), result)
    return messages.closing(cast("HyperTrainer", trainer), result, launch)


def configure_logging(*, is_main: bool) -> None:
    """Log lines of our packages: information from rank 0, warnings from every rank."""
    logging.basicConfig(format="%(message)s" if is_main else "%(name)s: %(message)s", stream=sys.stderr)
    for name in ("hp_protocols", "hp_config", "hp_components", "hp_models", "hp_trainer"):
        logging.getLogger(name).setLevel(logging.INFO if is_main else logging.WARNING)
