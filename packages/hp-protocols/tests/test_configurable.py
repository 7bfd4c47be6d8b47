"""Configurable: binding of a Config to its class, building from an independent copy, replace, `super()` (M1–M3)."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from hp_protocols.configurable import Configurable


class Leaf(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        size: int = 1

    def __init__(self, config: Config, **extra: Any) -> None:
        self.config = config
        self.extra = extra


class Silent(Leaf):
    """Declares no Config."""


class Tree(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        leaf: Leaf.Config = field(default_factory=Leaf.Config)
        leaves: list[Leaf.Config] = field(default_factory=list)
        function: Callable[..., Any] | None = None

    def __init__(self, config: Config) -> None:
        self.config = config
        self.leaf = config.leaf.build()


def twice(method: Any) -> Any:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any) -> Any:
        method(self, *args)
        return method(self, *args)

    return wrapper


class Counting(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        value: int = 0
        runs: int = 0

        def __post_init__(self) -> None:
            self.runs += 1

    def __init__(self, config: Config) -> None:
        self.config = config


class Base(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        size: int = 2

        def plain(self) -> list[str]:
            return ["base plain"]

        def nested(self) -> list[str]:
            return ["base nested"]

        def decorated(self) -> list[str]:
            return ["base decorated"]

        @property
        def prop(self) -> list[str]:
            return ["base prop"]

        @classmethod
        def of_class(cls) -> list[str]:
            return ["base class", cls.__qualname__]

        @staticmethod
        def static() -> list[str]:
            return ["base static"]


class Derived(Base):
    @dataclass(kw_only=True, slots=True)
    class Config(Base.Config):
        extra: int = 3

        def plain(self) -> list[str]:
            return [*super().plain(), "plain"]

        def nested(self) -> list[str]:
            def inner() -> list[str]:
                return super(__class__, self).nested()  # type: ignore[name-defined]

            return [*inner(), "nested"]

        @twice
        def decorated(self) -> list[str]:
            return [*super().decorated(), "decorated"]

        @property
        def prop(self) -> list[str]:
            return [*super().prop, "prop"]

        @classmethod
        def of_class(cls) -> list[str]:
            return [*super().of_class(), "class"]

        @staticmethod
        def static() -> list[str]:
            return [*__class__.__mro__[1].static(), "static"]  # type: ignore[name-defined]

        def replace(self, **changes: Any) -> Any:
            return super().replace(**changes)


def test_build_makes_the_class_that_declares_the_config() -> None:
    assert type(Leaf.Config(size=3).build()) is Leaf
    assert Leaf.Config(size=3).build().config.size == 3


def test_a_subclass_without_config_gets_one_bound_to_itself() -> None:
    config = Silent.Config(size=4)
    assert Silent.Config is not Leaf.Config
    assert issubclass(Silent.Config, Leaf.Config)
    assert type(config.build()) is Silent
    assert type(Leaf.Config().build()) is Leaf
    assert config != Leaf.Config(size=4)
    assert repr(config) == "Silent.Config(size=4)"


def test_the_config_of_a_subclass_without_config_has_slots_and_pickles_by_its_own_name() -> None:
    config = Silent.Config(size=4)
    assert Silent.Config.__slots__ == ()
    assert not hasattr(config, "__dict__")
    with pytest.raises(AttributeError):
        config.sise = 5  # type: ignore[attr-defined]
    assert (Silent.Config.__module__, Silent.Config.__qualname__) == (__name__, "Silent.Config")
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert type(again) is Silent.Config


def test_a_config_declared_without_slots_is_refused_when_the_class_is_created() -> None:
    with pytest.raises(TypeError, match=r"Loose\.Config must be declared with @dataclass\(kw_only=True, slots=True\)"):

        class Loose(Configurable):
            @dataclass(kw_only=True)
            class Config(Configurable.Config):
                size: int = 1


def test_a_config_without_dataclass_is_refused_when_the_class_is_created() -> None:
    with pytest.raises(TypeError, match="must be declared with @dataclass"):

        class Bare(Configurable):
            class Config(Configurable.Config):
                __slots__ = ()
                size: int = 1


def test_a_positional_field_is_refused_when_the_class_is_created() -> None:
    with pytest.raises(TypeError, match=r"Positional\.Config has the positional field 'size'"):

        class Positional(Configurable):
            @dataclass(slots=True)
            class Config(Configurable.Config):
                size: int = 1


def test_a_config_that_is_no_configurable_config_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Stranger\.Config must derive from Configurable\.Config"):

        class Stranger(Configurable):
            @dataclass(kw_only=True, slots=True)
            class Config:
                size: int = 1


def test_two_unrelated_inherited_configs_must_be_decided_by_the_class() -> None:
    with pytest.raises(TypeError, match=r"inherits Leaf\.Config and Counting\.Config"):

        class Both(Leaf, Counting):
            pass


def test_using_the_config_of_another_class_does_not_take_it_away_from_its_owner() -> None:
    class Borrower(Leaf):
        Config = Leaf.Config

    assert type(Borrower.Config().build()) is Borrower
    assert type(Leaf.Config().build()) is Leaf


def test_a_config_that_was_never_bound_does_not_build() -> None:
    with pytest.raises(NotImplementedError, match="is not bound to a class"):
        Free().build()


def test_a_config_derived_outside_a_class_does_not_silently_build_the_parent() -> None:
    with pytest.raises(NotImplementedError, match="FreeLeaf is not bound"):
        FreeLeaf().build()


@dataclass(kw_only=True, slots=True)
class Free(Configurable.Config):
    pass


@dataclass(kw_only=True, slots=True)
class FreeLeaf(Leaf.Config):
    def replace(self, **changes: Any) -> Any:
        return super().replace(**changes)


def test_build_copies_the_config_deeply() -> None:
    config = Tree.Config(leaves=[Leaf.Config(size=1)])
    tree = config.build()
    assert tree.config == config
    assert tree.config is not config
    tree.config.leaves[0].size = 99
    tree.config.leaf.size = 98
    tree.leaf.config.size = 97
    assert config == Tree.Config(leaves=[Leaf.Config(size=1)])
    config.leaves[0].size = 5
    assert tree.config.leaves[0].size == 99


def test_build_does_not_run_post_init_again() -> None:
    config = Counting.Config()
    assert config.runs == 1
    assert config.build().config.runs == 1


def test_build_hands_on_what_is_no_field() -> None:
    assert Leaf.Config().build(device="cpu").extra == {"device": "cpu"}


def test_build_refuses_a_keyword_that_is_a_field() -> None:
    with pytest.raises(ValueError, match=r"Leaf\.Config\.build\(\) got size as keyword"):
        Leaf.Config().build(size=3)


def test_replace_gives_an_independent_copy_and_runs_post_init() -> None:
    config = Tree.Config(leaves=[Leaf.Config(size=1)])
    other = config.replace(leaf=Leaf.Config(size=7))
    other.leaves[0].size = 9
    assert config.leaves[0].size == 1
    assert (config.leaf.size, other.leaf.size) == (1, 7)
    assert Counting.Config().replace(value=5).runs == 2


def test_replace_names_the_field_that_was_probably_meant() -> None:
    with pytest.raises(TypeError, match="no field 'leavs'; did you mean 'leaves'"):
        Tree.Config().replace(leavs=[])


@pytest.mark.parametrize("name", ["plain", "nested", "decorated"])
def test_zero_argument_super_works_in_methods_of_a_slotted_config(name: str) -> None:
    assert getattr(Derived.Config(), name)() == [f"base {name}", name]


def test_zero_argument_super_works_in_properties_classmethods_and_staticmethods() -> None:
    config = Derived.Config()
    assert config.prop == ["base prop", "prop"]
    assert config.of_class() == ["base class", "Derived.Config", "class"]
    assert config.static() == ["base static", "static"]
    assert config.replace(extra=9).extra == 9
    assert FreeLeaf(size=2).replace(size=3).size == 3


def test_repairing_super_leaves_the_methods_of_other_classes_alone() -> None:
    class Borrows(Base):
        @dataclass(kw_only=True, slots=True)
        class Config(Base.Config):
            borrowed = Derived.Config.plain

    assert Derived.Config().plain() == ["base plain", "plain"]
    with pytest.raises(TypeError, match="super"):  # As in any Python class: the method belongs to Derived.Config.
        Borrows.Config().borrowed()


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda: 1, "a lambda"),
        (functools.partial(twice, None), "a functools.partial"),
        ([].append, "a bound method"),
        (Leaf.Config().to_dict, "a bound method"),
    ],
)
def test_a_callable_without_a_name_is_refused_with_its_place(function: Any, kind: str) -> None:
    config = Tree.Config()
    config.function = function
    outer = Holder.Config(tree=config)
    for act in (outer.to_dict, outer.build):
        with pytest.raises(TypeError, match=rf"tree\.function.*{kind}.*Function\.Config"):
            act()


def test_a_closure_is_refused_with_its_place() -> None:
    def closure() -> None: ...

    with pytest.raises(TypeError, match=r"tree\.function.*closure"):
        Holder.Config(tree=Tree.Config(function=closure)).build()


def test_a_module_level_function_builds() -> None:
    assert Tree.Config(function=twice).build().config.function is twice


class Holder(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        tree: Tree.Config = field(default_factory=Tree.Config)

    def __init__(self, config: Config) -> None:
        self.config = config


def test_configs_copy_and_pickle() -> None:
    config = Tree.Config(leaf=Silent.Config(size=3), function=twice)
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
