"""Which of torch's optimizers may be named in a config, and which of the config's values each one takes.

In: a class name and values. Out: the class with checked keyword arguments, or one `Fault` per value that it does not
take; nothing is passed over.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hp_protocols.errors import Fault, nearest

__all__ = ["FIELDS", "Kind", "find_kind", "kind_names", "name_fault"]

FIELDS = ("lr", "betas", "eps", "weight_decay", "foreach", "fused")
"""Arguments that are fields of the config; every other one goes into `kwargs`."""

_REFUSED = {
    "LBFGS": "computes the loss several times within a step (a closure), which a training step cannot offer",
    "SparseAdam": "takes sparse gradients only",
}
_WHOLE_TENSORS_ONLY = ("Adafactor", "Rprop")
"""Optimizers whose step torch (2.13) cannot compute on shards."""

_NOT_OFFERED = {
    "params": "is what the groups are made of",
    "differentiable": "is for differentiating through a step",
}


def kind_names() -> list[str]:
    """The optimizers of this torch that a config may name."""
    return [
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
        and name not in _REFUSED
    ]


def name_fault(name: str, where: str) -> Fault | None:
    """What is wrong with an optimizer's name, if anything."""
    names = kind_names()
    if name in names:
        return None
    if name in _REFUSED:
        return Fault(where, f"{name} {_REFUSED[name]}", allowed=", ".join(names))
    close = nearest(name, names)
    hint = f"did you mean {close!r}?" if close else None
    return Fault(where, f"{name!r} is no optimizer of torch {torch.__version__}", ", ".join(names), hint)


@dataclass(frozen=True, slots=True)
class Kind:
    """One optimizer class and the defaults of its arguments."""

    name: str
    cls: Any
    defaults: Mapping[str, Any]

    @property
    def others(self) -> list[str]:
        """Arguments that are given in `kwargs`."""
        return [name for name in self.defaults if not self.takes_field(name) and name not in _NOT_OFFERED]

    def parameter_problem(self, name: str, parameter: nn.Parameter) -> str | None:
        """Why this optimizer cannot train this parameter, if so."""
        if self.name == "Muon" and parameter.ndim != 2:
            return f"trains matrices only, and {name} has {parameter.ndim} dimensions"
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        if self.name in _WHOLE_TENSORS_ONLY and any(isinstance(placement, Shard) for placement in placements):
            return f"steps whole tensors only, and {name} is sharded"
        return None

    def takes_field(self, name: str) -> bool:
        """Whether a field of the config is an argument of this optimizer, in the field's meaning."""
        if name not in FIELDS or name not in self.defaults:
            return False
        # Adafactor's eps is a pair.
        return name != "eps" or isinstance(self.defaults[name], float)

    def field_fault(self, name: str, where: str) -> Fault | None:
        """A field that was given, and which this optimizer does not take."""
        if self.takes_field(name):
            return None
        if name in self.others:
            default = self.defaults[name]
            return Fault(where, f"{self.name} takes another kind of {name}", hint=f"give it in kwargs, like {default}")
        hint = f"leave it at its default, which does not reach {self.name}; in kwargs it takes {', '.join(self.others)}"
        return Fault(where, f"{self.name} takes no {name}", hint=hint)

    def kwargs_faults(self, kwargs: Mapping[str, Any], where: str) -> list[Fault]:
        """Keyword arguments that this optimizer does not take, or not as this value."""
        faults = []
        for name, value in kwargs.items():
            place = f"{where}.{name}"
            if name in _NOT_OFFERED:
                faults.append(Fault(place, f"{name} {_NOT_OFFERED[name]}, it cannot be given"))
            elif self.takes_field(name):
                faults.append(Fault(place, f"{name} is a field of the optimizer", hint=f"set it there, not in {where}"))
            elif name not in self.defaults:
                close = nearest(name, self.others)
                hint = f"did you mean {close!r}?" if close else None
                faults.append(Fault(place, f"{self.name} takes no {name!r}", ", ".join(self.others), hint))
            elif (problem := _misfit(value, self.defaults[name])) is not None:
                faults.append(Fault(place, problem))
        return faults

    def read(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Checked keyword arguments, as the optimizer wants them: YAML has lists for tuples, and text for `1e-3`."""
        return {name: _read(value, self.defaults[name]) for name, value in kwargs.items()}

    def refusal(self, arguments: Mapping[str, Any]) -> str | None:
        """What the optimizer itself says about these arguments, asked with a tensor of no account."""
        try:
            self.cls([nn.Parameter(torch.zeros(2, 2))], **arguments)
        except (ValueError, TypeError, RuntimeError) as error:
            return str(error)
        return None


def find_kind(name: str) -> Kind:
    """The optimizer of this name, one of `kind_names()`."""
    cls = getattr(torch.optim, name)
    parameters = list(inspect.signature(cls).parameters.values())
    return Kind(name, cls, {parameter.name: parameter.default for parameter in parameters})


def _read(value: Any, default: Any) -> Any:
    if isinstance(value, str) and _is_number(default):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def _misfit(value: Any, default: Any) -> str | None:
    """Why a value cannot stand where this default stands; torch itself checks ranges, but few types."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else f"{value!r} is neither true nor false"
    if _is_number(default):
        try:
            fits = not isinstance(value, bool) and float(value) is not None
        except (TypeError, ValueError):
            fits = False
        return None if fits else f"{value!r} is no number"
    if isinstance(default, tuple):
        fits = isinstance(value, list | tuple) and len(value) == len(default)
        return None if fits else f"{value!r} is not {len(default)} values"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
