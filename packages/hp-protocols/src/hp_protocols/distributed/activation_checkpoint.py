"""Recompute activations in backward instead of keeping them.

In: a model and its blocks. Out: the blocks as they now stand in the model, each recomputed by itself. Gradients are
the same bits as without.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, get_args

from hp_protocols.errors import ConfigError, Fault
from hp_protocols.platform import Capability, get_platform

if TYPE_CHECKING:
    from hp_protocols.platform import Module

__all__ = ["ActivationCheckpointMode", "apply_ac"]

ActivationCheckpointMode = Literal["none", "selective", "full", "memory_budget"]


def apply_ac(
    model: Module,
    *,
    blocks: Iterable[Module],
    mode: ActivationCheckpointMode = "selective",
    preserve_rng_state: bool = True,
    determinism_check: Literal["default", "none"] = "default",
    early_stop: bool = False,
    debug: bool = False,
    memory_budget: float = 0.5,
    compile_enabled: bool = False,
) -> list[Module]:
    """Wrap each block for recomputation, in place: a wrapped block takes its block's place in `model`.

    Apply it after `Module.parallelize` and before `apply_compile` and `apply_fsdp`. Names in `state_dict` do not
    change; `named_parameters` shows the wrapper (see `canonical_fqn`).

    Args:
        blocks: modules of `model`, none of them `model`.
        mode: `none` keeps everything. `full` keeps a block's inputs only. `selective` also keeps what is costly to
            compute: attention, communication and every second matrix product. `memory_budget` lets the compiler
            choose within `memory_budget`; the blocks have to be compiled.
        preserve_rng_state: recompute under the random state of the first pass, so that dropout draws the same.
        determinism_check: `default` compares shapes, dtypes and devices of both passes, `none` does not.
        early_stop: end a recomputation when all that backward needs is there.
        debug: record where operators were called, to explain a mismatch; slow.
        memory_budget: for mode `memory_budget`, the share of activations to keep, from 0 to 1. It holds for every
            module that this process compiles from now on.
        compile_enabled: whether `apply_compile` follows.

    Returns:
        the blocks that now stand in the model, to be used as units of `apply_fsdp`.

    Raises:
        ConfigError: the mode is unknown, or is `memory_budget` without compilation.
        ValueError: a block is not in the model, or is the model.
        CapabilityError: the platform cannot recompute.
    """
    blocks = list(blocks)
    _check_mode(mode, memory_budget, compile_enabled)
    if mode == "none":
        return blocks
    platform = get_platform()
    if mode == "memory_budget":
        platform.require(Capability.COMPILE, "memory_budget")
        platform.set_activation_memory_budget(memory_budget)
        return blocks
    platform.require(Capability.ACTIVATION_CHECKPOINT, "apply_ac")
    places = _places(model, blocks)
    wrapped = []
    for block in blocks:
        wrapper = platform.checkpoint_wrapper(
            block,
            selective=mode == "selective",
            preserve_rng_state=preserve_rng_state,
            determinism_check=determinism_check,
            early_stop=early_stop,
            debug=debug,
        )
        for parent, name in places[id(block)]:
            parent.register_module(name, wrapper)
        wrapped.append(wrapper)
    return wrapped


def _check_mode(mode: str, memory_budget: float, compile_enabled: bool) -> None:
    where = "activation_checkpoint.mode"
    modes = get_args(ActivationCheckpointMode)
    if mode not in modes:
        raise ConfigError(Fault(where, f"{mode!r} is no mode", allowed=", ".join(modes)))
    if mode != "memory_budget":
        return
    if not compile_enabled:
        raise ConfigError(
            Fault(
                where,
                "'memory_budget' needs compiled blocks: the compiler chooses what to keep",
                hint="set compile.mode to blocks, or the mode to selective or full",
            )
        )
    if not 0.0 <= memory_budget <= 1.0:
        raise ConfigError(
            Fault("activation_checkpoint.memory_budget", f"{memory_budget} is no share", allowed="0 to 1")
        )


def _places(model: Module, blocks: list[Module]) -> dict[int, list[tuple[Module, str]]]:
    """Where each block hangs: a block that is used twice is replaced in both places."""
    places: dict[int, list[tuple[Module, str]]] = {id(block): [] for block in blocks}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in places and path:
            parent, _, name = path.rpartition(".")
            places[id(module)].append((model.get_submodule(parent), name))
    for index, block in enumerate(blocks):
        if block is model:
            raise ValueError(f"blocks[{index}] is the model itself, which has no place to be replaced in")
        if not places[id(block)]:
            raise ValueError(f"blocks[{index}] ({type(block).__name__}) is not a module of the model")
    return places
