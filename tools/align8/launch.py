"""One launch of processes that carry out run after run, each in a fork of every process.

In: `Run`s and a folder. Out: below the folder, one folder per run with what its trainer leaves, what it printed, and
one `outcome-N.json` per process that took part. A run that raises, dies or hangs ends there; the next one begins.
The outcome of a process is what it reported, unless it ended badly after that.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from align8.configs import hyper_config, legacy_content
from align8.copies import digests
from align8.evidence import evidence_of
from align8.matrix import Run
from hp_protocols.platform import get_platform
from hp_protocols.testing import WorldError, run_world
from hp_trainer import HyperTrainer, LLMTrainer, parse_args

__all__ = ["MATERIAL", "NO_REPORT", "RUN_FOLDER", "attempt", "carry_out", "outcomes"]

MATERIAL = "material"
RUN_FOLDER = "run"
RUN_SECONDS = 240.0
"""Of one run, after which each process is ended; the trainers themselves end sooner where a rank is late."""
NO_REPORT = "ended without a report"
LATE_IMPORTS = ("hp_compile.trainer", "matplotlib.pyplot", "matplotlib.backends.backend_agg", "torch.profiler")
"""What runs import late; here once, before processes are forked."""
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
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    for run in alone[rank::world_size]:
        attempt(run, folder, 0, dict.fromkeys(LAUNCHER))  # whichever process does it, it is the run's only one
    for run, port in together:
        attempt(run, folder, rank, {"MASTER_PORT": str(port)})


def attempt(
    run: Run, folder: Path, rank: int, variables: dict[str, str | None], *, seconds: float = RUN_SECONDS
) -> None:
    """Carry a run out in a fork of this process, and write down how it ended when it has ended.

    torch keeps what it has worked out for a mesh beyond the end of its process groups, and takes it for any equal mesh
    that comes later, whose groups may have other names. And a rank that hangs or dies takes no other run with it.
    """
    home = folder / run.name
    home.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=_carry_out, args=(run, folder, rank, variables))
    process.start()
    process.join(seconds)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    report = home / f"report-{rank}.json"
    how = f"still running after {seconds:g} s" if code is None else f"exit code {code}"
    if not report.exists():
        _write(report, _outcome(rank, fault=f"{NO_REPORT}: {how}"))
    elif code != 0:
        said = json.loads(report.read_text(encoding="utf-8"))
        _write(report, {**said, "fault": said["fault"] or f"{how}, after its report"})
    report.rename(home / f"outcome-{rank}.json")


def _carry_out(run: Run, folder: Path, rank: int, variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    logging.disable(logging.INFO)
    home = folder / run.name
    outcome, started = _outcome(rank), time.perf_counter()
    with (home / f"output-{rank}.txt").open("w", encoding="utf-8") as output:
        sys.stdout = sys.stderr = output
        try:
            outcome |= train(run, folder / MATERIAL, home)
        except BaseException as error:  # whatever it is, it is this cell's result; some of torch's are no Exception
            traceback.print_exc()
            outcome["fault"] = f"{type(error).__name__}: {error}"
    outcome["seconds"] = time.perf_counter() - started
    _write(home / f"report-{rank}.json", outcome)


def _outcome(rank: int, fault: str | None = None) -> dict[str, Any]:
    return {"rank": rank, "seconds": 0.0, "fault": fault, "copies": {}, "evidence": {}}


def _write(target: Path, outcome: dict[str, Any]) -> None:
    """As a whole: a process that is ended while it writes has written nothing."""
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(outcome) + "\n", encoding="utf-8")
    partial.rename(target)


def train(run: Run, material: Path, home: Path) -> dict[str, Any]:
    """As a user does: build the trainer from its configuration, train, let go.

    Returns:
        `copies`, digests of the weights, and `evidence` of what the trainer did.
    """
    trainer: HyperTrainer | LLMTrainer
    if run.path == "legacy":
        file = home / f"legacy-{os.getpid()}.yaml"
        file.write_text(yaml.safe_dump(legacy_content(run, material, home / RUN_FOLDER)), encoding="utf-8")
        trainer = LLMTrainer(parse_args(argv=[str(file)]))
    else:
        trainer = hyper_config(run, material, home / RUN_FOLDER).build()
    try:
        trainer.train()
        return {"copies": digests(trainer), "evidence": evidence_of(trainer)}
    finally:
        trainer.close()
