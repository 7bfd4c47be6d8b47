"""The model `qwen3_5` of the older trainer, as the entry point of `hp_models.specs` offers it.

In: a flavour. Out: a ModelSpec with `build_model_fn`, which takes the dimensions as keywords. Listing it imports no
backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hp_models._legacy.dimensions import choose_dimensions

if TYPE_CHECKING:
    from hp_models._legacy.qwen3_5 import Qwen3_5
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
        tp_plan: glob → colwise, rowwise or replicate; comes after the model's own plan, so that it wins over it, and of
            its own entries the later one does.
        cp_modules: globs in place of the model's own.
        dimensions: fields of `Qwen3_5Config`; they win over the folder's.

    Raises:
        ConfigError: a field that the model does not have, a value of another type, layers that contradict each other,
            a folder whose config.json is missing or asks for another model.
    """
    from hp_models._legacy.qwen3_5 import Qwen3_5, Qwen3_5Config

    # Any: the plans are the class's, and here they become this model's own.
    model: Any = Qwen3_5(Qwen3_5Config(**choose_dimensions(weights_path, dimensions)))
    if tp_plan:
        # Later entries win: the user's come last and in the user's order, also those that the model has, too.
        own = {glob: word for glob, word in model._tp_plan.items() if glob not in tp_plan}
        model._tp_plan = {**own, **tp_plan}
    if cp_modules is not None:
        model._cp_modules = tuple(cp_modules)
    return model
