"""The sizes in which the model is offered, one function per flavour.

In: nothing. Out: a fresh config tree, which the caller may change. Each function's name is the flavour's name,
listed in `hp_models.qwen3_5_v2.get_model_spec`.
"""

from __future__ import annotations

from hp_models.qwen3_5_v2.model import Qwen3_5Model, qwen3_5_config

__all__ = ["debugmodel"]


def debugmodel(*, vocab_size: int = 2048) -> Qwen3_5Model.Config:
    """3 M parameters that learn something in two minutes on two CPU cores; every layer attends fully."""
    return qwen3_5_config(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=640,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        layer_types=("full_attention",) * 4,
        # Slow angles are for long texts: at the published 1e7 most of eight frequencies would not turn in 256 tokens.
        rope_theta=10_000.0,
        mrope_section=(3, 3, 2),
        # The published 0.02 suits widths of thousands; at this width it makes the first hundred steps slow.
        initializer_range=0.05,
        max_position_embeddings=4096,
    )
