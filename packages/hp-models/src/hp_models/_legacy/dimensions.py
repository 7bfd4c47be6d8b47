"""The dimensions of the bare model: those that a run's file gives, over those of a published config.json.

In: fields of `Qwen3_5Config` and a folder. Out: fields for `Qwen3_5Config`, the number of layers always with them where
they are listed. A file that asks for anything else than this model computes is refused, naming the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hp_protocols.errors import ConfigError, Fault, nearest

__all__ = ["choose_dimensions", "read_dimensions"]

OVERRIDES = "model.config_overrides"
KINDS = ("linear_attention", "full_attention")
TIED = "tie_word_embeddings"
COMPOSITE, TEXT = "qwen3_5", "qwen3_5_text"
"""`model_type` of a file that holds a text and a vision model, and of a text model's."""

# What transformers takes for a field that is missing; the debug model's values belong to runs without a file.
MISSING: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}

# Fields that have to say what the bare model computes, which is the first of these values.
ONE_VALUE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0, None),
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "mlp_only_layers": ([], None),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "is_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
}
DIMENSIONS_OF_ROPE = ("rope_theta", "partial_rotary_factor")
ONE_VALUE_OF_ROPE: dict[str, tuple[Any, ...]] = {
    # With one position per token, sections of channels turn as the whole does.
    "rope_type": ("default", "mrope"),
    "type": ("default", "mrope"),
    "mrope_interleaved": (True,),
}

# Fields of which no logit of text depends: names, ids of tokens, storage, generation, vision, heads for later tokens.
NO_EFFECT = (
    *("architectures", "model_type", "transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "id2label", "label2id", "num_labels", "problem_type"),
    *("return_dict", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "_attn_implementation"),
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    "language_model_only",
)


def choose_dimensions(weights_path: str | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a run: those of the folder, and over them those of the run's own file.

    Raises:
        ConfigError: a field that the model does not have, a value of another type, layers that contradict each other,
            a config.json that is missing or asks for another model. All of them at once.
    """
    known = _fields()
    strange = [name for name in overrides if name not in known]
    faults = [
        Fault(f"{OVERRIDES}.{name}", "is no dimension of qwen3_5", ", ".join(known), _meant(name, known))
        for name in strange
    ]
    given = {name: value for name, value in overrides.items() if name not in strange}
    faults += _value_faults(given, f"{OVERRIDES}.")
    read: dict[str, Any] = {}
    if weights_path is not None:
        try:
            read = read_dimensions(weights_path)
        except ConfigError as error:
            faults += error.faults
    chosen = {**read, **given}
    if faults := faults or _layer_faults(chosen, given, f"{OVERRIDES}.layer_types"):
        raise ConfigError(faults)
    return _with_layers_counted(chosen)


def read_dimensions(folder: str) -> dict[str, Any]:
    """All dimensions of the text model in a folder's config.json; missing fields have the defaults of transformers.

    Of a file with a text and a vision model only the outer `tie_word_embeddings` counts.

    Raises:
        ConfigError: the file is missing or broken, or has fields that this model cannot honour; all of them at once.
    """
    path = Path(folder) / "config.json"
    outer = _content(path)
    text, inner = outer, ""
    faults: list[Fault] = []
    if "text_config" in outer or outer.get("model_type") == COMPOSITE:
        text, inner = _mapping(outer.get("text_config"), f"{path}: text_config", faults), "text_config."
        faults += _model_faults(outer, COMPOSITE, f"{path}: ")
        faults += _unknown_faults(outer, ("text_config", TIED, *ONE_VALUE), f"{path}: ")
        faults += _one_value_faults(outer, ONE_VALUE, f"{path}: ")
    where = f"{path}: {inner}"
    faults += _model_faults(text, TEXT, where)
    faults += _unknown_faults(text, (*_fields(), *ONE_VALUE, "rope_parameters", "rope_scaling"), where)
    faults += _one_value_faults(text, ONE_VALUE, where)
    found = {name: value for name, value in text.items() if name in _fields() and name != TIED}
    faults += _value_faults(found, where)
    found |= _rope(text, where, faults)
    if TIED in outer:
        found[TIED] = outer[TIED]
        faults += _value_faults({TIED: outer[TIED]}, f"{path}: ")
    if faults := faults or _layer_faults(found, {}, f"{where}layer_types"):
        raise ConfigError(faults)
    return {**MISSING, **_with_layers_counted(found)}


def _fields() -> tuple[str, ...]:
    from hp_models._legacy.qwen3_5 import Qwen3_5Config  # Not above: to list models imports no backend.

    return Qwen3_5Config.names()


def _value_faults(given: Mapping[str, Any], where: str) -> list[Fault]:
    """Values of another type than the fields have, numbers below 1, and kinds of layers that are unknown."""
    from hp_models._legacy.qwen3_5 import Qwen3_5Config

    faults, defaults = [], Qwen3_5Config()
    for name, value in given.items():
        if name == "layer_types":
            listed = isinstance(value, list | tuple) and all(kind in KINDS for kind in value)
            if value is not None and not listed:
                faults.append(Fault(f"{where}{name}", f"{value!r} is no list of kinds of layers", " or ".join(KINDS)))
            continue
        kind = type(getattr(defaults, name))
        # A whole number will do for one with a fraction; true and false are no numbers.
        fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if not fits:
            faults.append(Fault(f"{where}{name}", f"expected {kind.__name__}, got {value!r}"))
        elif kind is int and value < 1:
            faults.append(Fault(f"{where}{name}", f"{value} is no size", allowed="1 or more"))
    return faults


def _layer_faults(chosen: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> list[Fault]:
    """Listed layers that other fields contradict."""
    if (layers := chosen.get("layer_types")) is None:
        return []
    number, every = chosen.get("num_hidden_layers", len(layers)), overrides.get("full_attention_interval")
    if number != len(layers):
        return [Fault(where, f"has {len(layers)} layers, and num_hidden_layers is {number}", hint="change both")]
    # As in transformers, an interval beside listed layers of the same source changes nothing.
    if every and any((kind == KINDS[1]) != ((index + 1) % every == 0) for index, kind in enumerate(layers)):
        problem = f"{every} does not fit layer_types, which lists the layers one by one"
        return [Fault(f"{OVERRIDES}.full_attention_interval", problem, hint="give layer_types instead")]
    return []


def _with_layers_counted(chosen: Mapping[str, Any]) -> dict[str, Any]:
    if chosen.get("layer_types") is None:
        return dict(chosen)
    layers = tuple(chosen["layer_types"])
    return {**chosen, "layer_types": layers, "num_hidden_layers": len(layers)}


def _content(path: Path) -> dict[str, Any]:
    allowed = "a folder with config.json and safetensors"
    if not path.is_file():
        raise ConfigError(
            Fault("model.weights_path", f"there is no {path}, which says the model's dimensions", allowed)
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        problem = f"is no JSON: {error}"
        raise ConfigError(
            Fault(str(path), problem, "an object with a model's fields", "write the file again")
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(Fault(str(path), f"holds a {type(content).__name__}", "an object with a model's fields"))
    return content


def _mapping(value: Any, where: str, faults: list[Fault]) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        faults.append(Fault(where, f"{value!r} has no fields", allowed="an object"))
        return {}
    return dict(value or {})


def _model_faults(fields: Mapping[str, Any], expected: str, where: str) -> list[Fault]:
    if (given := fields.get("model_type", expected)) == expected:
        return []
    allowed, hint = f"{COMPOSITE}, {TEXT}", "qwen3_5 is the only model of the older trainer"
    return [Fault(f"{where}model_type", f"{given!r} is no dense Qwen3.5", allowed, hint)]


def _unknown_faults(fields: Mapping[str, Any], known: Iterable[str], where: str) -> list[Fault]:
    known = (*known, *NO_EFFECT)
    return [
        Fault(
            f"{where}{name}",
            f"unknown field (it says {value!r}), which might change what the model computes",
            hint=_meant(name, known) or "take it out of the file if it changes nothing",
        )
        for name, value in fields.items()
        if name not in known
    ]


def _one_value_faults(fields: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]], where: str) -> list[Fault]:
    hint = "weights that need it cannot be used; take it out of the file if these do not"
    return [
        Fault(f"{where}{name}", f"{fields[name]!r} is nothing that this model computes", repr(values[0]), hint)
        for name, values in table.items()
        if name in fields and fields[name] not in values
    ]


def _rope(text: Mapping[str, Any], where: str, faults: list[Fault]) -> dict[str, Any]:
    """What the file says of the angles in an object of its own, under the newer or the older name."""
    said = [name for name in ("rope_parameters", "rope_scaling") if text.get(name) is not None]
    if len(said) == 2 and text[said[0]] != text[said[1]]:
        faults.append(Fault(f"{where}{said[1]}", f"is not what {said[0]} says", hint=f"keep {said[0]} only"))
    if not said:
        return {}
    where += said[0]
    rope = _mapping(text[said[0]], where, faults)
    faults += _one_value_faults(rope, ONE_VALUE_OF_ROPE, f"{where}.")
    faults += _unknown_faults(rope, (*ONE_VALUE_OF_ROPE, *DIMENSIONS_OF_ROPE, "mrope_section"), f"{where}.")
    found = {name: rope[name] for name in DIMENSIONS_OF_ROPE if name in rope}
    faults += _value_faults(found, f"{where}.")
    return found


def _meant(name: str, known: Iterable[str]) -> str | None:
    near = nearest(name, known)
    return f"did you mean {near}?" if near else None
