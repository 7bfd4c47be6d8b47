"""Classes that are built from a typed config: `Thing.Config(…).build()`.

In: a nested dataclass `Config` in each class. Out: a config tree that can be copied, changed, walked, written to
plain data and read back, and that builds its owners. Torch-free.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from .class_cells import point_super_here
from .errors import nearest
from .serialisation import check_callables, from_plain, to_plain
from .traversal import walk

__all__ = ["Configurable"]

ConfigT = TypeVar("ConfigT")


class Configurable:
    """Base of everything that is built from a config.

    A subclass declares `@dataclass(kw_only=True, slots=True) class Config(Parent.Config)` and takes
    `__init__(self, config, …)`. Declaring the class binds the Config to it; a subclass that declares none gets a
    Config of its own, bound to it, with the parent's fields.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Base of all configs. `build()` makes the owner from a copy of the config."""

        _owner: ClassVar[type | None] = None

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super(Configurable.Config, cls).__init_subclass__(**kwargs)
            point_super_here(cls)

        def build(self, **kwargs: Any) -> Any:
            """Construct the owner: `owner(config=<a deep copy of this config>, **kwargs)`.

            Args:
                kwargs: what exists only at run time and is no part of the config.

            Raises:
                NotImplementedError: this Config class belongs to no Configurable.
                ValueError: a keyword is also a field of the config.
                TypeError: the config holds a callable that has no dotted name.
            """
            owner = type(self).__dict__.get("_owner")
            if owner is None:
                raise NotImplementedError(
                    f"{type(self).__qualname__} is not bound to a class: declare it as `Config` inside the "
                    "Configurable subclass that it builds"
                )
            names = {field.name for field in dataclasses.fields(self)}
            if both := sorted(names & kwargs.keys()):
                raise ValueError(
                    f"{type(self).__qualname__}.build() got {', '.join(both)} as keyword, which the config has as "
                    "field; set it in the config"
                )
            check_callables(self)
            return owner(config=copy.deepcopy(self), **kwargs)

        def replace(self, **changes: Any) -> Self:
            """An independent copy with some fields changed; `__post_init__` runs on it.

            Raises:
                TypeError: a name is not a field.
            """
            names = [field.name for field in dataclasses.fields(self)]
            for name in changes:
                if name not in names:
                    near = nearest(name, names)
                    raise TypeError(
                        f"{type(self).__qualname__} has no field {name!r}"
                        + (f"; did you mean {near!r}?" if near else f"; fields: {', '.join(names)}")
                    )
            return dataclasses.replace(copy.deepcopy(self), **changes)

        def to_dict(self) -> dict[str, Any]:
            """The tree as plain data (dict, list, str, numbers, None), each node with its class under `_type`.

            Raises:
                TypeError: a value that plain data cannot hold, with its place in the tree.
            """
            return to_plain(self)

        @classmethod
        def from_dict(cls, data: Mapping[str, Any]) -> Self:
            """The config that `to_dict` wrote; `Config.from_dict(c.to_dict()) == c`.

            A partial or hand-written tree is completed with the fields' defaults. Without `_type` at its root, it is
            read as a tree of this class.

            Raises:
                ConfigError: unknown keys, missing fields, unknown classes: all of them at once, each with its place.
            """
            return from_plain(data, cls)

        def traverse(self, config_cls: type[ConfigT]) -> Iterator[tuple[str, ConfigT, Any, str | int | None]]:
            """Every node of class `config_cls` in this tree, as `(fqn, config, parent, key)`, outer before inner.

            Goes through fields, lists, tuples and dicts, into matches as well. The list of nodes is taken before the
            first one is handed out, so that nodes may be replaced on the way. `fqn` mirrors the FQN of the module
            that the node builds (`layers.0.attention`); the root's is `""`, its parent and key None. A node is
            replaced by `set_node(parent, key, new)` of `hp_protocols.traversal`: an attribute of a config, an item
            of a list, a dict or a tuple (whose parent is a `TupleItems`, a writable view of it).
            """
            yield from [match for match in walk(self) if isinstance(match[1], config_cls)]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared = cls.__dict__.get("Config")
        if declared is None or _belongs_to_another(declared, cls):
            cls.Config = _derived_config(cls)  # type: ignore[misc]
        else:
            _check_declaration(cls, declared)
        cls.Config._owner = cls


def _belongs_to_another(config: type, owner: type) -> bool:
    """Whether `Config = Other.Config` was written in the class body."""
    bound = config.__dict__.get("_owner")
    # A class decorator that makes the class anew (slots=True) declares the same Config twice: that is no other class.
    return bound is not None and (bound.__module__, bound.__name__) != (owner.__module__, owner.__name__)


def _check_declaration(owner: type, config: Any) -> None:
    name = f"{owner.__qualname__}.Config"
    if not isinstance(config, type) or not issubclass(config, Configurable.Config):
        raise TypeError(f"{name} must derive from Configurable.Config, or from the Config of a parent class")
    if "__dataclass_params__" not in config.__dict__ or "__slots__" not in config.__dict__:
        raise TypeError(f"{name} must be declared with @dataclass(kw_only=True, slots=True)")
    for field in dataclasses.fields(config):
        if field.init and not field.kw_only:
            raise TypeError(
                f"{name} has the positional field {field.name!r}; declare it with @dataclass(kw_only=True, slots=True)"
            )


def _derived_config(owner: type) -> type[Configurable.Config]:
    """A Config for a class that declares none: the fields and methods of its parents' Config, bound to the class."""
    parents = [klass.__dict__["Config"] for klass in owner.__mro__ if "Config" in klass.__dict__]
    parents = [parent for parent in parents if isinstance(parent, type) and issubclass(parent, Configurable.Config)]
    parent = parents[0]
    if unrelated := [other for other in parents[1:] if not issubclass(parent, other)]:
        raise TypeError(
            f"{owner.__qualname__} inherits {parent.__qualname__} and {unrelated[0].__qualname__}, which have "
            "different fields; declare its own Config"
        )
    namespace = {
        "__module__": owner.__module__,
        "__qualname__": f"{owner.__qualname__}.Config",
        "__doc__": parent.__doc__,
        "__slots__": (),
    }
    return types.new_class("Config", (parent,), exec_body=lambda body: body.update(namespace))
