"""Dotted names of functions and classes, and back."""

from __future__ import annotations

import collections
import functools
import json
import math
import operator
import os.path
import pickle
from typing import Any

import pytest

from hp_protocols.references import UnknownNameError, dotted_name, resolve_name, same_reference


class Outer:
    class Inner:
        def method(self) -> None: ...


def decorator(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@decorator
def decorated() -> None: ...


def replaced() -> None: ...


original = replaced


def replaced() -> None: ...  # type: ignore[no-redef]


@pytest.mark.parametrize(
    "obj", [math.hypot, operator.add, os.path.join, collections.OrderedDict, json.dumps, Outer.Inner, decorated, len]
)
def test_a_name_leads_back_to_the_object(obj: Any) -> None:
    assert resolve_name(dotted_name(obj)) is obj


def test_a_nested_class_and_its_method_have_names() -> None:
    assert dotted_name(Outer.Inner) == f"{__name__}.Outer.Inner"
    assert resolve_name(f"{__name__}.Outer.Inner.method") is Outer.Inner.method


@pytest.mark.parametrize(
    ("obj", "kind"),
    [
        (lambda: 1, "a lambda"),
        (functools.partial(print), "a functools.partial"),
        (Outer.Inner().method, "a bound method"),
        ([].append, "a bound method"),
        (dict.fromkeys, "a bound method"),
        (operator.attrgetter("x"), "an object of class attrgetter"),
        (original, "is not what"),
    ],
)
def test_what_nobody_else_could_find_has_no_name(obj: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=kind):
        dotted_name(obj)


def test_functions_and_classes_defined_in_a_function_have_no_name() -> None:
    def closure() -> None: ...

    class Local: ...

    with pytest.raises(TypeError, match="a closure"):
        dotted_name(closure)
    with pytest.raises(TypeError, match="a class defined inside a function"):
        dotted_name(Local)


def test_a_submodule_is_found_though_its_package_exports_the_same_name() -> None:
    from hp_protocols.override import override

    assert resolve_name("hp_protocols.override.override") is override


@pytest.mark.parametrize(
    ("name", "problem", "suggestion"),
    [
        ("json.dumbs", "'json' has no 'dumbs'", "json.dumps"),
        ("os.path.joint", "has no 'joint'", "posixpath.join"),
        ("nowhere.at.all", "there is no module 'nowhere'", None),
        ("hypot", "is not a dotted name", None),
        ("math..hypot", "is not a dotted name", None),
        ("test.<locals>.f", "inside a function", None),
    ],
)
def test_an_unknown_name_says_where_it_breaks_off(name: str, problem: str, suggestion: str | None) -> None:
    with pytest.raises(UnknownNameError, match=problem) as raised:
        resolve_name(name)
    assert raised.value.suggestion == suggestion
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_references_are_the_same_by_object_or_by_name() -> None:
    assert same_reference(math.hypot, "math.hypot")
    assert not same_reference(math.hypot, math.pow)
    function = functools.partial(print)
    assert same_reference(function, function)
    assert not same_reference(function, functools.partial(print))
