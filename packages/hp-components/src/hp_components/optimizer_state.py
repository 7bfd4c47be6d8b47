"""State of torch's optimizers as it is saved: complete, and with this run's hyperparameters kept.

In: optimizers, a saved state under flat names. Out: states that a fresh optimizer would start from, where there are
none yet; the hyperparameters that a checkpoint has otherwise; the current rates of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hp_protocols.distributed import canonical_named_parameters

__all__ = ["changed_hyperparameters", "fill_missing_state", "restore_rates"]


@torch.no_grad()
def fill_missing_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that were never stepped the state they would start from.

    torch's own filling counts as one step, and leaves out parameters that never got a gradient; a checkpoint of
    such a state would not fit a fresh optimizer, or would shift its bias correction.
    """
    missing = [(p, group) for group in optimizer.param_groups for p in group["params"] if not optimizer.state.get(p)]
    if not missing or _keeps_nothing(optimizer):
        return
    grads = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    # Without rate and decay a step with zero gradients changes no parameter and gathers nothing.
    neutral = {"lr": 0.0, "weight_decay": 0.0}
    before = [{name: group[name] for name in neutral if name in group} for group in optimizer.param_groups]
    for parameter, _ in grads:
        parameter.grad = None
    for parameter, _ in missing:
        parameter.grad = torch.zeros_like(parameter)
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update({name: neutral[name] for name in values})
    try:
        optimizer.step()
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)
    for parameter, group in missing:
        _forget_the_step(optimizer.state[parameter], group["lr"])


def _keeps_nothing(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)


def _forget_the_step(state: dict[str, Any], lr: float) -> None:
    """Set back what even a step that does nothing has moved: counters, and values that start from the rate."""
    starts = {"step": 0.0, "mu_product": 1.0, "eta": lr, "step_size": lr}
    for name in starts.keys() & state.keys():
        state[name].fill_(starts[name])


def changed_hyperparameters(own: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Hyperparameters that differ for some parameter: (name, saved value, this run's value)."""
    for key, value in own.items():
        name = key.rpartition(".")[2]
        # The current rate follows the schedule; which kernel computes a step does not change the method.
        if not key.startswith("param_groups.") or name in ("lr", "foreach", "fused") or key not in saved:
            continue
        before = saved[key]
        if (tuple(before) if isinstance(before, list) else before) != value:
            yield "lr" if name == "initial_lr" else name, before, value


def restore_rates(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Take over each group's current rate, if all its parameters had one and the base rate is the same."""
    names = {parameter: name for name, parameter in canonical_named_parameters(model)}
    for group in optimizer.param_groups:
        keys = [f"param_groups.{names[parameter]}" for parameter in group["params"]]
        bases = {saved.get(f"{key}.initial_lr") for key in keys}
        rates = {saved.get(f"{key}.lr") for key in keys}
        if bases == {group["initial_lr"]} and len(rates) == 1 and None not in rates:
            group["lr"] = rates.pop()
