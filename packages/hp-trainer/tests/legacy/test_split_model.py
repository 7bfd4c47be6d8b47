"""LLMTrainer with a model that is split by tensor and context parallelism: trains, saves, goes on in another layout,
exports, as one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import build
from torch.distributed.tensor import DTensor

from hp_protocols.distributed import canonical_fqn
from hp_protocols.testing import run_world

LENGTH = 12
OPTIONS: dict[str, Any] = {
    "data__type": "preset_pt",
    "data__train_path": "rows.pt",
    "data__shuffle": False,
    "data__max_seq_len": LENGTH,
    "train__checkpoint": {"save_steps": 2, "save_hf_weights": True},
    "train__optimizer": {"lr": 1e-3, "lr_decay_style": "constant", "lr_warmup_ratio": 0.0, "max_grad_norm": 0.5},
    "train__eval": {"eval_steps": 2, "eval_dataset": "rows.pt"},
    "train__gradient_checkpointing": {"activation_checkpoint": "full"},
}
HALF = {**OPTIONS, "train__max_steps": 2, "train__accelerator": {"tp": 2}}
# All micro-batches have as many tokens, so that both ways to average are the same one.
REST = {
    **OPTIONS,
    "train__max_steps": 4,
    "train__accelerator": {"tp": 2, "cp": 2},
    "train__checkpoint": {"save_steps": 2, "load_path": "outputs"},
    "train__optimizer": {**OPTIONS["train__optimizer"], "loss_aggregation": "rank_average"},
}


def trained(**options: Any) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """(loss, norm) of every step in the run folder, and the weights, whole."""
    trainer = build(**options)
    trainer.train()
    found = {
        canonical_fqn(name): value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in trainer.model.state_dict().items()
    }
    trainer.close()
    lines = [json.loads(line) for line in (trainer.run_folder.path / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "event" not in line], found


def first_half(rank: int, world_size: int) -> Any:
    return trained(**HALF)


def rest(rank: int, world_size: int) -> Any:
    return trained(**REST)


def test_a_split_model_trains_saves_goes_on_and_exports_as_one_process_does() -> None:
    torch.save({"input_ids": torch.randint(300, (16, LENGTH), generator=torch.Generator().manual_seed(3))}, "rows.pt")
    helpers = {"PYTHONPATH": str(Path(__file__).parent)}
    alone = {**OPTIONS, "train__max_steps": 4, "train__checkpoint": {"output_dir": "alone", "save_hf_weights": False}}
    expected, weights = trained(**alone)
    run_world(first_half, 4, init_process_group=False, env=helpers)
    results = run_world(rest, 4, init_process_group=False, env=helpers)

    seen, found = results[0]
    assert len(seen) == 4
    for step, other in zip(seen, expected, strict=True):
        assert step == pytest.approx(other, rel=1e-5)
    for name, weight in weights.items():
        assert (found[name] - weight).norm() <= 1e-4 * weight.norm(), name
        assert all(torch.equal(result[1][name], found[name]) for result in results), name
    exported = load_file("outputs/checkpoint/step-4-hf/model.safetensors")
    assert torch.equal(exported["lm_head.weight"], found["lm_head.weight"])
    assert torch.equal(exported["model.layers.1.self_attn.q_proj.weight"], found["layers.1.self_attn.q_proj.weight"])
    parts = [found[f"layers.0.linear_attn.in_proj_{part}.weight"] for part in "qkv"]
    assert torch.equal(exported["model.layers.0.linear_attn.in_proj_qkv.weight"], torch.cat(parts))
