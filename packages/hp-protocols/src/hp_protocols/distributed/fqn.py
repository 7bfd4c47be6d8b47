"""Names of parameters as the model's author wrote them, whatever wraps the modules.

In: a fully qualified name, or a wrapped model. Out: the canonical name: wrappers for recomputation, compilation and
sharding do not show in it, so that checkpoints and patterns fit every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_protocols.platform import Module, Parameter

__all__ = ["canonical_fqn", "canonical_named_parameters", "canonical_state_dict"]

# The attribute under which each wrapper keeps the module that it wraps.
_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})


def canonical_fqn(name: str) -> str:
    """`layers.0._checkpoint_wrapped_module.weight` → `layers.0.weight`."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def canonical_named_parameters(model: Module) -> Iterator[tuple[str, Parameter]]:
    """`model.named_parameters()` under canonical names; a tied parameter once, under its first name."""
    for name, parameter in model.named_parameters():
        yield canonical_fqn(name), parameter


def canonical_state_dict(model: Module) -> dict[str, Any]:
    """`model.state_dict()` under canonical names.

    Raises:
        ValueError: two entries get the same name.
    """
    states: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        fqn = canonical_fqn(name)
        if fqn in states:
            raise ValueError(f"{name!r} and another entry of the state dict are both called {fqn!r} without wrappers")
        states[fqn] = value
    return states
