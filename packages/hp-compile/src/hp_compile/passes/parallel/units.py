"""Units: the groups of parameters whose collectives belong together.

In: a model and a plan (or None). Out: `Unit`s, parameters in FSDP2's order (children first), every parameter once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hp_compile import _torch_compat as compat
from hp_compile.pass_config import PassConfig
from hp_compile.pass_plan import PassPlan
from hp_compile.tracer.capture import CapturePrecision
from hp_compile.tracer.state import StateSlot, scan_state


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together.

    Attributes:
        fqn: of the module (or of the parameter, if it was named itself); "" is the root.
        params: FQNs (first names), children first.
        planned: False for what the plan left out: replicated and all-reduced.
        reshard: whether gathered parameters are freed between forward and backward.
    """

    fqn: str
    params: tuple[str, ...]
    planned: bool = True
    reshard: bool = True


def resolve_units(model: nn.Module, plan: PassPlan | None, *, reshard: bool = True) -> list[Unit]:
    """The units of a model; without a plan, each child of an outermost container, and the root for the rest.

    Raises:
        ValueError: an entry of the plan matches no parameter; near names are listed.
    """
    slots = {id(slot.tensor): slot for slot in scan_state(model) if slot.is_param}
    if plan is None:
        modules = _container_children(model)
        claimed: dict[int, str] | None = None
    else:
        modules, claimed = _planned_modules(model, plan, list(slots.values()))
    taken: set[int] = set()
    units = []
    boundaries = {id(module) for module, _ in modules}
    for module, fqn in modules:
        wanted = None if claimed is None else {key for key, unit in claimed.items() if unit == fqn}
        params = _take(module, boundaries, slots, taken, wanted)
        if params:
            units.append(Unit(fqn, params, reshard=reshard))
    if claimed is not None:
        for key, unit in claimed.items():
            if key not in taken:
                taken.add(key)
                units.append(Unit(unit, (slots[key].fqn,), reshard=reshard))
    rest = _take(model, boundaries, slots, taken, None)
    rest += tuple(slot.fqn for key, slot in slots.items() if key not in taken)
    if rest:
        # FSDP2 keeps the root gathered: backward starts with it.
        units.append(Unit("", rest, planned=plan is None or plan.fsdp_rest, reshard=False))
    return units


def _container_children(model: nn.Module) -> list[tuple[nn.Module, str]]:
    found: list[tuple[nn.Module, str]] = []
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> None:
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                if id(child) not in seen:
                    seen.add(id(child))
                    found.append((child, path))
            else:
                walk(child, path)

    walk(model, "")
    return found


def _planned_modules(
    model: nn.Module, plan: PassPlan, slots: list[StateSlot]
) -> tuple[list[tuple[nn.Module, str]], dict[int, str]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    names = [name for slot in slots for name in (slot.fqn, *slot.aliases)]
    units = plan.check_matches(modules, names).unit_of
    claimed = {}
    for slot in slots:
        for name in (slot.fqn, *slot.aliases):
            if name in units:
                claimed[id(slot.tensor)] = units[name]
                break
    marked = [(modules[fqn], fqn) for fqn in dict.fromkeys(claimed.values()) if fqn in modules]
    # Deepest first, as nested wrapping must be done: a parent takes what its children left.
    order = {name: at for at, name in enumerate(modules)}
    marked.sort(key=lambda entry: (-entry[1].count("."), order[entry[1]]))
    return marked, claimed


def _take(
    module: nn.Module, boundaries: set[int], slots: dict[int, StateSlot], taken: set[int], wanted: set[int] | None
) -> tuple[str, ...]:
    params = []
    for owner in _children_first(module, boundaries):
        for parameter in compat.tensor_slots(owner)[0].values():
            key = id(parameter)
            if key in slots and key not in taken and (wanted is None or key in wanted):
                taken.add(key)
                params.append(slots[key].fqn)
    return tuple(params)


def _children_first(root: nn.Module, boundaries: set[int]) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if module is not root and id(module) in boundaries:
            return
        seen.add(id(module))
        for child in module.children():
            if id(child) not in seen:
                yield from walk(child)
        yield module

    yield from walk(root)


def capture_precision(model: nn.Module, units: list[Unit], config: PassConfig) -> CapturePrecision:
    """Mixed precision of the planned units, as FSDP2's policy means it."""
    param_dtype = getattr(torch, config.param_dtype) if config.param_dtype else None
    reduce_dtype = getattr(torch, config.reduce_dtype) if config.reduce_dtype else None
    floating = {slot.fqn for slot in scan_state(model) if slot.is_param and slot.tensor.is_floating_point()}
    modules = dict(model.named_modules(remove_duplicate=False))
    planned = [unit for unit in units if unit.planned]
    params = [fqn for unit in planned for fqn in unit.params if fqn in floating]
    return CapturePrecision(
        param_dtype=dict.fromkeys(params, param_dtype) if param_dtype else {},
        input_dtype={unit.fqn: param_dtype for unit in planned if unit.fqn in modules} if param_dtype else {},
        reduce_dtype=dict.fromkeys(params, reduce_dtype) if reduce_dtype else {},
    )
