"""Planned memory against real runs over gloo, measured by torch's own tracker and by ours (M53).

Tolerances: the project asks for states within 10 % and the peak within 20 % of torch's tracker. States are held to one
part in a thousand here, since planned and real steps run the same code. The peak is held to 10 %: torch's tracker puts
hooks of its own in place of FSDP's, and then a unit of several modules (norm and output projection) gathers the layer
before it at another time; at these sizes that is up to 5 % of the peak. Our own watch leaves FSDP alone, and in the
same real run it is held to one part in a thousand.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from hp_config import ActivationCheckpointConfig, ParallelismConfig
from hp_protocols import get_platform
from hp_protocols.distributed import ParallelDims
from hp_protocols.testing import run_world
from hp_trainer import HyperTrainer
from hp_trainer.environment import Environment
from hp_trainer.model_building import build_model
from hp_trainer.plan import Use, plan_run
from hp_trainer.plan.memory_watch import MemoryWatch
from hp_trainer.recipes.qwen3_5_v2 import qwen3_5_v2_debugmodel
from hp_trainer.training_step import Fetched, TrainingStep

ROWS, LENGTH = 2, 64
# gloo lets go of a tensor a moment after its collective, in a thread of its own, and so may be late for a peak.
STEPS_WATCHED = 3
TP2 = {"parallelism": ParallelismConfig(tensor_parallel_degree=2)}
CASES = {
    2: {
        "FSDP 2, all kept, float32": ("none", "float32", {}),
        "FSDP 2, all recomputed, bfloat16": ("full", "bfloat16", {}),
    },
    4: {
        "FSDP 4, all recomputed, float32": ("full", "float32", {}),
        "TP 2 x FSDP 2, all kept, float32": ("none", "float32", TP2),
        "TP 2 x FSDP 2, all recomputed, bfloat16": ("full", "bfloat16", TP2),
    },
}


def recipe(mode: str, dtype: str, sections: dict[str, object]) -> HyperTrainer.Config:
    config = qwen3_5_v2_debugmodel().replace(**sections)
    config.training.seq_len, config.training.local_batch_size = LENGTH, ROWS
    config.training.global_batch_size = -1
    config.training.mixed_precision_param = dtype
    # One layer of linear and one of full attention.
    model = config.model_spec.model
    config.model_spec = dataclasses.replace(config.model_spec, model=model.replace(layers=model.layers[-2:]))
    config.activation_checkpoint = ActivationCheckpointConfig(mode=mode)
    return config


def measure(config: HyperTrainer.Config) -> tuple[int, int, int]:
    """Bytes of states after an update and at the highest point of a step by torch's tracker, and the latter by ours."""
    platform = get_platform()
    dims = ParallelDims.from_config(config.parallelism, platform.world_size())
    environment = Environment(platform, platform.device(), platform.rank(), platform.world_size(), dims)
    model = build_model(config, environment, seed=1).module
    optimizer = config.optimizer.build(model_parts=[model])
    step = TrainingStep(
        environment=environment,
        model=model,
        loss_fn=config.loss.build(),
        optimizer=optimizer,
        lr_scheduler=config.lr_scheduler.build(optimizers=optimizer, training_steps=20),
        max_norm=1.0,
        micro_batches=1,
    )
    ids_BS = torch.randint(2048, (ROWS, LENGTH))
    fetched = Fetched([{"input": ids_BS, "labels": ids_BS.clone()}], 0.0)
    # The first step makes the optimizer's states.
    step.run(fetched, ids_BS.numel())
    (one,) = optimizer.optimizers
    # Before torch's tracker, some of whose hooks stay.
    watch = MemoryWatch()
    with watch.watching():
        for tensor in (*model.parameters(), *(t for state in one.state.values() for t in state.values())):
            watch.hold(tensor, Use.PARAMETERS)
        for _ in range(STEPS_WATCHED):
            watch.mark("step")
            step.run(fetched, ids_BS.numel())
            watch.mark("end")
    tracker = FSDPMemTracker(model, one)
    held: dict[str, int] = {}

    def look(*_: object) -> None:
        (snapshot,) = tracker.get_tracker_snapshot("current").values()
        held.update({getattr(use, "value", use): size for use, size in snapshot.items()})

    one.register_step_post_hook(look)
    with tracker:
        step.run(fetched, ids_BS.numel())
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    states = held["Sharded Param"] + held["Sharded Grad"] + held["OptState"]
    watched = min(interval.peak.total for interval in watch.intervals if interval.phase == "step")
    return states, peak["Total"], watched


def measure_all(rank: int, world_size: int) -> dict[str, tuple[int, int, int]]:
    return {name: measure(recipe(*case)) for name, case in CASES[world_size].items()}


@pytest.mark.parametrize("world_size", CASES)
def test_real_ranks_hold_what_was_planned(world_size: int) -> None:
    (measured, *_) = run_world(measure_all, world_size, timeout=240)
    for name, (states, peak, watched) in measured.items():
        plan = plan_run(recipe(*CASES[world_size][name]), world_size)
        print(f"{name:40} {states:>11} {plan.memory.states.total:>11} {peak:>11} {watched:>11} {plan.memory.total:>11}")
        assert plan.memory.states.total == pytest.approx(states, rel=1e-3), name
        assert plan.memory.total == pytest.approx(peak, rel=0.1), name
        assert plan.memory.total == pytest.approx(watched, rel=1e-3), name
