"""Names for functions and classes: `pkg.module.name` for an object, and the object for such a name.

In: a module-level function or class, or its dotted name. Out: the other of the two. What has no name that another
process could look up (lambda, partial, closure, bound method) is refused with its kind; torch-free.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import Any

from .errors import nearest

__all__ = ["UnknownNameError", "dotted_name", "resolve_name", "same_reference"]


class UnknownNameError(LookupError):
    """A dotted name that leads nowhere.

    Attributes:
        name: the dotted name that was asked for.
        suggestion: the nearest dotted name that exists, if there is one.
    """

    def __init__(self, name: str, problem: str, suggestion: str | None = None) -> None:
        self.name = name
        self.problem = problem
        self.suggestion = suggestion
        super().__init__(f"{name!r} {problem}" + (f"; did you mean {suggestion!r}?" if suggestion else ""))

    def __reduce__(self) -> tuple[type[UnknownNameError], tuple[str, str, str | None]]:
        return type(self), (self.name, self.problem, self.suggestion)


def dotted_name(obj: Any) -> str:
    """The name under which any process finds this function or class.

    Raises:
        TypeError: no other process could find it; the message says what it is (a lambda, a closure, …).
    """
    if kind := _nameless_kind(obj):
        raise TypeError(f"{obj!r} is {kind}, which has no name that a file could hold")
    module, qualname = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if not module or not qualname:
        raise TypeError(f"{obj!r} has no module and name of its own")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is not obj:
        raise TypeError(f"{obj!r} is not what {module}.{qualname} names")
    return f"{module}.{qualname}"


def _nameless_kind(obj: Any) -> str | None:
    """What kind of object this is, if it is one that never has a dotted name."""
    if isinstance(obj, functools.partial):
        return "a functools.partial"
    if isinstance(obj, types.MethodType):
        return "a bound method"
    if isinstance(obj, types.BuiltinMethodType) and not isinstance(obj.__self__, types.ModuleType | None):
        return "a bound method"
    if not isinstance(obj, type | types.FunctionType | types.BuiltinFunctionType):
        return f"an object of class {type(obj).__name__}"
    if obj.__name__ == "<lambda>":
        return "a lambda"
    if "<locals>" in obj.__qualname__:
        return "a class defined inside a function" if isinstance(obj, type) else "a closure (defined in a function)"
    return None


def resolve_name(name: str) -> Any:
    """The object with this dotted name; imports its module.

    Raises:
        UnknownNameError: there is no such module or attribute. An error inside the module passes through.
    """
    parts = name.split(".")
    if len(parts) < 2 or not all(parts):
        raise UnknownNameError(name, "is not a dotted name such as 'package.module.name'")
    if "<locals>" in parts:
        raise UnknownNameError(name, "names something defined inside a function, which nobody else can reach")
    # The longest importable prefix is the module: a package may export a name that equals one of its submodules.
    missing: UnknownNameError | None = None
    for split in range(len(parts) - 1, 0, -1):
        module = _import_if_present(".".join(parts[:split]))
        if module is None:
            continue
        try:
            return functools.reduce(getattr, parts[split:], module)
        except AttributeError:
            missing = missing or _missing_attribute(name, module, parts[split:])
    raise missing or UnknownNameError(name, f"is unknown: there is no module {parts[0]!r}")


def _import_if_present(name: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only the module itself or a parent of it may be missing; a missing import inside it is that module's fault.
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return None
        raise


def _missing_attribute(name: str, module: types.ModuleType, attributes: list[str]) -> UnknownNameError:
    obj: Any = module
    for i, attribute in enumerate(attributes):
        if not hasattr(obj, attribute):
            near = nearest(attribute, dir(obj))
            prefix = [module.__name__, *attributes[:i]]
            suggestion = ".".join([*prefix, near, *attributes[i + 1 :]]) if near else None
            return UnknownNameError(name, f"is unknown: {'.'.join(prefix)!r} has no {attribute!r}", suggestion)
        obj = getattr(obj, attribute)
    raise AssertionError("unreachable: every attribute was found")


def same_reference(left: Any, right: Any) -> bool:
    """Whether two functions, each given as an object or as a dotted name, are the same one."""
    return bool(_name_or_object(left) == _name_or_object(right))


def _name_or_object(reference: Any) -> Any:
    if isinstance(reference, str):
        return reference
    try:
        return dotted_name(reference)
    except TypeError:
        return reference
