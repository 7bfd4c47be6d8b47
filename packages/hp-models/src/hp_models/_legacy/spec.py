"""The model `qwen3_5` of the older trainer, as the entry point of `hp_models.specs` offers it.

In: a flavour. Out: a ModelSpec with `build_model_fn`, which takes the dimensions as keywords. Listing it imports no
backend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_protocols.errors import ConfigError, Fault, nearest

if TYPE_CHECKING:
    from hp_models._legacy.qwen3_5 import Qwen3_5, Qwen3_5Config
    from hp_protocols.model_spec import ModelSpec

__all__ = ["build_qwen3_5", "get_model_spec"]


class _SpecFactory:
    """Callable `(flavor) -> ModelSpec`, with what `hp list` needs as attributes."""

    flavors = ("default",)
    default_flavor = "default"

    def __call__(self, flavor: str | None = None) -> ModelSpec:
        from hp_models._legacy.parallelize import parallelize_bare_model
        from hp_models._legacy.state_dict import BareQwen3_5Adapter
        from hp_protocols.model_spec import ModelSpec

        return ModelSpec(
            name="qwen3_5",
            flavor=flavor or self.default_flavor,
            build_model_fn=build_qwen3_5,
            parallelize_fn=parallelize_bare_model,
            state_dict_adapter=BareQwen3_5Adapter,
        )


get_model_spec = _SpecFactory()


def build_qwen3_5(
    *,
    weights_path: str | None = None,
    tp_plan: Mapping[str, str] | None = None,
    cp_modules: tuple[str, ...] | None = None,
    **dimensions: Any,
) -> Qwen3_5:
    """The bare model, its parameters not filled.

    Args:
        weights_path: a folder whose config.json says the dimensions.
        tp_plan: glob → colwise, rowwise or replicate; added to the model's own plan, and wins over it.
        cp_modules: globs in place of the model's own.
        dimensions: fields of `Qwen3_5Config`; they win over the folder's.

    Raises:
        ConfigError: a field that the model does not have, a value of another type, layers that contradict each other,
            or a folder without a config.json.
    """
    from hp_models._legacy.qwen3_5 import Qwen3_5, Qwen3_5Config

    known = Qwen3_5Config.names()
    faults = [
        Fault(
            f"model.config_overrides.{name}",
            "is no dimension of qwen3_5",
            allowed=", ".join(known),
            hint=f"did you mean {near}?" if (near := nearest(name, known)) else None,
        )
        for name in dimensions
        if name not in known
    ]
    if faults:
        raise ConfigError(faults)
    given = {} if weights_path is None else read_dimensions(weights_path)
    chosen = {**given, **dimensions}
    if faults := _value_faults(chosen, Qwen3_5Config()):
        raise ConfigError(faults)
    # Any: the plans are the class's, and here they become this model's own.
    model: Any = Qwen3_5(Qwen3_5Config(**chosen))
    if tp_plan:
        model._tp_plan = {**model._tp_plan, **tp_plan}
    if cp_modules is not None:
        model._cp_modules = tuple(cp_modules)
    return model


def _value_faults(chosen: Mapping[str, Any], defaults: Qwen3_5Config) -> list[Fault]:
    """Dimensions of another type than they have, and kinds of layers that are unknown or of another number."""
    faults = []
    for name, value in chosen.items():
        kind = type(getattr(defaults, name))
        # A whole number will do for one with a fraction; true and false are no numbers.
        fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if name != "layer_types" and not fits:
            faults.append(Fault(f"model.config_overrides.{name}", f"expected {kind.__name__}, got {value!r}"))
    if (layers := chosen.get("layer_types")) is None:
        return faults
    where, kinds = "model.config_overrides.layer_types", ("linear_attention", "full_attention")
    if not isinstance(layers, list | tuple) or any(layer not in kinds for layer in layers):
        return [*faults, Fault(where, f"{layers!r} is no list of kinds of layers", " or ".join(kinds))]
    number = chosen.get("num_hidden_layers", len(layers))
    if number != len(layers):
        faults.append(Fault(where, f"has {len(layers)} layers, and num_hidden_layers is {number}", hint="change both"))
    return faults


def read_dimensions(folder: str) -> dict[str, Any]:
    """What the config.json of a published text model says of those that the bare model knows."""
    from hp_models._legacy.qwen3_5 import Qwen3_5Config

    path = Path(folder) / "config.json"
    if not path.is_file():
        problem = f"there is no {path}, which says the model's dimensions"
        raise ConfigError(Fault("model.weights_path", problem, allowed="a folder with config.json and safetensors"))
    content = json.loads(path.read_text(encoding="utf-8"))
    text = {**content.get("text_config", content)}
    rope = text.get("rope_parameters") or {}
    text |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    # A model that holds a text model says outside of it whether the matrices are tied.
    if "tie_word_embeddings" in content:
        text.setdefault("tie_word_embeddings", content["tie_word_embeddings"])
    found = {name: text[name] for name in Qwen3_5Config.names() if text.get(name) is not None}
    if "layer_types" in found:
        found["layer_types"] = tuple(found["layer_types"])
    return found
