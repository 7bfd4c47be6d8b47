"""The bare model and the one under the Module protocol share no code, and agree to the last bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hp_models._legacy.qwen3_5 import Qwen3_5, Qwen3_5Config
from hp_models.qwen3_5_v2 import Qwen3_5Model, qwen3_5_config

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_theta": 10_000.0,
}


def both(tied: bool, dtype: torch.dtype = torch.float32) -> tuple[Qwen3_5, Qwen3_5Model]:
    """The two models with the same weights, none of them at a value that would hide a mistake."""
    torch.manual_seed(0)
    config = Qwen3_5Config(**SIZES, tie_word_embeddings=tied)
    bare = Qwen3_5(config)
    bare.init_weights()
    with torch.no_grad():
        for name, parameter in bare.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
            if "A_log" in name:
                parameter.mul_(0.3).sub_(2.0)  # Slow decay: what happened many tokens ago still matters.
    declared = qwen3_5_config(
        **SIZES, layer_types=config.kinds(), mrope_section=(2, 1, 1), tie_word_embeddings=tied
    ).build()
    declared.load_state_dict(bare.state_dict())
    return bare.to(dtype), declared.to(dtype)


@pytest.mark.parametrize("length", [1, 3, 64, 65, 200])
@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_every_gradient_are_those_of_v2(length: int, padded: bool) -> None:
    bare, declared = both(tied=False)
    ids, labels = torch.randint(97, (2, length)), torch.randint(97, (2, length))
    mask = torch.arange(length).expand(2, -1) >= torch.tensor([[0], [length // 3]]) if padded else None
    logits = [model(ids, attention_mask=mask) for model in (bare, declared)]
    assert torch.equal(*logits)
    for out in logits:
        F.cross_entropy(out.flatten(0, 1), labels.flatten()).backward()
    theirs = dict(declared.named_parameters())
    # In the same order: the norm of all gradients is a sum, and its last bit depends on it.
    assert [name for name, _ in bare.named_parameters()] == [*theirs]
    assert not [name for name, ours in bare.named_parameters() if not torch.equal(ours.grad, theirs[name].grad)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_tied_models_agree_in_other_types_too(dtype: torch.dtype) -> None:
    bare, declared = both(tied=True, dtype=dtype)
    assert bare.lm_head.weight is bare.embed_tokens.weight
    ids = torch.randint(97, (2, 70))
    assert torch.equal(bare(ids), declared(ids))
