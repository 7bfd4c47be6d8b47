"""A training step with each loss, on the real model in several layouts: the numbers of one process (M32, M51)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hp_components import ChunkedCELoss, CrossEntropyLoss, LRSchedulersContainer, OptimizersContainer
from hp_config import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from hp_models.qwen3_5_v2 import qwen3_5_config
from hp_protocols import get_platform
from hp_protocols.distributed import ParallelDims
from hp_protocols.testing import run_world
from hp_trainer.environment import Environment
from hp_trainer.model_building import build_model
from hp_trainer.recipes.qwen3_5_v2 import qwen3_5_v2_debugmodel
from hp_trainer.training_step import TrainingStep

ROWS, LENGTH, STEPS = 8, 16, 2
LOSSES = {"whole": CrossEntropyLoss.Config(), "chunked": ChunkedCELoss.Config(num_chunks=3)}
LAYOUTS = {
    "fsdp, compiled and recomputed": {
        "compile": CompileConfig(mode="blocks", backend="aot_eager"),
        "activation_checkpoint": ActivationCheckpointConfig(mode="full"),
    },
    "tp 2 x fsdp 2, recomputed": {
        "parallelism": ParallelismConfig(tensor_parallel_degree=2),
        "activation_checkpoint": ActivationCheckpointConfig(mode="selective"),
    },
    "tp 2 x fsdp 2, whole activations, gathered logits": {
        "parallelism": ParallelismConfig(
            tensor_parallel_degree=2, enable_sequence_parallel=False, disable_loss_parallel=True
        )
    },
    "cp 2 x tp 2": {"parallelism": ParallelismConfig(context_parallel_degree=2, tensor_parallel_degree=2)},
    "replicated": {"parallelism": ParallelismConfig(data_parallel_replicate_degree=4, data_parallel_shard_degree=1)},
}
SMALL = qwen3_5_config(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    layer_types=["full_attention"] * 2,
    mrope_section=(1, 1, 0),
)

Numbers = list[tuple[float, float]]


def make_batches(rank: int, ranks: int) -> list[dict[str, torch.Tensor]]:
    """This rank's rows of every step, two micro-batches each; numbers of valid labels are very unequal."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(STEPS):
        ids_BS = torch.randint(SMALL.vocab_size, (ROWS, LENGTH + 1), generator=generator)
        labels_BS = ids_BS[:, 1:].clone()
        for row in range(ROWS):
            labels_BS[row, : LENGTH - 2 * row] = -100
        share = ROWS // ranks
        mine = slice(rank * share, (rank + 1) * share)
        for rows in (slice(0, share // 2), slice(share // 2, share)):
            batches.append({"input": ids_BS[mine, :-1][rows], "labels": labels_BS[mine][rows]})
    return batches


def train(loss: CrossEntropyLoss.Config, sections: dict[str, object]) -> Numbers:
    config = qwen3_5_v2_debugmodel().replace(loss=loss, **sections)
    config.training.seq_len = LENGTH
    config.model_spec = dataclasses.replace(config.model_spec, model=SMALL)
    # One process group for all layouts: only the meshes differ.
    platform = get_platform()
    dims = ParallelDims.from_config(config.parallelism, platform.world_size())
    environment = Environment(platform, platform.device(), platform.rank(), platform.world_size(), dims)
    model = build_model(config, environment, seed=1).module
    optimizer = OptimizersContainer.Config(lr=1e-2).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=0).build(optimizers=optimizer, training_steps=STEPS)
    loss_fn = config.loss.build()
    loss_fn.check_model(model)
    step = TrainingStep(
        environment=environment,
        model=model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        lr_scheduler=schedule,
        max_norm=1.0,
        micro_batches=2,
    )
    batches = iter(make_batches(environment.dp_rank, environment.dp_degree))
    numbers = []
    for _ in range(STEPS):
        fetched = step.fetch(batches)
        result = step.run(fetched, step.agree(fetched, stop_wanted=False).valid_tokens)
        numbers.append((result.loss, result.grad_norm))
    return numbers


def every_layout(rank: int, world_size: int) -> dict[tuple[str, str], Numbers]:
    cases = [(name, "chunked") for name in LAYOUTS]
    # Whole logits differ from one layout to another by how tensor parallelism leaves them.
    cases += [(name, "whole") for name in LAYOUTS if name.startswith("tp")]
    return {(name, loss): train(LOSSES[loss], LAYOUTS[name]) for name, loss in cases}


def one_process(rank: int, world_size: int) -> dict[str, Numbers]:
    return {loss: train(config, {}) for loss, config in LOSSES.items()}


def test_every_loss_trains_in_every_layout_what_one_process_trains() -> None:
    (alone,) = run_world(one_process, 1)
    for ours, theirs in zip(alone["chunked"], alone["whole"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    for results in run_world(every_layout, 4, timeout=240):
        for case, numbers in results.items():
            for ours, theirs in zip(numbers, alone["whole"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5), case
