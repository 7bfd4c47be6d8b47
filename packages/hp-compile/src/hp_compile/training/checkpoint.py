"""Checkpointable state: the model and its optimizer by name, in true global shapes (G19).

In: a partitioned model and its optimizer. Out: a nested dict that torch's distributed checkpoint saves and loads on
any number of ranks, and the way back. Tensors in the dict are the live ones, so a load in place is a load.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hp_compile.tracer.state import StateSlot, scan_state, shard_info
from hp_compile.training.shard_guard import loaded_form, saved_form


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`{"state": {fqn: {...}}, "param_groups": [{..., "params": [fqn, ...]}]}`."""
    names = {id(slot.tensor): slot.fqn for slot in scan_state(model) if slot.is_param}
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
    slots = scan_state(model)
    _check_model_state(model, slots, given["model"])
    _check_optimizer_state({slot.fqn: slot for slot in slots if slot.is_param}, optimizer, given["optimizer"])


def _check_optimizer_state(slots: dict[str, StateSlot], optimizer: torch.optim.Optimizer, given: Any) -> None:
    if not isinstance(given, dict) or set(given) != {"state", "param_groups"}:
        raise ValueError(
            "the loaded optimizer state is not {'state': ..., 'param_groups': ...}, as state_dict() has it"
        )
    names = {id(slot.tensor): slot.fqn for slot in slots.values()}
    mine = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    theirs = [list(group["params"]) for group in given["param_groups"]]
    if mine != theirs:
        raise ValueError(
            f"the loaded optimizer has {len(theirs)} parameter groups over {sum(map(len, theirs))} parameters, this "
            f"one {len(mine)} over {sum(map(len, mine))}, or their names differ: {_difference(mine, theirs)}; load a "
            "state that the same model and optimizer saved"
        )
    for fqn, values in given["state"].items():
        if fqn not in slots:
            raise ValueError(f"the loaded optimizer has state for {fqn!r}, which is no parameter of the model")
        info = shard_info(slots[fqn].tensor)
        for key, value in values.items():
            if info is None or not isinstance(value, torch.Tensor) or not value.dim():
                continue
            if tuple(value.shape) != tuple(info.global_shape):
                raise ValueError(
                    f"{fqn}.{key} in the loaded optimizer has shape {tuple(value.shape)}, the parameter has "
                    f"{tuple(info.global_shape)}; load a state of the same model"
                )


def load_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    """For a state that `check_state` has passed; a state of another placement is gathered, so ranks load together."""
    slots = {slot.fqn: slot for slot in scan_state(model) if slot.is_param}
    complete_state(optimizer)
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
        shape = _global_shape(shapes[name]) if name in shapes else None
        if shape is not None and tuple(value.shape) != tuple(shape):
            raise ValueError(
                f"{name!r} in the loaded state has shape {tuple(value.shape)}, the model's has {tuple(shape)}; load a "
                "state of the same model"
            )


def _global_shape(slot: StateSlot) -> torch.Size:
    info = shard_info(slot.tensor)
    return slot.tensor.shape if info is None else info.global_shape


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every trainable parameter its optimizer state, as before a first step, so that a load finds all names."""
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    lacking = [parameter for parameter in params if parameter.requires_grad and not optimizer.state.get(parameter)]
    if not lacking:
        return
    held = [parameter.grad for parameter in params]
    values = [parameter.detach().clone() for parameter in lacking]
    rates = [group["lr"] for group in optimizer.param_groups]
    wanted = {id(parameter) for parameter in lacking}
    with torch.no_grad():
        for parameter in params:
            parameter.grad = torch.zeros_like(parameter) if id(parameter) in wanted else None
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        optimizer.step()
        # The step counted, and with weight decay it moved the averages: back to where a first step starts.
        for parameter, value in zip(lacking, values, strict=True):
            parameter.copy_(value)
            for entry in optimizer.state.get(parameter, {}).values():
                if isinstance(entry, torch.Tensor):
                    entry.zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, grad in zip(params, held, strict=True):
        parameter.grad = grad


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
