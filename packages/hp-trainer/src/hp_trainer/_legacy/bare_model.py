"""From a bare module to one that is laid out and filled: the same values for every layout and init device.

In: a module from `build_model_fn`. Out: the module on this rank, each parameter drawn whole on the cpu and cut by its
placements. The module says how by `init_parameter(name, whole)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hp_protocols.distributed import canonical_fqn, canonical_named_parameters
from hp_protocols.errors import ConfigError, Fault
from hp_protocols.local_pieces import local_piece

__all__ = ["cast_output", "fill_parameters", "freeze", "make_empty"]


def freeze(model: torch.nn.Module, patterns: list[str]) -> int:
    """Stop training the parameters whose names contain one of these; how many elements these are.

    Raises:
        ConfigError: a pattern that no name contains, or nothing is left to train.
    """
    named = dict(model.named_parameters())
    faults = [
        Fault(
            "model.freeze_modules",
            f"{pattern!r} is in no parameter's name",
            hint=f"there are {', '.join([*named][:3])}",
        )
        for pattern in patterns
        if not any(pattern in name for name in named)
    ]
    frozen = [parameter for name, parameter in named.items() if any(pattern in name for pattern in patterns)]
    if not faults and len(frozen) == len(named):
        faults.append(Fault("model.freeze_modules", f"{patterns} leave nothing to train"))
    if faults:
        raise ConfigError(faults)
    for parameter in frozen:
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in frozen)


def make_empty(model: torch.nn.Module, device: torch.device) -> None:
    """Memory without values on the device; a tied parameter stays tied, a frozen one frozen."""
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (first, name), *others in places.values():
        for module, other in others:
            setattr(module, other, getattr(first, name))


def fill_parameters(model: torch.nn.Module, init_parameter: Any) -> None:
    """Draw every parameter from the global random numbers, one whole parameter alive at a time.

    Raises:
        ValueError: a buffer that is still on the meta device: a bare model computes what it needs.
    """
    with torch.no_grad():
        for name, parameter in canonical_named_parameters(model):
            whole = torch.empty(tuple(parameter.shape), dtype=parameter.dtype, device="cpu")
            init_parameter(name, whole)
            _write(parameter, whole)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"{canonical_fqn(name)}: a buffer on the meta device, which nothing fills")


def _write(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is not None:
        parameter.to_local().copy_(local_piece(whole, parameter.placements, tuple(mesh.shape), coordinate))


def cast_output(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give the logits in this type (`mixed_precision.output_dtype`); the loss takes them in float32 whatever it is."""
    model.register_forward_hook(lambda module, inputs, logits: logits.to(dtype))
