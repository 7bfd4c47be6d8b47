"""The private torch APIs that this package uses, all in one place, each with a presence check.

In: the installed torch. Out: one function per API, under a public name. A torch that has moved one of them gets an
ImportError that names the API and the version, where it is used.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import nn

__all__ = ["checkpoint_wrapper"]


@functools.cache
def _private(module: str, name: str) -> Any:
    """`from module import name`, or an ImportError that says which torch lacks it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch {torch.__version__} has no {module}.{name}, which hp-protocols needs; "
            'install a supported torch: pip install "hp-protocols[torch]"'
        ) from error


def checkpoint_wrapper(module: nn.Module, **options: Any) -> nn.Module:
    """torch's module wrapper that recomputes activations in backward; non-reentrant."""
    return _private("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "checkpoint_wrapper")(
        module, **options
    )
