"""The private torch API that this package is built on, behind one door. In: nothing. Out: plain functions."""

from __future__ import annotations

import torch

__all__ = ["require"]

_assert = getattr(torch, "_assert_async", None)
if _assert is None:
    raise ImportError(f"torch {torch.__version__} has no torch._assert_async; install torch>=2.13,<2.15")


def require(condition: torch.Tensor, message: str) -> None:
    """Raise RuntimeError(message) if a 0-d boolean tensor is false; part of a traced graph too.

    On the cpu at once; a device raises when it gets there, and is of no further use to the process.
    """
    _assert(condition, message)  # type: ignore[misc]
