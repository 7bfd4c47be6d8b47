"""Capture and passes by number of layers, and against torchtitan's `minimal_fx_tracer` alone; goal: at most 1.0.

    OMP_NUM_THREADS=1 python tools/bench/graph_capture.py                                 ours alone, up to 128 layers
    OMP_NUM_THREADS=1 python tools/bench/graph_capture.py --titan-venv /tmp/titan-venv    in turns with torchtitan's

In: maybe the folder of a virtual environment; it is made, and torchtitan installed from the registry under
constraints.txt, if it is not there. Both tracers run in that environment, in one process. Out: CPU seconds.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from graph_lib import Decoder, Work, judge, train_fn

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (2, 8, 32, 128)


def ours(model: Decoder, work: Work) -> None:
    from hp_compile import GraphTrainer, PassConfig

    GraphTrainer(model, train_fn, PassConfig(), device="cpu").compile(*work.batch())


def titans(model: Decoder, work: Work) -> None:
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer

    def step(ids_BS: torch.Tensor, next_BS: torch.Tensor) -> list[torch.Tensor]:
        loss = train_fn(model, ids_BS, next_BS)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    minimal_fx_tracer(step, module=model)(*work.batch())


def cpu_seconds(trace: Callable[[Decoder, Work], None], work: Work) -> float:
    model = work.model()
    gc.collect()
    start = time.process_time()
    trace(model, work)
    return time.process_time() - start


def measure(turns: int) -> None:
    torch.set_num_threads(1)
    tracers = {"ours": ours}
    if importlib.util.find_spec("torchtitan") is not None:
        tracers["torchtitan's tracer alone"] = titans
    for trace in tracers.values():
        trace(Work(1, 32, 64, 2, 8).model(), Work(1, 32, 64, 2, 8))
    few = max(1, turns // 3)
    print(f"capture and passes, CPU seconds, medians of {turns} turns ({few} at 128 layers); torch {torch.__version__}")
    per_layer = {}
    for layers in LAYERS:
        work = Work(layers, 32, 64, 2, 8)
        found: dict[str, list[float]] = {name: [] for name in tracers}
        for _ in range(turns if layers < 64 else few):
            for name, trace in tracers.items():
                found[name].append(cpu_seconds(trace, work))
        per_layer[layers] = statistics.median(found["ours"]) / layers
        line = "  ".join(f"{name} {statistics.median(times):.3f} s" for name, times in found.items())
        print(f"  {layers:3d} layers: {line}   ({per_layer[layers] * 1e3:.1f} ms per layer)", flush=True)
        if len(found) == 2:
            _, theirs = found
            ratio = statistics.median(a / b for a, b in zip(found["ours"], found[theirs], strict=True))
            judge("capture and passes", ratio, 1.0, theirs)
    judge("per layer, 128 layers", per_layer[128] / per_layer[8], 1.25, "per layer, 8 layers")


def prepare(venv: Path) -> Path:
    """The interpreter of `venv`, with torchtitan in it and this torch's version."""
    python = venv / "bin" / "python"
    uv = shutil.which("uv")
    if not python.exists():
        subprocess.run(
            [uv, "venv", "--python", sys.executable, str(venv)] if uv else [sys.executable, "-m", "venv", str(venv)],
            check=True,
        )
    if subprocess.run([str(python), "-c", "import torchtitan"], capture_output=True, check=False).returncode:
        install = [uv, "pip", "install", "--python", str(python)] if uv else [str(python), "-m", "pip", "install"]
        for folder in os.environ.get("PIP_FIND_LINKS", "").split():
            install += ["--find-links", folder]
        subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), "torchtitan", "pyyaml"], check=True)
    asked = [str(python), "-c", "import torch; print(torch.__version__)"]
    theirs = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if theirs != torch.__version__:
        raise SystemExit(
            f"{venv} has torch {theirs}, this interpreter {torch.__version__}: name the folder with the wheel in "
            "PIP_FIND_LINKS and make the environment anew"
        )
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--titan-venv", type=Path, help="environment with torchtitan; made if it is not there")
    options = parser.parse_args()
    if options.titan_venv is None:
        measure(options.turns)
        return
    python = prepare(options.titan_venv.absolute())
    source = Path(importlib.util.find_spec("hp_compile").origin).parents[1]
    command = [str(python), str(Path(__file__).resolve()), "--turns", str(options.turns)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(source)}, check=True)


if __name__ == "__main__":
    main()
