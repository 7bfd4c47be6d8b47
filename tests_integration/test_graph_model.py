"""hp-compile captures a whole training step of the hybrid Qwen3.5: the same bits as eager (G6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hp_compile import run_traced_graph, trace_model_graph
from hp_models.qwen3_5_v2 import qwen3_5_config
from hp_protocols.distributed import apply_ac

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "mrope_section": (2, 1, 1),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}


def hybrid(recompute: str = "none") -> torch.nn.Module:
    model = qwen3_5_config(**SIZES).build()
    model.init_states(seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    apply_ac(model, blocks=model.layers, mode=recompute)  # type: ignore[arg-type]
    return model


def step(model: torch.nn.Module, batch: dict[str, Any], label: torch.Tensor) -> torch.Tensor:
    logits = model(batch["ids"], **{name: value for name, value in batch.items() if name != "ids"})
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="sum")


def batch(case: str) -> dict[str, Any]:
    rows, length = (1, 130) if case == "one row" else (2, 1) if case == "one token" else (2, 100)
    ids = torch.randint(0, 101, (rows, length), generator=torch.Generator().manual_seed(2))
    padding = torch.ones(rows, length, dtype=torch.int64)
    padding[-1, : length // 3] = 0
    extra: dict[str, dict[str, Any]] = {
        "packed": {"cu_seqlens": [0, 37, 100, 103, 200]},
        "padded": {"attention_mask": padding},
        "positions": {"position_ids": torch.arange(5, 5 + length).expand(rows, length).contiguous()},
        "sections": {"position_ids": torch.randint(0, 50, (3, rows, length))},
    }
    return {"ids": ids, **extra.get(case, {})}


CASES = ["two rows", "one row", "one token", "packed", "padded", "positions", "sections", "full", "selective"]


@pytest.mark.parametrize("case", CASES)
def test_a_captured_step_of_the_hybrid_model_is_eager_bit_for_bit(case: str) -> None:
    model = hybrid(case if case in ("full", "selective") else "none")
    inputs = batch(case)
    label = torch.randint(0, 101, inputs["ids"].shape, generator=torch.Generator().manual_seed(3))
    graph = trace_model_graph(model, step, inputs, label)
    loss, grads = run_traced_graph(graph, model, inputs, label)
    expected = step(model, inputs, label)
    expected.backward()
    assert torch.equal(loss, expected)
    for name, parameter in model.named_parameters():
        assert torch.equal(grads[name], parameter.grad), name
