"""A tiny run that is watched: what the tests of single keys look at.

In: options of the older file. Out: an `Observed`, with everything that a key could change.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_run import write_yaml
from torch.distributed.tensor import DTensor

from hp_components.data import prefetch
from hp_trainer import Callback, LLMTrainer, parse_args
from hp_trainer import environment as env

START = env.start_environment
LOADER = prefetch.StatefulDataLoader
THREAD = threading.Thread.start


@dataclass
class Observed(Callback):
    """A callback that writes down the state of the process at each step, and then what the run has left behind."""

    poison: bool = False
    lines: list[str] = field(default_factory=list)
    moments: dict[str, Any] = field(default_factory=dict)
    threads: list[str] = field(default_factory=list)
    substeps: int = 0
    layer_calls: int = 0
    trainer: Any = None
    result: Any = None
    built_on: str = ""
    folder: Path = Path()
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    end: dict[str, torch.Tensor] = field(default_factory=dict)

    def on_init_end(self, trainer: LLMTrainer) -> None:
        layer = trainer.model.layers[0].mlp.up_proj
        self.start = weights(trainer)
        layer.register_forward_hook(lambda *_: self._count_call())
        trainer.model.lm_head.register_forward_pre_hook(
            # FSDP shows whole weights as plain tensors, and sharded ones as distributed.
            lambda *_: self.moments.update(behind_the_layer=isinstance(layer.weight, DTensor))
        )
        trainer.model.register_forward_hook(self._look_behind_the_model)
        if self.poison:
            trainer.model.layers[0].mlp.down_proj.weight.register_hook(lambda grad: grad * float("nan"))

    def _count_call(self) -> None:
        self.layer_calls += 1

    def _look_behind_the_model(self, model: Any, inputs: Any, logits: torch.Tensor) -> None:
        self.moments |= {"logits": logits.dtype, "behind_the_model": isinstance(model.lm_head.weight, DTensor)}

    def on_step_begin(self, trainer: LLMTrainer) -> None:
        self.moments |= {
            "workers": len(multiprocessing.active_children()),
            "garbage": gc.isenabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
            "backend": torch.distributed.get_backend(),
        }

    def on_substep_end(self, trainer: LLMTrainer) -> None:
        self.substeps += 1

    @property
    def records(self) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return [line for line in lines if "event" not in line]

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return [line for line in lines if line.get("event") == name]

    def curve(self, key: str) -> list[float]:
        return [record[key] for record in self.records]

    def said(self, words: str) -> list[str]:
        return [line for line in self.lines if words in line]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoint").iterdir() if path.name.startswith("step-"))


class _Watched(LLMTrainer):
    built_on = ""

    def build_model(self) -> None:
        super().build_model()
        self.built_on = next(self.model.parameters()).device.type


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Every parameter as it is now, whole."""
    named = ((name, parameter.detach()) for name, parameter in trainer.model.named_parameters())
    return {name: value.full_tensor() if isinstance(value, DTensor) else value.clone() for name, value in named}


def observe(folder: Path, *, poison: bool = False, **options: Any) -> Observed:
    """Train the tiny file with these options in a folder of its own."""
    folder.mkdir(parents=True)
    found = Observed(poison=poison)
    handler, logger, before = _Lines(found.lines), logging.getLogger("hp_trainer"), os.getcwd()
    level = logger.level

    def start(*args: Any, **given: Any) -> Any:
        found.moments["local_rank"] = os.environ.get("LOCAL_RANK")
        return START(*args, **given)

    def loader(*args: Any, **given: Any) -> Any:
        found.moments["loader"] = given
        return LOADER(*args, **given)

    def thread(self: threading.Thread) -> None:
        found.threads.append(self.name)
        THREAD(self)

    env.start_environment, prefetch.StatefulDataLoader = start, loader  # type: ignore[assignment, misc]
    threading.Thread.start = thread  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    os.chdir(folder)
    try:
        trainer = _Watched(parse_args(argv=[write_yaml(**options)]), [found])
        found.result = trainer.train()
        found.trainer, found.end, found.built_on = trainer, weights(trainer), trainer.built_on
        found.folder = trainer.run_folder.path.absolute()
        trainer.close()
    finally:
        os.chdir(before)
        logger.removeHandler(handler)
        logger.setLevel(level)
        env.start_environment, prefetch.StatefulDataLoader = START, LOADER  # type: ignore[misc]
        threading.Thread.start = THREAD  # type: ignore[method-assign]
    return found
