"""Models by name and flavor: what a trainer needs to know about a model, and where it finds it.

In: entry points of the group `hp_models.specs`, or `register_spec`. Out: `get_spec(name, flavor)` gives a `ModelSpec`
of the caller's own. Listing names imports no model; torch-free until a model is loaded.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .references import same_reference
from .spec_registry import SpecFactory, find_factory, known_flavors, list_flavors, list_specs, make_spec, register_spec
from .state_dict_adapter import BaseStateDictAdapter

if TYPE_CHECKING:
    from .model import BaseModel

__all__ = ["ModelSpec", "SpecFactory", "get_spec", "list_flavors", "list_specs", "register_spec"]


@dataclass(kw_only=True, slots=True)
class ModelSpec:
    """One model in one size, with the functions that a trainer calls for it.

    Exactly one of `model` and `build_model_fn` is set.

    Attributes:
        name: the name in the registry.
        flavor: the size or variant.
        model: the config that builds the model.
        build_model_fn: `() -> module`, for a model without a config.
        parallelize_fn: `(model, *, parallel_dims, trainer_config) -> model`, lays the model out on the meshes.
        pipelining_fn: splits the model into pipeline stages.
        post_optimizer_build_fn: called once the optimizers exist.
        state_dict_adapter: translates state dicts from and to Hugging Face's layout.
        clip_grad_fn: replaces the norm clipping of the trainer.
    """

    name: str
    flavor: str
    model: BaseModel.Config | None = None
    build_model_fn: Callable[..., Any] | None = None
    parallelize_fn: Callable[..., Any] | None = None
    pipelining_fn: Callable[..., Any] | None = None
    post_optimizer_build_fn: Callable[..., Any] | None = None
    state_dict_adapter: type[BaseStateDictAdapter] | None = None
    clip_grad_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if (self.model is None) == (self.build_model_fn is None):
            given = "neither" if self.model is None else "both"
            raise ValueError(
                f"ModelSpec {self.name!r} ({self.flavor!r}) has {given} of model and build_model_fn; set exactly one"
            )

    def plain_fields(self) -> list[str]:
        """The fields that `to_dict` of a config writes: all that the registry would not give back by itself."""
        fields = [field.name for field in dataclasses.fields(self)]
        registered = _registered(self.name, self.flavor)
        if registered is None:
            return fields
        return [
            name
            for name in fields
            if name in ("name", "flavor", "model") or not same_reference(getattr(self, name), getattr(registered, name))
        ]

    @classmethod
    def from_plain_fields(cls, fields: dict[str, Any]) -> ModelSpec:
        """The spec that `plain_fields` was written of: functions that were left out come from the registry.

        Raises:
            ConfigError: name or flavor are missing or unknown.
        """
        if fields.keys() >= {field.name for field in dataclasses.fields(cls)}:
            return cls(**fields)
        if "name" not in fields:
            raise ValueError("a model spec needs its name")
        spec = get_spec(fields["name"], fields.get("flavor"))
        return dataclasses.replace(spec, **fields)


def get_spec(name: str, flavor: str | None = None) -> ModelSpec:
    """An independent copy of the spec; without `flavor`, of the model's default one.

    Raises:
        ConfigError: unknown name or flavor (with the nearest ones), or a name that two distributions claim.
    """
    return copy.deepcopy(make_spec(name, flavor))


def _registered(name: str, flavor: str) -> ModelSpec | None:
    """The registry's spec of that name, or None for a spec that somebody made by hand."""
    factory = find_factory(name)
    if factory is None or flavor not in (known_flavors(factory) or (flavor,)):
        return None
    return make_spec(name, flavor)
