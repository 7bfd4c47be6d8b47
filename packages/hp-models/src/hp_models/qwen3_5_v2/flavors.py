"""The sizes in which the model is offered, one function per flavour.

In: a flavour's name, of those that `hp_models.qwen3_5_v2.get_model_spec` lists. Out: a fresh config tree, which the
caller may change.
"""

from __future__ import annotations

from typing import Any

from hp_models.qwen3_5_v2.model import FULL_ATTENTION, LINEAR_ATTENTION, Qwen3_5Model, qwen3_5_config

__all__ = ["debugmodel", "flavor_config"]

PATTERN = (LINEAR_ATTENTION, LINEAR_ATTENTION, LINEAR_ATTENTION, FULL_ATTENTION)
"""Every fourth layer attends fully."""

# What the published text models differ in; vocabulary, widths of heads and angles are the same in all.
PUBLISHED: dict[str, dict[str, Any]] = {
    "0.8B": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 3584,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "2B": {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 6144,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "4B": {
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 9216,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": True,
    },
    "9B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": False,
    },
    "27B": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "intermediate_size": 17408,
        "linear_num_value_heads": 48,
        "tie_word_embeddings": False,
    },
}


def flavor_config(flavor: str) -> Qwen3_5Model.Config:
    """The config tree of a flavour."""
    return debugmodel() if flavor == "debugmodel" else published(**PUBLISHED[flavor])


def published(*, num_hidden_layers: int, **sizes: Any) -> Qwen3_5Model.Config:
    """A published size."""
    layer_types = PATTERN * (num_hidden_layers // len(PATTERN))
    return qwen3_5_config(vocab_size=248320, head_dim=256, linear_num_key_heads=16, layer_types=layer_types, **sizes)


def debugmodel(*, vocab_size: int = 2048) -> Qwen3_5Model.Config:
    """3 M parameters that learn something in four minutes on two CPU cores; layers in the published pattern."""
    return qwen3_5_config(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=640,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        layer_types=PATTERN,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=24,
        # Slow angles are for long texts: at the published 1e7 most of eight frequencies would not turn in 256 tokens.
        rope_theta=10_000.0,
        mrope_section=(3, 3, 2),
        # The published 0.02 suits widths of thousands; at this width it makes the first hundred steps slow.
        initializer_range=0.05,
        max_position_embeddings=4096,
    )
