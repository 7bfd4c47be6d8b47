"""What a graph cannot carry is refused before capture, by name and with the remedy (G6).

In: a live model. Out: nothing, or an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hp_compile import _torch_compat as compat
from hp_compile.tracer.state import StateSlot, scan_state


def refuse_what_capture_would_skip(model: nn.Module) -> None:
    """Raises RuntimeError for wrappers, hooks that run in backward, and an open autocast region."""
    refuse_script_modules(model)
    wrappers = compat.eager_wrappers()
    for name, module in model.named_modules():
        for wrapper, said in wrappers.items():
            if isinstance(module, wrapper):
                raise RuntimeError(
                    f"module {name or '(root)'!r} is already wrapped by {said}, which moves parameters and gradients "
                    "by itself; give GraphTrainer the plain model and say what to shard in a PassPlan"
                )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise RuntimeError(
                f"parameter {f'{name}.weight'.lstrip('.')!r} would have a sparse gradient (sparse=True), which a graph "
                "does not carry; build the embedding with sparse=False"
            )
        if compat.backward_hooks(module):
            raise RuntimeError(
                f"module {name or '(root)'!r} has a backward hook, which would run at capture only and never again; "
                "remove it, or do its work in forward (for example in an autograd.Function)"
            )
    if compat.global_backward_hooks():
        raise RuntimeError("a global module backward hook is registered, which a graph would never call; remove it")
    for slot in scan_state(model):
        hooks = compat.tensor_hooks(slot.tensor)
        if hooks:
            raise RuntimeError(
                f"parameter {slot.fqn!r} has a hook ({', '.join(hooks)}), which a graph would never call; remove it, "
                "or act on param.grad between train_step and optimizer_step"
            )
    refuse_open_autocast()


def refuse_script_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise RuntimeError(
                f"module {name or '(root)'!r} is a torch.jit script, which cannot be captured; give the Python module "
                "that it was scripted from"
            )


@contextlib.contextmanager
def refused_backward() -> Iterator[None]:
    """Within it `loss.backward()` raises: the graph has the backward already."""
    plain = torch.autograd.backward

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError(
            "train_fn calls backward(); return the loss instead: the trainer runs backward, and optimizer_step() steps"
        )

    torch.autograd.backward = refuse
    try:
        yield
    finally:
        torch.autograd.backward = plain


@contextlib.contextmanager
def watched_forward_hooks(model: nn.Module) -> Iterator[None]:
    """A forward hook that returns something changes the graph; one that returns nothing would never be called again.

    Raises:
        RuntimeError: after the capture, for hooks of the second kind, by module and name.
    """
    idle: set[str] = set()
    kept: list[tuple[dict[int, Any], int, Any]] = []
    for name, module in model.named_modules():
        for hooks in compat.forward_hooks(module):
            for key, hook in hooks.items():
                if (getattr(hook, "__module__", "") or "").startswith("hp_compile."):
                    continue
                kept.append((hooks, key, hook))
                said = f"{getattr(hook, '__qualname__', type(hook).__name__)} on {name or '(root)'!r}"
                hooks[key] = _noticing(hook, said, idle)
    try:
        yield
    finally:
        for hooks, key, hook in kept:
            hooks[key] = hook
    if idle:
        raise RuntimeError(
            f"forward hooks that return nothing would run at capture and never again: {', '.join(sorted(idle))}; "
            "remove them, or return what they compute from forward"
        )


def _noticing(hook: Any, said: str, idle: set[str]) -> Any:
    def noticing(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        if result is None:
            idle.add(said)
        return result

    return noticing


def refuse_open_autocast() -> None:
    # npu is a name that torch knows only where torch_npu is installed.
    for device in ("cpu", "cuda", *(["npu"] if hasattr(torch, "npu") else [])):
        if torch.is_autocast_enabled(device):
            raise RuntimeError(
                f"an autocast region for {device} is open around the step; the graph's operations would be cast twice. "
                "Open it inside train_fn"
            )


def refuse_shared_storage(slots: list[StateSlot]) -> None:
    """Two parameters that view one storage cannot be sharded: each would be cut on its own."""
    owner: dict[int, str] = {}
    for slot in slots:
        if not slot.is_param or slot.tensor.is_meta or slot.tensor.numel() == 0:
            continue
        key = compat.storage_id(slot.tensor.to_local() if hasattr(slot.tensor, "to_local") else slot.tensor)
        if key in owner:
            raise ValueError(
                f"parameters {owner[key]!r} and {slot.fqn!r} are views of one storage and cannot be sharded; "
                "give each its own storage (clone one), or tie them as one Parameter under two names"
            )
        owner[key] = slot.fqn
