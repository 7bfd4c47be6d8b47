"""How parameters start: the initialisers that models declare in `param_init`.

In: an empty parameter tensor (whole, on the CPU; `Module.init_states` cuts it afterwards). Out: nothing, the
tensor is filled in place. A model config holds them as `Function.Config`, so that it stays plain data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_protocols.function import Function
from hp_protocols.platform import init, ops

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["log_uniform", "log_uniform_", "normal", "normal_", "ones", "ones_", "zeros", "zeros_"]


def normal_(tensor: Tensor, *, std: float) -> None:
    """Fill with independent draws from a normal distribution around zero."""
    init.normal_(tensor, mean=0.0, std=std)


def zeros_(tensor: Tensor) -> None:
    """Fill with zeros."""
    init.zeros_(tensor)


def ones_(tensor: Tensor) -> None:
    """Fill with ones."""
    init.ones_(tensor)


def log_uniform_(tensor: Tensor, *, low: float, high: float) -> None:
    """Fill with logarithms of independent draws from [low, high).

    Drawn and taken the logarithm of in fp32: a draw rounded to a short dtype may be 0, whose logarithm is -inf.
    """
    draws = ops.empty(tensor.shape, dtype=ops.float32, device=tensor.device)
    tensor.copy_(init.uniform_(draws, low, high).log_())


def normal(std: float) -> Function.Config:
    """The declaration of `normal_` with this standard deviation."""
    return Function.Config(fn=normal_, kwargs={"std": std})


def log_uniform(low: float, high: float) -> Function.Config:
    """The declaration of `log_uniform_` with this range."""
    return Function.Config(fn=log_uniform_, kwargs={"low": low, "high": high})


def zeros() -> Function.Config:
    """The declaration of `zeros_`."""
    return Function.Config(fn=zeros_)


def ones() -> Function.Config:
    """The declaration of `ones_`."""
    return Function.Config(fn=ones_)
