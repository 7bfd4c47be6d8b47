"""Qwen3.5 and its building blocks under the hyper-parallel Module protocol.

In: a model's name and flavour, through `hp_protocols.model_spec.get_spec`, or the blocks of `hp_models.common`.
Out: modules with declared initialisers and sharding. No module of this package imports a backend by name.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("hp-models")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
