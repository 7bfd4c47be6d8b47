"""Checkpointable state: the model and its optimizer by name, in true global shapes (G19).

In: a partitioned model and its optimizer. Out: a nested dict that torch's distributed checkpoint saves and loads on
any number of ranks, and the way back. Tensors in the dict are the live ones, so a load in place is a load.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn

from hp_compile.tracer.state import StateSlot, shard_info
from hp_compile.training.shard_guard import loaded_form, saved_form, saved_slots


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`{"state": {fqn: {...}}, "param_groups": [{..., "params": [fqn, ...]}]}`."""
    names = {id(slot.tensor): slot.fqn for slot in saved_slots(model) if slot.is_param}
    complete_state(optimizer)
    state = {}
    for parameter, values in optimizer.state.items():
        fqn = names[id(parameter)]
        state[fqn] = {key: _saved_value(value, parameter) for key, value in values.items()}
    groups = []
    for group in optimizer.param_groups:
        entry = {key: value for key, value in group.items() if key != "params"}
        entry["params"] = [names[id(parameter)] for parameter in group["params"]]
        groups.append(entry)
    return {"state": state, "param_groups": groups}


def check_state(model: nn.Module, optimizer: torch.optim.Optimizer, given: Any) -> None:
    """Whether a trainer's state fits, without communication.

    Raises:
        ValueError: names, shapes or parameter groups differ; they are listed.
    """
    if not isinstance(given, dict) or set(given) != {"model", "optimizer"}:
        raise ValueError("a trainer's state is {'model': ..., 'optimizer': ...}, as state_dict() gives it")
    slots = saved_slots(model)
    _check_model_state(model, slots, given["model"])
    _check_optimizer_state({slot.fqn: slot for slot in slots if slot.is_param}, optimizer, given["optimizer"])


def _check_optimizer_state(slots: dict[str, StateSlot], optimizer: torch.optim.Optimizer, given: Any) -> None:
    if not isinstance(given, dict) or set(given) != {"state", "param_groups"}:
        raise ValueError(
            "the loaded optimizer state is not {'state': ..., 'param_groups': ...}, as state_dict() has it"
        )
    if _can_be_completed(optimizer):
        complete_state(optimizer)
    names = {id(slot.tensor): slot.fqn for slot in slots.values()}
    mine = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    theirs = [list(group["params"]) for group in given["param_groups"]]
    if mine != theirs:
        raise ValueError(
            f"the loaded optimizer has {len(theirs)} parameter groups over {sum(map(len, theirs))} parameters, this "
            f"one {len(mine)} over {sum(map(len, mine))}, or their names differ: {_difference(mine, theirs)}; load a "
            "state that the same model and optimizer saved"
        )
    unknown = sorted(set(given["state"]) - set(slots))
    if unknown:
        raise ValueError(f"the loaded optimizer has state for {unknown}, which are no parameters of the model")
    for fqn, slot in slots.items():
        mine_here, loaded = optimizer.state.get(slot.tensor, {}), given["state"].get(fqn, {})
        if mine_here and set(mine_here) != set(loaded):
            raise ValueError(
                f"the loaded optimizer's state of {fqn!r} has {sorted(loaded) or 'nothing'}, that of "
                f"{type(optimizer).__name__} has {sorted(mine_here)}; load a state that such an optimizer saved"
            )
        for key, value in loaded.items():
            _check_shape(f"{fqn}.{key}", value, mine_here.get(key), slot)


def _check_shape(name: str, value: Any, mine: Any, slot: StateSlot) -> None:
    """A tensor like the parameter is saved whole; others are as they are here."""
    like_parameter = not isinstance(mine, torch.Tensor) or mine.shape == slot.tensor.shape
    wanted = _global_shape(slot) if like_parameter else mine.shape
    if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) != tuple(wanted):
        raise ValueError(
            f"{name} in the loaded optimizer has shape {tuple(value.shape)}, not {tuple(wanted)}; load a state of the "
            "same model"
        )


def load_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    """For a state that `check_state` has passed; a state of another placement is gathered, so ranks load together."""
    slots = {slot.fqn: slot for slot in saved_slots(model) if slot.is_param}
    loaded: dict[str, dict[str, Any]] = {}
    for fqn, values in given["state"].items():
        parameter = slots[fqn].tensor
        loaded[fqn] = {key: _loaded_value(value, parameter, f"{fqn}.{key}") for key, value in values.items()}
    with torch.no_grad():
        for fqn, values in loaded.items():
            state = optimizer.state.setdefault(slots[fqn].tensor, {})
            for key, value in values.items():
                if isinstance(state.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                    state[key].copy_(value)
                else:
                    state[key] = value.clone() if isinstance(value, torch.Tensor) else value
    for group, entry in zip(optimizer.param_groups, given["param_groups"], strict=True):
        group.update({key: value for key, value in entry.items() if key != "params"})


def _check_model_state(model: nn.Module, slots: list[StateSlot], given: Any) -> None:
    params = {name: slot for slot in slots if slot.is_param for name in (slot.fqn, *slot.aliases)}
    wanted = set(params) | set(model.state_dict())
    if not isinstance(given, dict):
        raise ValueError(f"the loaded model state is a {type(given).__name__}, not a dict of names to tensors")
    missing, unexpected = sorted(wanted - set(given)), sorted(set(given) - wanted)
    if missing or unexpected:
        raise ValueError(
            f"the loaded model state does not fit: missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}"
            "; load a state of the same model"
        )
    shapes = {name: slot for slot in slots for name in (slot.fqn, *slot.aliases)}
    for name, value in given.items():
        if name not in shapes:
            continue
        shape = _global_shape(shapes[name])
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name!r} in the loaded state is a {type(value).__name__}, not a tensor")
        if tuple(value.shape) != tuple(shape):
            raise ValueError(
                f"{name!r} in the loaded state has shape {tuple(value.shape)}, the model's has {tuple(shape)}; load a "
                "state of the same model"
            )


def _global_shape(slot: StateSlot) -> torch.Size:
    info = shard_info(slot.tensor)
    return slot.tensor.shape if info is None else info.global_shape


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every trainable parameter its optimizer state, as before a first step, so that a load finds all names.

    Raises:
        RuntimeError: the optimizer does not start from zeros, so what it starts from is known in its first step only.
    """
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    lacking = {p for p in params if p.requires_grad and not optimizer.state.get(p)}
    if not lacking:
        return
    for group in optimizer.param_groups:
        if lacking.isdisjoint(group["params"]):
            continue
        if not _starts_from_zeros(optimizer, group):
            raise RuntimeError(
                f"{type(optimizer).__name__} has no state before its first step, and does not start from zeros: make "
                "one step before state_dict(), or load with load_state_dict()"
            )
        own = [parameter for parameter in group["params"] if parameter in lacking]
        stand_ins = [nn.Parameter(torch.zeros_like(parameter)) for parameter in own]
        made = _zero_state(optimizer, group, stand_ins)
        for parameter, stand_in in zip(own, stand_ins, strict=True):
            if made.get(stand_in):
                optimizer.state[parameter] = made[stand_in]


def _can_be_completed(optimizer: torch.optim.Optimizer) -> bool:
    return all(_starts_from_zeros(optimizer, group) for group in optimizer.param_groups)


def _shadow(optimizer: torch.optim.Optimizer, group: dict[str, Any], params: list[nn.Parameter]) -> Any:
    """An optimizer of the same kind and settings over other parameters, without the user's hooks and schedules."""
    shadow = copy.copy(optimizer)
    shadow.state, shadow.param_groups = defaultdict(dict), [{**group, "params": params}]
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(shadow, name, OrderedDict())
    return shadow


def _zero_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], params: list[nn.Parameter]) -> Any:
    shadow = _shadow(optimizer, group, params)
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    type(optimizer).step(shadow)
    for values in shadow.state.values():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                value.zero_()
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                values[key] = type(value)()
    return shadow.state


def _starts_from_zeros(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether three steps from zeroed state are, to the bit, three first steps: tried on a small parameter."""
    results = []
    for completed in (False, True):
        probe = nn.Parameter(torch.arange(6.0).view(2, 3) - 2.5)
        shadow = _shadow(optimizer, group, [probe])
        if completed:
            shadow.state.update(_zero_state(optimizer, group, [probe]))
            with torch.no_grad():
                probe.copy_(torch.arange(6.0).view(2, 3) - 2.5)
        for step in range(3):
            probe.grad = torch.cos(torch.arange(6.0).view(2, 3) + step)
            type(optimizer).step(shadow)
        results.append(probe.detach())
    return torch.equal(*results)


def _saved_value(value: Any, parameter: torch.Tensor) -> Any:
    info = shard_info(parameter)
    if isinstance(value, torch.Tensor) and info is not None and value.shape == parameter.shape and value.dim():
        return saved_form(value, info)
    return value


def _loaded_value(value: Any, parameter: torch.Tensor, name: str) -> Any:
    info = shard_info(parameter)
    if isinstance(value, torch.Tensor) and info is not None and value.dim():
        return loaded_form(value, info, name)
    return value


def _difference(mine: list[list[str]], theirs: list[list[str]]) -> str:
    ours, others = {name for group in mine for name in group}, {name for group in theirs for name in group}
    return f"only here {sorted(ours - others)[:5]}, only there {sorted(others - ours)[:5]}"
