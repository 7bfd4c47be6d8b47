"""A function in a config: by name or as an object, with arguments bound to it.

In: `Function.Config(fn="package.module.name", kwargs={…})`. Out: `build()` gives the callable itself, bound to
`kwargs` if there are any. Torch-free.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .configurable import Configurable
from .errors import ConfigError, Fault
from .references import UnknownNameError, resolve_name, same_reference
from .serialisation import BY_NAME

__all__ = ["Function"]


class Function(Configurable):
    """A module-level function with bound keyword arguments, as part of a config tree."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """What to call and with which fixed arguments.

        Two configs are equal if they name the same function, be it given as object or by its dotted name.
        """

        fn: str | Callable[..., Any] = field(metadata={BY_NAME: True})
        """A module-level function or class, or its dotted name (`"torch.nn.init.zeros_"`)."""

        kwargs: dict[str, Any] = field(default_factory=dict)
        """Keyword arguments that every call passes."""

        def __eq__(self, other: object) -> bool:
            if type(other) is not type(self):
                return NotImplemented
            return same_reference(self.fn, other.fn) and self.kwargs == other.kwargs

        __hash__ = None  # type: ignore[assignment]

        def build(self, **kwargs: Any) -> Callable[..., Any]:
            """The callable; a `functools.partial` of it if the config has `kwargs`.

            Raises:
                ConfigError: the name leads nowhere or to no function, or it does not take these `kwargs`.
                TypeError: `fn` is a lambda, a closure, a partial or a bound method, or `build` got arguments.
            """
            if kwargs:
                raise TypeError(f"Function.Config.build() takes no arguments, got {', '.join(kwargs)}; use `kwargs`")
            function: Callable[..., Any] = Configurable.Config.build(self).function
            return function

    def __init__(self, config: Config) -> None:
        function = _lookup(config.fn)
        if config.kwargs:
            _check_arguments(function, config)
            function = functools.partial(function, **config.kwargs)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _lookup(fn: str | Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(fn, str):
        try:
            fn = resolve_name(fn)
        except UnknownNameError as error:
            hint = f"did you mean {error.suggestion!r}?" if error.suggestion else None
            raise ConfigError(Fault("Function.Config.fn", f"{error.name!r} {error.problem}", hint=hint)) from None
    if not callable(fn):
        raise ConfigError(Fault("Function.Config.fn", f"{fn!r} is not callable", "a function or its dotted name"))
    return fn


def _check_arguments(function: Callable[..., Any], config: Function.Config) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # A builtin without a signature: its first call will tell.
    try:
        signature.bind_partial(**config.kwargs)
    except TypeError as error:
        allowed = ", ".join(signature.parameters) or "none"
        fault = Fault("Function.Config.kwargs", f"{config.fn} does not take them: {error}", allowed)
        raise ConfigError(fault) from None
