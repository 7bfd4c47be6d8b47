"""The mindspore backend: dtypes only for now; everything else is refused by name.

In: an installed mindspore. Out: `MindsporePlatform`, whose members raise `CapabilityError` except `dtype_map`.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from .base import Platform
from .capability import Capability, CapabilityError

__all__ = ["MindsporePlatform"]


class MindsporePlatform(Platform):
    """mindspore behind the same door; what it cannot do yet says so."""

    name: ClassVar[str] = "mindspore"
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.DTYPES})

    @property
    def dtype_map(self) -> dict[str, Any]:
        import mindspore

        names = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int8", "uint8", "bool_")
        return {name.removesuffix("_"): getattr(mindspore, name) for name in names}

    def _refuse(self, feature: str, capability: Capability) -> NoReturn:
        hint = "not available on mindspore yet; use HYPER_PARALLEL_PLATFORM=torch"
        raise CapabilityError(feature, capability, self.name, hint)
