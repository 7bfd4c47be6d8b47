"""The bare model's weights under the names of published checkpoints, and back.

In: a state dict, whole or any complete part of it. Out: the same values under the other names. Only the three parts
of linear attention's projection and convolution are joined there; everything else only gets a prefix.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hp_protocols.platform import ops
from hp_protocols.state_dict_adapter import BaseStateDictAdapter

if TYPE_CHECKING:
    from hp_models._legacy.qwen3_5 import Qwen3_5Config

__all__ = ["BareQwen3_5Adapter"]

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
NOT_TEXT = ("model.visual.", "mtp.", "model.mtp.")
# Ending of a joined name → endings of its rows' parts: queries, keys, values.
JOINS = {
    "linear_attn.in_proj_qkv.weight": tuple(f"linear_attn.in_proj_{part}.weight" for part in "qkv"),
    "linear_attn.conv1d.weight": tuple(f"linear_attn.conv_{part}" for part in "qkv"),
}


class BareQwen3_5Adapter(BaseStateDictAdapter):
    """Made with the bare model's `Qwen3_5Config`."""

    model_config: Qwen3_5Config  # type: ignore[assignment]

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Names of `Qwen3_5ForCausalLM`. The projection of a tied model is the embedding, and left out."""
        named: dict[str, Any] = {}
        for name, tensor in state_dict.items():
            if name == HEAD:
                if not self.model_config.tie_word_embeddings:
                    named[HEAD] = tensor
                continue
            joined = next((end for end, parts in JOINS.items() if name.endswith(parts)), None)
            if joined is None:
                named[f"model.{name}"] = tensor
                continue
            layer = name[: name.index("linear_attn.")]
            if f"model.{layer}{joined}" not in named:
                named[f"model.{layer}{joined}"] = ops.cat([state_dict[layer + part] for part in JOINS[joined]])
        return named

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """The bare model's names; weights that are not of the text model are left out.

        Raises:
            ValueError: a name that is not of this model.
        """
        config = self.model_config
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        rows = [keys, keys, config.linear_num_value_heads * config.linear_value_head_dim]
        state_dict: dict[str, Any] = {}
        for name, tensor in hf_state_dict.items():
            if name.startswith(NOT_TEXT):
                continue
            own = name.removeprefix("model.").removeprefix("language_model.")
            if own == name and name != HEAD:
                raise ValueError(f"{name}: no name of a Qwen3.5 checkpoint, which begin with model.")
            joined = next((end for end in JOINS if own.endswith(end)), None)
            if joined is None:
                state_dict[own] = tensor
                continue
            layer = own.removesuffix(joined)
            for part, piece in zip(JOINS[joined], tensor.split(rows), strict=True):
                state_dict[layer + part] = piece
        if config.tie_word_embeddings and EMBEDDING in state_dict:
            state_dict.setdefault(HEAD, state_dict[EMBEDDING])
        return state_dict

    def hf_config(self) -> dict[str, Any]:
        """The `config.json` from which transformers builds this model."""
        config = self.model_config
        left_out = {"rope_theta", "partial_rotary_factor", "full_attention_interval", "layer_types"}
        sizes = {name: value for name, value in dataclasses.asdict(config).items() if name not in left_out}
        pairs = int(config.head_dim * config.partial_rotary_factor) // 2
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **sizes,
            "layer_types": list(config.kinds()),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": config.rope_theta,
                "partial_rotary_factor": config.partial_rotary_factor,
                # Text has one position per token, whichever section a pair of channels is in.
                "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
                "mrope_interleaved": True,
            },
        }
