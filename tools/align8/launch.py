"""One launch of processes that carry out run after run.

In: `Run`s and a folder. Out: below the folder, one folder per run with what its trainer leaves, what it printed, and
one `outcome-N.json` per process that took part. A run that raises ends there; the next one begins.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from align8.configs import hyper_config, legacy_content
from align8.matrix import Run
from hp_protocols.platform import get_platform
from hp_protocols.testing import WorldError, run_world
from hp_trainer import HyperTrainer, LLMTrainer, parse_args

__all__ = ["MATERIAL", "RUN_FOLDER", "carry_out", "outcomes"]

MATERIAL = "material"
RUN_FOLDER = "run"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def carry_out(runs: Sequence[Run], folder: Path, *, processes: int, seconds: float) -> str | None:
    """Start the processes once and let them do every run; returns why they ended early, or None.

    Runs of one process are shared out among them and done first, several at a time.
    """
    alone = [run for run in runs if run.layout.processes == 1]
    together = [run for run in runs if run.layout.processes > 1]
    if wrong := [run.name for run in together if run.layout.processes != processes]:
        raise ValueError(f"{wrong}: of another number of processes than {processes}")
    # A store of its own for the ranks of each run to meet at: in one store they would find the addresses of the last.
    stores = [get_platform().host_store() for _ in together]
    ports = [store.port for store in stores]
    environment = {"HP_CACHE_DIR": str(folder / MATERIAL / "cache"), "NO_COLOR": "1"}
    try:
        # What the processes print outside of a run, such as torch's warnings of its own, is shown only if they fail.
        with contextlib.redirect_stdout(io.StringIO()):
            run_world(
                _work, processes, alone, list(zip(together, ports, strict=True)), folder,
                timeout=seconds, init_process_group=False, env=environment,
            )  # fmt: skip
    except WorldError as error:
        return str(error)
    return None


def outcomes(run: Run, folder: Path) -> list[dict[str, Any]]:
    """What the processes said at the end of a run; one that is not through has said nothing."""
    found = sorted((folder / run.name).glob("outcome-*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in found]


# ---- in each process -----------------------------------------------------------------------------------------


def _work(rank: int, world_size: int, alone: list[Run], together: list[tuple[Run, int]], folder: Path) -> None:
    logging.disable(logging.INFO)
    with _environment(dict.fromkeys(LAUNCHER)):
        for run in alone[rank::world_size]:
            _attempt(run, folder, rank)
    for run, port in together:
        with _environment({"MASTER_PORT": str(port)}):
            _attempt(run, folder, rank)


def _attempt(run: Run, folder: Path, rank: int) -> None:
    home = folder / run.name
    home.mkdir(parents=True, exist_ok=True)
    fault, started = None, time.perf_counter()
    with contextlib.ExitStack() as stack:
        output = stack.enter_context((home / f"output-{rank}.txt").open("w", encoding="utf-8"))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(output))
        try:
            _train(run, folder / MATERIAL, home)
        except Exception as error:  # whatever it is, it is this cell's result
            traceback.print_exc()
            fault = f"{type(error).__name__}: {error}"
    outcome = {"rank": rank, "seconds": time.perf_counter() - started, "fault": fault}
    partial = home / f"outcome-{rank}.partial"
    partial.write_text(json.dumps(outcome) + "\n", encoding="utf-8")
    partial.rename(partial.with_suffix(".json"))
    # Between runs and not within one: the trainers switch the collector off while they train.
    gc.collect()


def _train(run: Run, material: Path, home: Path) -> None:
    """As a user does: build the trainer from its configuration, train, let go."""
    trainer: HyperTrainer | LLMTrainer
    if run.path == "legacy":
        file = home / f"legacy-{os.getpid()}.yaml"
        file.write_text(yaml.safe_dump(legacy_content(run, material, home / RUN_FOLDER)), encoding="utf-8")
        trainer = LLMTrainer(parse_args(argv=[str(file)]))
    else:
        trainer = hyper_config(run, material, home / RUN_FOLDER).build()
    try:
        trainer.train()
    finally:
        trainer.close()


@contextlib.contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
    """Variables that a launcher would have set otherwise for a run; None: not at all."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
