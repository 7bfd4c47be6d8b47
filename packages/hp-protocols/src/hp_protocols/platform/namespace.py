"""Lazy stand-ins for the backend's own modules, so that model code can name them without importing them.

In: the name of a platform attribute (`nn`, `F`, `ops`, `init`). Out: a `Namespace` that asks the platform on
first use of an attribute; what it hands out are the backend's real objects (`nn.Linear is torch.nn.Linear`).
"""

from __future__ import annotations

from typing import Any

from .selection import get_platform

__all__ = ["Namespace"]


class Namespace:
    """`Namespace("nn").Linear` is `get_platform().nn.Linear`; nothing is imported before that."""

    def __init__(self, name: str) -> None:
        self.__module__ = "hp_protocols.platform"
        self.__name__ = f"{self.__module__}.{name}"
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # Python looks dunders up to learn what an object is (copy, pickle, inspect, doctest); answering
        # those from torch would import it, and would pass the stand-in off as what it is not.
        if attribute.startswith("__") and attribute.endswith("__"):
            raise AttributeError(f"{self.__name__} has no attribute {attribute!r}")
        platform = get_platform()
        value = getattr(getattr(platform, self._name), attribute)
        # Kept, so that a layer's forward pays one dictionary look-up, and torch.compile sees a constant. Not while it
        # traces: in a layer that is recomputed it refuses to change anything outside, and would refuse the layer.
        if not _is_tracing(platform):
            self.__dict__[attribute] = value
        return value

    def __dir__(self) -> list[str]:
        return sorted(set(dir(getattr(get_platform(), self._name))))

    def __repr__(self) -> str:
        return f"<{self.__name__}: the platform's own, loaded on first use>"

    def __reduce__(self) -> str:
        return self._name


def _is_tracing(platform: Any) -> bool:
    compiler = getattr(platform.ops, "compiler", None)
    return compiler is not None and bool(compiler.is_compiling())
