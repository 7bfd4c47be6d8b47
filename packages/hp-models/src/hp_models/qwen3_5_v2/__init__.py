"""The dense Qwen3.5 text models, as the entry point `qwen3_5_v2` offers them.

In: a flavour's name. Out: a `ModelSpec` with the model's config and its parallelize function. Importing this
module imports no backend, so that flavours can be listed quickly; every other name is loaded on first use.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hp_protocols.errors import ConfigError, Fault, nearest

if TYPE_CHECKING:
    from hp_models.qwen3_5_v2.flavors import debugmodel
    from hp_models.qwen3_5_v2.model import Qwen3_5Model, qwen3_5_config
    from hp_models.qwen3_5_v2.parallelize import parallelize_qwen3_5_v2
    from hp_models.qwen3_5_v2.sharding import set_qwen3_5_sharding_config
    from hp_models.qwen3_5_v2.state_dict import Qwen3_5StateDictAdapter
    from hp_protocols.model_spec import ModelSpec

__all__ = [
    "Qwen3_5Model",
    "Qwen3_5StateDictAdapter",
    "debugmodel",
    "get_model_spec",
    "parallelize_qwen3_5_v2",
    "qwen3_5_config",
    "set_qwen3_5_sharding_config",
]

_HOME = {
    "Qwen3_5Model": "model",
    "Qwen3_5StateDictAdapter": "state_dict",
    "debugmodel": "flavors",
    "parallelize_qwen3_5_v2": "parallelize",
    "qwen3_5_config": "model",
    "set_qwen3_5_sharding_config": "sharding",
}


@dataclass(frozen=True)
class SpecFactory:
    """Callable `(flavor) -> ModelSpec`, with what `hp list` needs as attributes."""

    flavors: tuple[str, ...]
    default_flavor: str

    def __call__(self, flavor: str | None = None) -> ModelSpec:
        """The spec of one flavour, with a config of its own; None takes the default flavour.

        Raises:
            ConfigError: there is no such flavour.
        """
        name = self.default_flavor if flavor is None else flavor
        if name not in self.flavors:
            near = nearest(name, self.flavors)
            raise ConfigError(
                Fault(
                    "qwen3_5_v2",
                    f"no flavor {name!r}",
                    allowed=", ".join(self.flavors),
                    hint=f"did you mean {near}?" if near else None,
                )
            )
        from hp_models.qwen3_5_v2.flavors import flavor_config
        from hp_models.qwen3_5_v2.parallelize import parallelize_qwen3_5_v2
        from hp_models.qwen3_5_v2.state_dict import Qwen3_5StateDictAdapter
        from hp_protocols.model_spec import ModelSpec

        return ModelSpec(
            name="qwen3_5_v2",
            flavor=name,
            model=flavor_config(name),
            parallelize_fn=parallelize_qwen3_5_v2,
            state_dict_adapter=Qwen3_5StateDictAdapter,
        )


get_model_spec = SpecFactory(flavors=("debugmodel", "0.8B", "2B", "4B", "9B", "27B"), default_flavor="debugmodel")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
