"""What changes how a module runs without changing what it computes: recomputation, compilation; and clipping.

In: a module or parameters. Out: `TorchModules`, that half of the platform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hp_protocols.platform.base import Platform

from . import _torch_compat

__all__ = ["TorchModules"]


class TorchModules(Platform):
    """torch's checkpoint wrapper and per-module compilation."""

    def clip_grad_norm_(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        *,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        from .grad_clipping import clip_grad_norm_

        return clip_grad_norm_(parameters, max_norm, error_if_nonfinite=error_if_nonfinite, foreach=foreach)

    def lay_out_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        from .grad_clipping import lay_out_gradients

        lay_out_gradients(parameters)

    def checkpoint_wrapper(
        self,
        module: nn.Module,
        *,
        selective: bool = False,
        preserve_rng_state: bool = True,
        determinism_check: str = "default",
        early_stop: bool = True,
        debug: bool = False,
    ) -> nn.Module:
        options: dict[str, object] = {
            "preserve_rng_state": preserve_rng_state,
            "determinism_check": determinism_check,
            "early_stop": early_stop,
            "debug": debug,
        }
        if selective:
            options["context_fn"] = _selective_contexts
        return _torch_compat.checkpoint_wrapper(module, **options)

    def compilers(self) -> list[str]:
        # By default torch leaves out those for debugging; they run where no C++ compiler is installed.
        return torch.compiler.list_backends(exclude_tags=())

    def compile_module(
        self, module: nn.Module, *, backend: str = "inductor", fullgraph: bool = True, dynamic: bool | None = None
    ) -> None:
        module.compile(backend=backend, fullgraph=fullgraph, dynamic=dynamic)

    def set_activation_memory_budget(self, budget: float) -> None:
        _torch_compat.set_activation_memory_budget(budget)


def _selective_contexts() -> tuple[object, object]:
    """Contexts for one checkpointed forward and its recomputation; the counters in the policy start anew."""
    return create_selective_checkpoint_contexts(_SelectivePolicy())


class _SelectivePolicy:
    """Keep what is dear to compute (products, attention, communication), except every second matrix product.

    Half of the products is the usual middle between memory and time: in a block of attention and feed-forward the
    kept ones are those whose results are small beside what they were computed from.
    """

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}

    def __call__(self, ctx: object, op: Callable[..., object], *args: object, **kwargs: object) -> CheckpointPolicy:
        if op in _torch_compat.matrix_products():
            recomputing: bool = ctx.is_recompute  # type: ignore[attr-defined]
            self._products[recomputing] += 1
            keep = self._products[recomputing] % 2 == 1
        else:
            keep = op in _torch_compat.costly_ops()
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
