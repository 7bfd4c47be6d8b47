"""`BaseModel`: the root of a model's module tree, and what a trainer asks of its config.

In: a model config. Out: a model whose every submodule follows the Module protocol, its size and FLOPs, and
`ModelConfigConverter` for changes of the config tree before the model is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .configurable import Configurable
from .errors import Fault
from .module import Module
from .platform import get_platform

if TYPE_CHECKING:
    from .platform import Module as PlatformModule
    from .trainer_sections import TrainerConfig

__all__ = ["BaseModel", "ModelConfigConverter"]


class BaseModel(Module):
    """Base of all models."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Base of all model configs: the fields that describe the architecture, and what a trainer asks of it."""

        def update_from_config(self, *, trainer_config: TrainerConfig) -> None:
            """Fill in what depends on the run (sequence length, sharding declarations), in place.

            The trainer calls it on its own copy of the config, before it builds the model.
            """
            raise NotImplementedError(f"{type(self).__qualname__} does not implement update_from_config")

        def run_faults(self, *, trainer_config: TrainerConfig) -> list[Fault]:
            """What of a run this model cannot do (heads that ranks cannot share, rows that are too long), all at once.

            Asked when a command line is read, and before the model is built; the config is as the recipe left it.
            By default every kind of parallelism but data parallelism, which needs nothing of a model: ranks would
            repeat each other's work. A model that knows another kind overrides this.
            """
            degrees = trainer_config.parallelism
            return [
                Fault(
                    f"parallelism.{kind}_parallel_degree",
                    f"{degree}: {type(self).__qualname__.removesuffix('.Config')} has no {kind} parallelism",
                    allowed="1",
                    hint="parallelism.data_parallel_shard_degree shares the weights of any model",
                )
                for kind in ("tensor", "context", "pipeline", "expert")
                if (degree := getattr(degrees, f"{kind}_parallel_degree")) > 1
            ]

        def get_nparams_and_flops(self, model: Module, seq_len: int) -> tuple[int, int]:
            """The number of parameters, and the floating-point operations per token of forward and backward."""
            raise NotImplementedError(f"{type(self).__qualname__} does not implement get_nparams_and_flops")

        def build_on_meta(self, dtype: str) -> BaseModel:
            """The model without memory, its parameters of the named dtype (`float32`, `bfloat16`)."""
            platform = get_platform()
            before = platform.ops.get_default_dtype()
            platform.ops.set_default_dtype(platform.dtype_map[dtype])
            try:
                with platform.init_on_device("meta"):
                    model: BaseModel = self.build()
            finally:
                platform.ops.set_default_dtype(before)
            return model

    def verify_module_protocol(self) -> None:
        """Check that every submodule is a `Module`, so that initialisation and sharding reach all of them.

        Raises:
            RuntimeError: with the FQN and class of every one that is not.
        """
        strangers = [(name, type(module)) for name, module in self.named_modules() if not isinstance(module, Module)]
        if strangers:
            lines = [f"  {name}: {cls.__module__}.{cls.__qualname__}" for name, cls in strangers]
            raise RuntimeError(
                f"{len(strangers)} submodules of {type(self).__name__} do not follow the Module protocol; derive their "
                "classes from Module or use Module.from_nn_module(cls):\n" + "\n".join(lines)
            )

    def segments(self) -> Sequence[PlatformModule | Sequence[PlatformModule]]:
        """The parts that run one after another, in the order of forward: what is worth gathering together.

        A list is a part of several modules. Parameters outside all of them are one more part. By default there are
        none: the model is one part.
        """
        return []

    def init_weights(self, *, buffer_device: Any = None, seed: int | None = None) -> None:
        """`init_states` under the name that other tools look for."""
        self.init_states(buffer_device=buffer_device, seed=seed)


class ModelConfigConverter(Configurable):
    """A change of a model's config tree before the model is built: quantised layers, adapters, other kernels."""

    def __init__(self, config: ModelConfigConverter.Config) -> None:
        self.config = config

    def convert(self, config: BaseModel.Config) -> None:
        """Change the tree in place, for example with `traverse` and `set_node`."""
        raise NotImplementedError(f"{type(self).__qualname__} does not implement convert")
