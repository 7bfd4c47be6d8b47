"""From runs to findings: make the material, launch, tell of the progress, judge.

In: `Run`s and a new folder. Out: a `Findings`; on standard output a line for each run that is through.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from align8.launch import MATERIAL, carry_out, outcomes
from align8.material import make_material
from align8.matrix import NotApplicable, Run
from align8.verdict import Findings, judge

__all__ = ["measure"]

SECONDS = 3600.0
"""The launch is ended after this; runs that are not through are missing. Far more than a slow machine needs."""


def measure(runs: Sequence[Run], refused: Sequence[NotApplicable], folder: Path, *, processes: int) -> Findings:
    """Make the material, carry out the runs in one launch, and compare what they leave in `folder`."""
    started = time.perf_counter()
    make_material(folder / MATERIAL)
    done = threading.Event()
    teller = threading.Thread(target=tell, args=(runs, folder, done, sys.stdout), daemon=True)
    teller.start()
    try:
        stopped = carry_out(runs, folder, processes=processes, seconds=SECONDS)
    except Exception as error:  # what is through by now is judged and reported all the same
        stopped = f"{type(error).__name__}: {error}"
    finally:
        done.set()
        teller.join()
    if stopped is not None:
        print(stopped, file=sys.stderr)
    return judge(runs, refused, folder, stopped=stopped, wall_seconds=time.perf_counter() - started)


def tell(runs: Sequence[Run], folder: Path, done: threading.Event, stream: TextIO) -> None:
    """A line for each run when all its processes have come to its end."""
    waiting = list(runs)
    while waiting:
        last = done.wait(0.5)
        for run in list(waiting):
            ended = outcomes(run, folder)
            if len(ended) == run.layout.processes:
                waiting.remove(run)
                how = "failed" if any(outcome["fault"] for outcome in ended) else "done"
                seconds = max(outcome["seconds"] for outcome in ended)
                place = f"{len(runs) - len(waiting)}/{len(runs)}"
                text = f"{place} {run.row.name}, {run.layout.name}, {run.path}: {how} in {seconds:.1f} s"
                print(text, file=stream, flush=True)
        if last:
            return
