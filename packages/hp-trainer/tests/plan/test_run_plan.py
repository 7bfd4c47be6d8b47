"""A plan against what is known otherwise: the shards of plan_rank, all layers instead of a few, sizes by hand."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist

from hp_components import CrossEntropyLoss, OptimizersContainer
from hp_config import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from hp_protocols.distributed import plan_rank
from hp_protocols.errors import ConfigError
from hp_trainer import HyperTrainer
from hp_trainer.plan import advise, plan_run
from hp_trainer.recipes.qwen3_5_v2 import qwen3_5_v2_debugmodel


def recipe(layers: int = 2, **sections: object) -> HyperTrainer.Config:
    """The debug model's last layers, of which two are one of linear and one of full attention."""
    config = qwen3_5_v2_debugmodel().replace(**sections)
    config.training.seq_len, config.training.local_batch_size, config.training.global_batch_size = 64, 2, -1
    model = config.model_spec.model
    repeated = (model.layers * layers)[-layers:]
    config.model_spec = dataclasses.replace(config.model_spec, model=model.replace(layers=repeated))
    return config


def deep_accumulating_hsdp() -> HyperTrainer.Config:
    config = recipe(8, parallelism=ParallelismConfig(data_parallel_replicate_degree=2))
    config.training.local_batch_size, config.training.global_batch_size = 1, 8
    config.activation_checkpoint.mode = "full"
    return config


def deep_tp_cp() -> HyperTrainer.Config:
    return recipe(8, parallelism=ParallelismConfig(tensor_parallel_degree=2, context_parallel_degree=2))


@pytest.mark.parametrize("make", [deep_accumulating_hsdp, deep_tp_cp])
def test_a_few_layers_say_to_the_byte_what_all_of_them_say(make) -> None:
    config = make()
    assert plan_run(config, 4) == plan_run(config, 4, whole=True)


def test_states_and_sizes_are_those_of_the_shards() -> None:
    config = recipe(parallelism=ParallelismConfig(tensor_parallel_degree=2))
    plan, shards = plan_run(config, 6), plan_rank(config.model_spec, trainer_config=config, world_size=6)
    assert plan.parameters.total == shards.parameters
    assert plan.parameters.rank_max == shards.rank_parameters
    last = plan_rank(config.model_spec, trainer_config=config, world_size=6, rank=5)
    assert plan.parameters.rank_min == last.rank_parameters < shards.rank_parameters
    assert plan.parameters.embedding == 2048 * 192
    # MFU is computed with this figure.
    assert plan.flops_per_token == shards.flops_per_token
    # Uneven shards are stored padded; the optimizer counts its steps.
    assert plan.memory.states.total == pytest.approx(shards.rank_bytes.total, rel=0.01)
    assert (plan.layout.tp, plan.layout.dp_shard, plan.layout.tokens_per_step) == (2, 3, 2 * 3 * 64)
    assert plan.flops_per_step == plan.flops_per_token * 2 * 3 * 64


def test_each_optimizer_keeps_what_it_keeps() -> None:
    per_parameter = {"SGD": 0, "momentum": 1, "in backward": 2, "amsgrad": 3}
    optimizers = {
        "SGD": OptimizersContainer.Config(name="SGD"),
        "momentum": OptimizersContainer.Config(name="SGD", kwargs={"momentum": 0.9}),
        "in backward": OptimizersContainer.Config(in_backward=True),
        "amsgrad": OptimizersContainer.Config(kwargs={"amsgrad": True}),
    }
    for name, optimizer in optimizers.items():
        config = recipe(optimizer=optimizer)
        config.training.max_norm = float("inf")
        states = plan_run(config, 2).memory.states
        assert states.optimizer == pytest.approx(per_parameter[name] * states.parameters, rel=1e-3), name
        if name == "in backward":
            # The largest unit's gradients, not those of both layers, the embedding and the projection.
            assert 0 < states.gradients < states.parameters / 2
        else:
            assert states.gradients == states.parameters, name


def test_an_update_of_all_parameters_at_once_needs_room_for_all_of_them() -> None:
    config = recipe(8)
    config.activation_checkpoint.mode = "full"
    config.training.seq_len, config.training.local_batch_size = 16, 1
    on_npu = plan_run(config, 1, device_type="npu").memory
    # AdamW: the root of the mean squares of every parameter. On cuda a fused kernel needs no room.
    assert on_npu.peak_at == "the update"
    assert on_npu.peak.activations == pytest.approx(on_npu.states.parameters, rel=0.05)
    assert on_npu.total == pytest.approx(plan_run(config, 1, device_type="npu", whole=True).memory.total, rel=0.01)
    assert plan_run(config, 1).memory.total < 0.85 * on_npu.total


def test_options_change_what_they_are_there_to_change() -> None:
    plain = plan_run(recipe(), 2).memory
    recomputed = plan_run(recipe(activation_checkpoint=ActivationCheckpointConfig(mode="full")), 2).memory
    assert recomputed.peak.activations < 0.7 * plain.peak.activations
    assert recomputed.states == plain.states
    many_rows, chunked = recipe(), recipe()
    many_rows.training.local_batch_size = chunked.training.local_batch_size = 16
    chunked.loss.num_chunks = 4
    saved = plan_run(many_rows, 2).memory.total - plan_run(chunked, 2).memory.total
    # At their highest the logits are there twice, with their gradient; the rest of the peak lies elsewhere then.
    assert 16 * 64 * 2048 * 4 < saved < 2 * 16 * 64 * 2048 * 4
    offloaded = recipe()
    offloaded.training.enable_cpu_offload = True
    memory = plan_run(offloaded, 2).memory
    assert (memory.peak.parameters, memory.peak.optimizer, memory.host) == (0, 0, plain.states.total)
    assert memory.states == plain.states
    documents = recipe()
    documents.dataloader.document_mask = True
    assert plan_run(documents, 2).memory.total > plain.total
    graph = plan_run(recipe(compile=CompileConfig(mode="graph")), 2)
    assert graph.memory == plain
    assert "graph is planned as the eager step" in graph.notes[0]


class Reader(CrossEntropyLoss):
    """Looks at a number."""

    def __call__(self, logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        loss = super().__call__(logits_BSV, labels_BS)
        return loss * 2 if loss.item() > 3 else loss


def test_a_step_that_depends_on_numbers_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="reads numbers from tensors"):
        plan_run(recipe(loss=Reader.Config()), 2)


def test_what_training_refuses_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel_shard_degree 3 = 3, but the run has 4 processes"):
        plan_run(recipe(parallelism=ParallelismConfig(data_parallel_shard_degree=3)), 4)
    with pytest.raises(ConfigError, match="8 ranks cannot share 4 attention heads"):
        plan_run(recipe(parallelism=ParallelismConfig(tensor_parallel_degree=8)), 8)
    with pytest.raises(ConfigError, match="Adafactor steps whole tensors only"):
        plan_run(recipe(optimizer=OptimizersContainer.Config(name="Adafactor", betas=(0.9, 0.95))), 2)
    with pytest.raises(ConfigError, match=r"optimizer\.in_backward, training\.max_norm"):
        plan_run(recipe(optimizer=OptimizersContainer.Config(in_backward=True)), 2)


def test_planning_leaves_the_process_and_the_config_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HP_DEVICE", "cpu")
    config = recipe()
    before = config.to_dict()
    plan_run(config, 1)
    with pytest.raises(ConfigError):
        plan_run(recipe(parallelism=ParallelismConfig(tensor_parallel_degree=8)), 8)
    assert config.to_dict() == before
    assert not dist.is_initialized()
    assert os.environ["HP_DEVICE"] == "cpu"
    assert torch.zeros(2).sum().item() == 0.0


def test_advice_is_planned_itself_and_ends_when_it_fits() -> None:
    config = recipe(parallelism=ParallelismConfig(data_parallel_replicate_degree=2))
    config.training.local_batch_size = 16
    plan = plan_run(config, 2)
    assert advise(config, plan, plan.memory.total) == []
    (chunks, recompute) = advise(config, plan, usable := int(plan.memory.total * 0.7))
    assert chunks.option == "--loss.num_chunks 8"
    assert recompute.option == "--activation_checkpoint.mode full"
    assert recompute.total <= usable < chunks.total
    config.loss.num_chunks, config.activation_checkpoint.mode = 8, "full"
    assert plan_run(config, 2).memory.total == recompute.total


def test_states_that_are_too_large_are_shared_out_first() -> None:
    config = recipe(parallelism=ParallelismConfig(data_parallel_replicate_degree=2))
    plan = plan_run(config, 2)
    (shard, processes) = advise(config, plan, usable := plan.memory.total // 2)
    assert shard.option.startswith("--parallelism.data_parallel_replicate_degree 1")
    assert (processes.option, processes.total <= usable) == (f"--world-size {processes.world_size}", True)
