"""The units of data parallelism: modules whose parameters are gathered and reduced in one collective.

In: a model and the units a model's author chose. Out: a checked plan, innermost first. What torch would do wrongly
without a word (a weight shared between two units becomes two weights) is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_protocols.platform import get_platform, nn

from .fqn import canonical_fqn

if TYPE_CHECKING:
    from hp_protocols.platform import Module

    Unit = Module | Sequence[Module]

__all__ = ["UnitPlan", "plan_units"]


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """One unit: its modules, and whether it is the last one that forward needs."""

    modules: tuple[Module, ...]
    is_last: bool


def plan_units(model: Module, units: Iterable[Unit]) -> list[UnitPlan]:
    """The units in the order in which they have to be wrapped: a unit inside another one first.

    Args:
        units: modules of `model`, in the order of forward; a list of modules is one unit.

    Raises:
        ValueError: a unit is not in the model, is the model, is given twice, has no forward, or is wrapped already;
            or two units share a parameter.
    """
    groups = [tuple(unit) if isinstance(unit, list | tuple) else (unit,) for unit in units]
    names = {id(module): name for name, module in model.named_modules()}
    _check_membership(groups, names)
    _check_forward(model, groups, names)
    _check_unwrapped(model)
    _check_sharing(model, groups)
    plans = [UnitPlan(modules, is_last=index == len(groups) - 1) for index, modules in enumerate(groups)]
    # named_modules lists a parent before its children, so the reverse of that order is innermost first; among
    # siblings the order does not matter.
    order = {id(module): index for index, module in enumerate(model.modules())}
    return sorted(plans, key=lambda plan: -max(order[id(module)] for module in plan.modules))


def _check_membership(groups: Sequence[tuple[Module, ...]], names: dict[int, str]) -> None:
    seen: set[int] = set()
    for index, modules in enumerate(groups):
        if not modules:
            raise ValueError(f"units[{index}] is an empty list")
        for module in modules:
            if id(module) not in names:
                raise ValueError(
                    f"units[{index}] ({type(module).__name__}) is not a module of the model; "
                    "wrapping for recomputation replaces modules, so take units from the model after it"
                )
            if names[id(module)] == "":
                raise ValueError(f"units[{index}] is the model itself, which is always the outermost unit")
            if id(module) in seen:
                raise ValueError(f"units[{index}]: {canonical_fqn(names[id(module)])!r} is given twice")
            seen.add(id(module))


def _check_forward(model: Module, groups: Sequence[tuple[Module, ...]], names: dict[int, str]) -> None:
    """Parameters are gathered when a unit's forward is called; a mere container's never is."""
    for module in [*(module for modules in groups for module in modules), model]:
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
            where = canonical_fqn(names[id(module)]) or "the model"
            raise ValueError(f"{where} ({type(module).__name__}) has no forward; make its members units")


def _check_unwrapped(model: Module) -> None:
    platform = get_platform()
    for name, module in model.named_modules():
        if platform.is_data_parallel(module):
            where = canonical_fqn(name) or "the model"
            raise ValueError(f"{where} is sharded or replicated already; data parallelism is applied once")


def _check_sharing(model: Module, groups: Sequence[tuple[Module, ...]]) -> None:
    """A parameter that two units use has to be in one of them only."""
    unit_of = {id(module): index for index, modules in enumerate(groups) for module in modules}
    # Innermost unit by path; parents come before their children. None: the model's own unit.
    unit_at: dict[str, int | None] = {}
    first: dict[int, tuple[int | None, str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        unit = unit_at[path] = unit_of.get(id(module), unit_at.get(path.rpartition(".")[0]))
        for name, parameter in module.named_parameters(recurse=False):
            fqn = canonical_fqn(f"{path}.{name}" if path else name)
            owner, first_fqn = first.setdefault(id(parameter), (unit, fqn))
            if owner != unit:
                raise ValueError(
                    f"{first_fqn!r} and {fqn!r} are one parameter in two units, which would become two; "
                    "put their modules in one unit: units=[..., [first, second]]"
                )
