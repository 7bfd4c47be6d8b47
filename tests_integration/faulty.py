"""A recipe whose data and model do what the variable FAULT says: the faults of test_faults.

In: FAULT, JSON: rank, step, where (build, data, forward, state, loss), how (raise, exit, loop, sleep, skip, inf, a
signal, "run SIGTERM"); FAULT_ROWS, batches per rank. Out: `faulty_recipe` and `debug_recipe`, offered by entry points.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hp_components import BaseDataLoader, CrossEntropyLoss
from hp_protocols import get_spec
from hp_protocols.errors import ConfigError, Fault
from hp_trainer import Callback, HyperTrainer, LLMTrainer, RankFailure, parse_args
from hp_trainer.recipes.qwen3_5_v2 import qwen3_5_v2_debugmodel

ENTRY_POINTS = """\
[hp_trainer.recipes]
faulty.faulty_recipe = faulty:faulty_recipe
faulty.debug_recipe = faulty:debug_recipe
"""


def install(folder: Path) -> str:
    """Make this module and its entry points importable from a folder; returns it for PYTHONPATH."""
    about = folder / "faulty-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "faulty.py").write_text(Path(__file__).read_text())
    return str(folder)


MARK = 299


def fault() -> dict[str, Any]:
    return json.loads(os.environ.get("FAULT", "{}"))


def strike(where: str, step: int) -> None:
    """Do what FAULT asks for here, if it does."""
    rank = int(os.environ.get("RANK", "0"))
    planted = fault()
    if (planted.get("where"), planted.get("step"), planted.get("rank")) != (where, step, rank):
        return
    how = planted["how"]
    if how == "raise":
        raise ValueError(f"planted in {where}")
    if how == "mistake":
        raise ConfigError(Fault("planted", f"is wrong in {where}"))
    if how == "exit":
        os._exit(7)
    if how in ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT"):
        os.kill(os.getpid(), signal.Signals[how])
    if how.startswith("run SIG"):
        signal_the_run(signal.Signals[how.removeprefix("run ")])
    while how == "loop":
        pass
    if how == "sleep":
        time.sleep(1000)
    if how == "skip":
        torch.distributed.barrier()  # which the others do not call


def signal_the_run(number: signal.Signals) -> None:
    """Send the signal to whom a user would send it, `hp train`, and go on when this rank has got it too."""
    before, got = signal.getsignal(number), []
    if number != signal.SIGKILL:

        def note(*arguments: Any) -> None:
            got.append(arguments)
            before(*arguments)  # type: ignore[operator, misc]

        signal.signal(number, note)
    os.kill(os.getppid() if "RANK" in os.environ else os.getpid(), number)
    while not got:
        time.sleep(0.01)
    signal.signal(number, before)


class LossOfMarks(CrossEntropyLoss):
    """Infinite where all labels are MARK."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        pass

    def __call__(self, logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        loss = CrossEntropyLoss.__call__(self, logits_BSV, labels_BS)
        return loss + torch.where((labels_BS == MARK).all(), math.inf, 0.0)


class Rows(BaseDataLoader):
    """Random rows, of which each rank has a number of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    fingerprint = "rows"

    def __init__(self, config: Any, *, seq_len: int, dp_rank: int, local_batch_size: int, **others: Any) -> None:
        self.shape, self.rank, self.next = (local_batch_size, seq_len + 1), dp_rank, 0
        rows = json.loads(os.environ.get("FAULT_ROWS", "[100000]"))
        self.length = rows[min(dp_rank, len(rows) - 1)]

    def __next__(self) -> dict[str, Any]:
        if self.next >= self.length:
            raise StopIteration
        self.next += 1
        strike("data", self.next)
        generator = torch.Generator().manual_seed(1000 * self.next + self.rank)
        ids = torch.randint(MARK, self.shape, generator=generator)
        if fault().get("where") == "loss" and (fault()["step"], fault()["rank"]) == (self.next, self.rank):
            ids[:] = MARK
        return {"input": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def state_dict(self) -> dict[str, Any]:
        strike("state", self.next)
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]


SHARD, FORWARDS = get_spec("qwen3_5_v2", "debugmodel").parallelize_fn, [0]


def parallelize(model: Any, **others: Any) -> Any:
    strike("build", 0)
    module = SHARD(model, **others)

    def before(*_: Any) -> None:
        FORWARDS[0] += 1
        strike("forward", FORWARDS[0])

    # Graph Mode refuses hooks, which would run at capture alone.
    if fault().get("where") == "forward":
        module.register_forward_pre_hook(before)
    return module


def debug_recipe() -> HyperTrainer.Config:
    """The debug model as it is, which a fault in `forward` can interrupt; its `step` counts micro-batches."""
    config = qwen3_5_v2_debugmodel()
    config.recipe = "faulty.debug_recipe"
    config.model_spec = replace(config.model_spec, parallelize_fn=parallelize)
    return config


def faulty_recipe() -> HyperTrainer.Config:
    config = qwen3_5_v2_debugmodel()
    config.recipe = "faulty.faulty_recipe"
    config.tokenizer.vocab_size = 300
    config.dataloader, config.loss = Rows.Config(), LossOfMarks.Config()
    config.model_spec = replace(config.model_spec, parallelize_fn=parallelize)
    training = config.training
    training.steps, training.seq_len, training.local_batch_size, training.global_batch_size = 8, 32, 1, -1
    config.lr_scheduler.warmup_steps = 2
    config.checkpoint.interval, config.metrics.log_freq = 3, 1
    config.comm.init_timeout_seconds, config.comm.train_timeout_seconds = 180, 180
    return config


class Striking(Callback):
    """A callback of the user's own."""

    def on_step_end(self, trainer: LLMTrainer, result: Any) -> None:
        strike("callback", trainer.state.step)


def train_older(arguments: list[str]) -> int:
    """A script that trains the older way, with a callback of its own."""
    trainer = LLMTrainer(parse_args(argv=arguments), [Striking()])
    try:
        trainer.train()
    except RankFailure:
        return 1
    trainer.close()
    return 0
