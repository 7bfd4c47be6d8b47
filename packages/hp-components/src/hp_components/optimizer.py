"""One optimizer per model part behind one handle, with state that is keyed by parameter name and so reshards.

In: model parts whose parameters are plain tensors or DTensors. Out: `step`, `zero_grad`, and a flat state dict
(`state.<fqn>.exp_avg`, `param_groups.<fqn>.lr`) that torch.distributed.checkpoint stores for any layout (M30).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from hp_components._rank_zero import log
from hp_protocols.configurable import Configurable
from hp_protocols.distributed import canonical_named_parameters
from hp_protocols.errors import ConfigError, Fault, nearest

__all__ = ["OptimizersContainer"]

logger = logging.getLogger(__name__)

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}
_DEFAULT_DECAY_KEYWORDS = ("bias", "norm")
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class OptimizersContainer(Configurable):
    """Steps all model parts together. A tied weight is stepped once; a frozen parameter is left out.

    Hyperparameters are part of the state, but a resumed run follows its own config: where a checkpoint says
    something else, a line names both values. Only the current learning rate is taken from the checkpoint, if the
    base rate is the same.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        name: str = "AdamW"
        """Optimizer class: AdamW or Adam."""

        lr: float = 3e-4
        """Learning rate at full height; the schedule scales it."""

        betas: tuple[float, float] = (0.9, 0.95)
        """Decay rates of the running means of the gradient and of its square."""

        eps: float = 1e-8
        """Added to the denominator."""

        weight_decay: float = 0.1
        """Weight decay of the parameters that decay."""

        foreach: bool | None = None
        """Step many tensors per kernel launch. None: on accelerators without a fused kernel."""

        fused: bool | None = None
        """One kernel for the whole step. None: on cuda."""

        decay_keywords: tuple[str, ...] = _DEFAULT_DECAY_KEYWORDS
        """A parameter whose name contains one of these (in any case) gets no weight decay."""

        def faults(self, path: str) -> list[Fault]:
            """Values that no optimizer could have."""
            faults = []
            if self.name not in _OPTIMIZERS:
                close = nearest(self.name, _OPTIMIZERS)
                faults.append(
                    Fault(
                        f"{path}.name",
                        f"{self.name!r} is not available",
                        allowed=", ".join(_OPTIMIZERS),
                        hint=f"did you mean {close!r}?" if close else None,
                    )
                )
            for name in ("lr", "weight_decay"):
                value = getattr(self, name)
                if not 0.0 <= value < math.inf:
                    faults.append(Fault(f"{path}.{name}", f"{value} is out of range", allowed="0 or more"))
            if not 0.0 < self.eps < math.inf:
                faults.append(Fault(f"{path}.eps", f"{self.eps} is out of range", allowed="above 0"))
            if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
                faults.append(Fault(f"{path}.betas", f"{self.betas} is out of range", allowed="two of 0 ≤ beta < 1"))
            if self.foreach and self.fused:
                faults.append(Fault(f"{path}.foreach", "given together with fused", hint="choose one of them"))
            if "" in self.decay_keywords:
                faults.append(Fault(f"{path}.decay_keywords", "an empty keyword would match every parameter"))
            return faults

    def __init__(self, config: Config, *, model_parts: Sequence[nn.Module]) -> None:
        faults = config.faults("optimizer")
        if faults:
            raise ConfigError(faults)
        self.config = config
        self.model_parts = list(model_parts)
        self.optimizers = [self._optimizer(model) for model in self.model_parts]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """State and hyperparameters under flat keys; the tensors are the live ones, not copies."""
        flat: dict[str, Any] = {}
        for model, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            _fill_missing_state(optimizer)
            part = get_optimizer_state_dict(model, optimizer, options=_FLAT)
            if twice := flat.keys() & part.keys():
                raise ValueError(f"two model parts have the same parameter names: {sorted(twice)[:3]}")
            flat.update(part)
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state; hyperparameters stay this run's (see the class).

        Raises:
            KeyError: the state of a parameter is missing; the name says which.
        """
        changes: dict[tuple[str, Any, Any], None] = {}
        for model, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            _fill_missing_state(optimizer)
            own = get_optimizer_state_dict(model, optimizer, options=_FLAT)
            merged = {key: state_dict[key] if key.startswith("state.") else value for key, value in own.items()}
            changes |= dict.fromkeys(_changes(own, state_dict))
            set_optimizer_state_dict(model, optimizer, merged, options=_FLAT)
            _restore_rates(model, optimizer, state_dict)
        for name, saved, now in changes:
            log(
                logger,
                logging.WARNING,
                "optimizer: %s was %s when the checkpoint was saved and is %s now; this run goes on with %s",
                name,
                saved,
                now,
                now,
            )

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        config = self.config
        decaying, plain = self._split(model)
        groups = [
            {"params": params, "weight_decay": weight_decay, "initial_lr": config.lr}
            for params, weight_decay in ((decaying, config.weight_decay), (plain, 0.0))
            if params
        ]
        if not groups:
            raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient")
        foreach, fused = _kernels(config, next(iter(decaying or plain)).device.type)
        return _OPTIMIZERS[config.name](
            groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=foreach, fused=fused
        )

    def _split(self, model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Trainable parameters with and without weight decay, each once."""
        decaying: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        unused = set(self.config.decay_keywords)
        for name, parameter in canonical_named_parameters(model):
            if not parameter.requires_grad:
                continue
            matching = {keyword for keyword in self.config.decay_keywords if keyword.lower() in name.lower()}
            unused -= matching
            (plain if matching else decaying).append(parameter)
        if mistaken := sorted(unused - set(_DEFAULT_DECAY_KEYWORDS)):
            raise ConfigError(
                [
                    Fault(
                        "optimizer.decay_keywords",
                        f"{keyword!r} matches no parameter",
                        hint="see the names in model.named_parameters()",
                    )
                    for keyword in mistaken
                ]
            )
        log(
            logger,
            logging.INFO,
            "optimizer %s: weight decay %g on %d tensors, none on %d (names with %s)",
            self.config.name,
            self.config.weight_decay,
            len(decaying),
            len(plain),
            ", ".join(self.config.decay_keywords) or "nothing",
        )
        return decaying, plain


def _kernels(config: OptimizersContainer.Config, device_type: str) -> tuple[bool, bool]:
    """(foreach, fused), both decided: torch_npu replaces torch's own choice by one that asks for an NPU."""
    fused = config.fused
    if fused is None:
        fused = device_type == "cuda" and not config.foreach
    foreach = config.foreach
    if foreach is None:
        foreach = device_type != "cpu" and not fused
    return foreach, fused


@torch.no_grad()
def _fill_missing_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that were never stepped the state they would start from.

    torch's own filling counts as one step, and leaves out parameters that never got a gradient; a checkpoint of
    such a state would not fit a fresh optimizer, or would shift its bias correction.
    """
    missing = [p for group in optimizer.param_groups for p in group["params"] if not optimizer.state.get(p)]
    if not missing:
        return
    grads = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter, _ in grads:
        parameter.grad = None
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # a step with zero gradients and no rate changes no parameter
    try:
        optimizer.step()
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    for parameter in missing:
        optimizer.state[parameter]["step"].zero_()


def _changes(own: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Hyperparameters that differ for some parameter: (name, saved value, this run's value)."""
    for key, value in own.items():
        name = key.rpartition(".")[2]
        # The current rate follows the schedule; which kernel computes a step does not change the method.
        if not key.startswith("param_groups.") or name in ("lr", "foreach", "fused") or key not in saved:
            continue
        if saved[key] != value:
            yield "lr" if name == "initial_lr" else name, saved[key], value


def _restore_rates(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Take over each group's current rate, if all its parameters had one and the base rate is the same."""
    names = {parameter: name for name, parameter in canonical_named_parameters(model)}
    for group in optimizer.param_groups:
        keys = [f"param_groups.{names[parameter]}" for parameter in group["params"]]
        bases = {saved.get(f"{key}.initial_lr") for key in keys}
        rates = {saved.get(f"{key}.lr") for key in keys}
        if bases == {group["initial_lr"]} and len(rates) == 1 and None not in rates:
            group["lr"] = rates.pop()
