"""From a published `config.json` to a config tree, and back.

In: the file's content, or the folder it lies in. Out: a `Qwen3_5Model.Config` that computes what transformers would;
what this model cannot honour is refused, naming the field. The way back gives a text-only (`qwen3_5_text`) config.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_models.common.attention import GQAttention
from hp_models.common.gated_delta_net import GatedDeltaNet
from hp_models.qwen3_5_v2.model import FULL_ATTENTION, LAYER_TYPES, LINEAR_ATTENTION, Qwen3_5Model, qwen3_5_config
from hp_protocols.errors import ConfigError, Fault, nearest

if TYPE_CHECKING:
    pass

__all__ = ["config_from_hf", "config_to_hf"]

COMPOSITE, TEXT = "qwen3_5", "qwen3_5_text"
"""`model_type` of a config that holds a text and a vision config, and of a text config."""

# Fields that say a size or a number, with what transformers takes where they are missing. These are the defaults of
# its config class, not the values of any published model.
_SIZES: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
}
_LAYERS = 32
_INTERVAL = 4

# Fields that have to say what this model does, as it does nothing else. A missing one means the first value.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0, None),
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "mlp_only_layers": ((), None),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "is_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
}

# Fields that change nothing of what the text model computes: names, token ids, what files are stored as, generation.
# Heads that predict further tokens (mtp_*) are left out, as their weights are when a checkpoint is loaded.
_WITHOUT_EFFECT = {
    *("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "id2label", "label2id", "num_labels", "problem_type"),
    *("return_dict", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "_attn_implementation"),
}
_WITHOUT_EFFECT_IN_COMPOSITE = {
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    "language_model_only",
}
_READ = {"num_hidden_layers", "layer_types", "full_attention_interval", "tie_word_embeddings"}
_ROPE = {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"}


def config_from_hf(source: Mapping[str, Any] | str | os.PathLike[str]) -> Qwen3_5Model.Config:
    """The config tree for a `config.json`, given as its content or as the folder (or file) that holds it.

    Of a config with text and vision, the text model is built; it is tied if the outer `tie_word_embeddings` says so,
    the inner one has no say. Missing fields have the defaults of transformers.

    Raises:
        ConfigError: a field that this model cannot honour, or does not know; all of them at once.
    """
    outer = dict(source) if isinstance(source, Mapping) else _read(Path(source))
    composite = "text_config" in outer or outer.get("model_type") == COMPOSITE
    faults = _model_type_faults(outer, COMPOSITE if composite else TEXT, "")
    text, where = outer, ""
    if composite:
        text, where = dict(outer.get("text_config") or {}), "text_config."
        faults += _model_type_faults(text, TEXT, where)
        faults += _unknown(outer, {"text_config", "tie_word_embeddings"} | _WITHOUT_EFFECT_IN_COMPOSITE, "")
    # The published files have some of the outer fields inside, too.
    faults += _unknown(text, _READ | _ROPE | set(_SIZES) | set(_FIXED) | _WITHOUT_EFFECT_IN_COMPOSITE, where)
    faults += _fixed_faults(text, where)
    rope, rope_faults = _rope(text, where)
    layer_types, layer_faults = _layer_types(text, where)
    if faults := faults + rope_faults + layer_faults:
        raise ConfigError(faults)
    return qwen3_5_config(
        **{name: text.get(name, default) for name, default in _SIZES.items()},
        **rope,
        layer_types=layer_types,
        tie_word_embeddings=bool(outer.get("tie_word_embeddings", False)),
    )


def config_to_hf(config: Qwen3_5Model.Config) -> dict[str, Any]:
    """The content of a `config.json` from which transformers builds this model (`Qwen3_5ForCausalLM`).

    Raises:
        ConfigError: layers that differ in more than their type, which such a file cannot say.
    """
    first = config.layers[0]
    attention = _the_same("self_attn", [layer.self_attn for layer in config.layers])
    linear = _the_same("linear_attn", [layer.linear_attn for layer in config.layers])
    sizes = dict(_SIZES)
    if isinstance(attention, GQAttention.Config):
        sizes["num_attention_heads"], sizes["num_key_value_heads"] = attention.num_heads, attention.num_kv_heads
    if isinstance(linear, GatedDeltaNet.Config):
        sizes["linear_num_key_heads"], sizes["linear_key_head_dim"] = linear.num_key_heads, linear.key_head_dim
        sizes["linear_num_value_heads"], sizes["linear_value_head_dim"] = linear.num_value_heads, linear.value_head_dim
        sizes["linear_conv_kernel_dim"] = linear.conv_kernel_size
    sizes |= {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": first.mlp.gate_proj.out_features,
        "head_dim": config.rotary_emb.head_dim,
        "rms_norm_eps": getattr(config.norm, "eps", _SIZES["rms_norm_eps"]),
        "initializer_range": _initializer_range(config),
        "max_position_embeddings": config.max_position_embeddings,
    }
    rope = config.rotary_emb
    parameters = {
        "rope_type": "default",
        "rope_theta": rope.theta,
        "partial_rotary_factor": rope.partial_rotary_factor,
    }
    if rope.mrope_section is not None:
        parameters |= {"mrope_section": list(rope.mrope_section), "mrope_interleaved": True}
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": TEXT,
        **sizes,
        "num_hidden_layers": len(config.layers),
        "layer_types": [LINEAR_ATTENTION if layer.self_attn is None else FULL_ATTENTION for layer in config.layers],
        "rope_parameters": parameters,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(Fault(str(path), "there is no config.json", allowed="a folder with one, or its content"))
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(Fault(str(file), f"is no JSON: {error}")) from None
    if not isinstance(content, dict):
        raise ConfigError(Fault(str(file), "holds no fields", allowed="an object"))
    return content


def _model_type_faults(fields: Mapping[str, Any], expected: str, where: str) -> list[Fault]:
    given = fields.get("model_type", expected)
    if given == expected:
        return []
    return [Fault(f"{where}model_type", f"{given!r} is no dense Qwen3.5", allowed=f"{COMPOSITE}, {TEXT}")]


def _unknown(fields: Mapping[str, Any], known: set[str], where: str) -> list[Fault]:
    known = known | _WITHOUT_EFFECT
    faults = []
    for name in sorted(fields.keys() - known):
        near = nearest(name, known)
        hint = f"did you mean {near}?" if near else "leave it out if it changes nothing"
        faults.append(Fault(f"{where}{name}", f"unknown field (it says {fields[name]!r})", hint=hint))
    return faults


def _fixed_faults(fields: Mapping[str, Any], where: str) -> list[Fault]:
    faults = []
    for name, allowed in _FIXED.items():
        value = fields.get(name, allowed[0])
        value = tuple(value) if isinstance(value, list) else value
        if value not in allowed:
            faults.append(Fault(f"{where}{name}", f"{value!r} is not available", allowed=repr(allowed[0])))
    return faults


def _rope(fields: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[Fault]]:
    """The arguments about rotary positions, and what is wrong with the fields."""
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    given = dict(fields.get(name) or {})
    faults = []
    kind = given.pop("rope_type", given.pop("type", "default"))
    # Both the old name of sectioned positions and the new one mean plain frequencies.
    if kind not in ("default", "mrope"):
        faults.append(Fault(f"{where}{name}.rope_type", f"{kind!r} is not available", allowed="'default'"))
    if given.pop("mrope_interleaved", True) is not True:
        faults.append(Fault(f"{where}{name}.mrope_interleaved", "only interleaved sections exist here", allowed="True"))
    section = given.pop("mrope_section", (11, 11, 10))
    if not isinstance(section, list | tuple) or len(section) != 3:
        faults.append(Fault(f"{where}{name}.mrope_section", f"{section!r} is no section", allowed="three numbers"))
    arguments = {
        "rope_theta": float(given.pop("rope_theta", fields.get("rope_theta", 10_000.0))),
        "partial_rotary_factor": given.pop("partial_rotary_factor", fields.get("partial_rotary_factor", 0.25)),
        "mrope_section": tuple(section),
    }
    faults += [Fault(f"{where}{name}.{key}", f"unknown field (it says {given[key]!r})") for key in sorted(given)]
    return arguments, faults


def _layer_types(fields: Mapping[str, Any], where: str) -> tuple[list[str], list[Fault]]:
    """The type of every layer; `full_attention_interval` counts only where `layer_types` is absent."""
    count = fields.get("num_hidden_layers", _LAYERS)
    given = fields.get("layer_types")
    if given is None:
        interval = fields.get("full_attention_interval", _INTERVAL)
        if not isinstance(interval, int) or interval < 1:
            fault = Fault(f"{where}full_attention_interval", f"{interval!r} is no interval", allowed="1 or more")
            return [], [fault]
        return [LINEAR_ATTENTION if (index + 1) % interval else FULL_ATTENTION for index in range(count)], []
    faults = []
    for index, layer_type in enumerate(given):
        if layer_type not in LAYER_TYPES:
            allowed = ", ".join(LAYER_TYPES)
            faults.append(Fault(f"{where}layer_types[{index}]", f"{layer_type!r} is not available", allowed=allowed))
    if len(given) != count:
        faults.append(Fault(f"{where}layer_types", f"{len(given)} entries", allowed=f"num_hidden_layers ({count})"))
    return list(given), faults


def _the_same(name: str, mixers: list[Any]) -> Any:
    """The config that all layers of one type have; None if there is no such layer."""
    given = [mixer for mixer in mixers if mixer is not None]
    if any(mixer != given[0] for mixer in given):
        raise ConfigError(Fault(name, "layers of one type differ, which a config.json cannot say"))
    return given[0] if given else None


def _initializer_range(config: Qwen3_5Model.Config) -> float:
    """The spread of the embedding's initialiser, where it has one."""
    entry = (config.embed_tokens.param_init or {}).get("weight")
    kwargs = getattr(entry, "kwargs", None) or {}
    return float(kwargs.get("std", _SIZES["initializer_range"]))
