"""Weights under the names of Hugging Face checkpoints, and back.

In: a state dict, whole or any part of it. Out: the same tensors (not copies, where nothing is joined) under the other
names. The way there and back is the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hp_models.qwen3_5_v2.hf_config import config_to_hf
from hp_protocols.platform import ops
from hp_protocols.state_dict_adapter import BaseStateDictAdapter

if TYPE_CHECKING:
    from torch import Tensor

    from hp_models.common.gated_delta_net import GatedDeltaNet
    from hp_models.qwen3_5_v2.model import Qwen3_5Model

__all__ = ["Qwen3_5StateDictAdapter"]

# Checkpoints join what DeltaNet here keeps apart, rows of query, key, value after each other.
_JOINED = {
    "in_proj_qkv.weight": ("in_proj_q.weight", "in_proj_k.weight", "in_proj_v.weight"),
    "conv1d.weight": ("conv_q", "conv_k", "conv_v"),
}
_JOINED_OF = {part: joined for joined, parts in _JOINED.items() for part in parts}
_LINEAR = re.compile(r"layers\.(\d+)\.linear_attn\.(.+)")
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


class Qwen3_5StateDictAdapter(BaseStateDictAdapter):
    """Names of `Qwen3_5ForCausalLM` (prefix `model.`); from `Qwen3_5ForConditionalGeneration`
    (`model.language_model.`) the text part is taken.

    Attributes:
        PREFIXES: what may stand before a name of the text model, the longer first; names are written with the last.
        LEFT_OUT: prefixes of weights that the text model does not have: the vision tower, and the heads that predict
            further tokens. transformers leaves them out of a text model, too.
    """

    PREFIXES = ("model.language_model.", "model.")
    LEFT_OUT = ("model.visual.", "mtp.", "model.mtp.")

    model_config: Qwen3_5Model.Config

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """This model's state dict from Hugging Face's, or from part of it; `LEFT_OUT` is left out.

        A tied model gets its one matrix under both names.

        Raises:
            ValueError: a name that is not of this model, or a joined matrix with another number of rows.
        """
        state_dict: dict[str, Any] = {}
        for name, value in hf_state_dict.items():
            if name.startswith(self.LEFT_OUT):
                continue
            for ours, part in self._taken_apart(self._without_prefix(name), name, value):
                if ours in state_dict:
                    raise ValueError(f"{name}: given twice, with two prefixes")
                state_dict[ours] = part
        if self.model_config.tie_word_embeddings and _EMBEDDING in state_dict:
            state_dict.setdefault(_HEAD, state_dict[_EMBEDDING])
        return state_dict

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hugging Face's state dict from this model's, or from part of it.

        The output projection of a tied model is the embedding, and written once.

        Raises:
            ValueError: of a matrix that is joined with others not all parts are there.
        """
        hf_state_dict: dict[str, Any] = {}
        for name, value in state_dict.items():
            match = _LINEAR.fullmatch(name)
            joined = _JOINED_OF.get(match[2]) if match else None
            if match and joined:
                start = name.removesuffix(match[2])
                if self.PREFIXES[-1] + start + joined not in hf_state_dict:
                    hf_state_dict[self.PREFIXES[-1] + start + joined] = _join(state_dict, start, joined)
            elif name == _HEAD:
                if not self._is_tied_to(value, state_dict.get(_EMBEDDING)):
                    hf_state_dict[name] = value
            else:
                hf_state_dict[self.PREFIXES[-1] + name] = value
        return hf_state_dict

    def hf_config(self) -> dict[str, Any]:
        """The `config.json` with which transformers builds this model (see `Config.to_hf_config`)."""
        return config_to_hf(self.model_config)

    def _without_prefix(self, name: str) -> str:
        if name == _HEAD:
            return name
        for prefix in self.PREFIXES:
            if name.startswith(prefix):
                return name.removeprefix(prefix)
        raise ValueError(
            f"{name}: no name of a Qwen3.5 checkpoint; allowed: {_HEAD}, and names that start with "
            + ", ".join(self.PREFIXES)
        )

    def _taken_apart(self, name: str, hf_name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        match = _LINEAR.fullmatch(name)
        if match is None or match[2] not in _JOINED:
            yield name, value
            return
        sizes = self._rows(int(match[1]), hf_name)
        if value.shape[0] != sum(sizes):
            raise ValueError(f"{hf_name}: {value.shape[0]} rows, this model has {' + '.join(map(str, sizes))}")
        for part, rows in zip(_JOINED[match[2]], value.split(sizes), strict=True):
            yield name.removesuffix(match[2]) + part, rows

    def _rows(self, index: int, hf_name: str) -> list[int]:
        """Rows of query, key and value in what a checkpoint joins."""
        layers = self.model_config.layers
        linear: GatedDeltaNet.Config | None = layers[index].linear_attn if index < len(layers) else None
        if linear is None:
            raise ValueError(f"{hf_name}: layer {index} of this model is no linear-attention layer")
        keys = linear.num_key_heads * linear.key_head_dim
        return [keys, keys, linear.num_value_heads * linear.value_head_dim]

    def _is_tied_to(self, head: Tensor, embedding: Tensor | None) -> bool:
        """Whether the projection is the embedding: one memory, or two names of a tied model without data."""
        if not self.model_config.tie_word_embeddings or embedding is None:
            return False
        return head is embedding or head.is_meta or head.data_ptr() == embedding.data_ptr()


def _join(state_dict: dict[str, Any], start: str, joined: str) -> Tensor:
    names = [start + part for part in _JOINED[joined]]
    if missing := [name for name in names if name not in state_dict]:
        raise ValueError(f"{start}{joined} is {' + '.join(names)}, and {', '.join(missing)} is not there")
    whole: Tensor = ops.cat([state_dict[name] for name in names])
    return whole
