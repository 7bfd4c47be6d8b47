"""What an annotation allows, as a test and in words."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest

from hp_config.annotations import conforms, container_kind, describe, is_supported, show, union_members


class Colour(enum.StrEnum):
    RED = "red"
    DARK_BLUE = "dark-blue"


@pytest.mark.parametrize(
    ("annotation", "value", "fits"),
    [
        (float, 1, True),
        (float, True, False),
        (float, "1e-4", False),
        (int, True, False),
        (bool, 1, False),
        (Literal[1], True, False),
        (int | None, None, True),
        (int | None, "x", False),
        (tuple[float, float], (0.9, 0.95), True),
        (tuple[float, float], [0.9, 0.95], False),
        (tuple[float, float], (0.9,), False),
        (tuple[int, ...], (1, 2), True),
        (tuple, (1, "a"), True),
        (list[int], [1, "2"], False),
        (list, [1, "2"], True),
        (set[int], {1}, True),
        (set[int], [1], False),
        (dict[str, int], {"a": 1}, True),
        (dict[str, int], {"a": "1"}, False),
        (dict, {"a": "1"}, True),
        (Colour, Colour.RED, True),
        (Colour, "red", False),
        (Path, Path("a"), True),
        (Any, object(), True),
    ],
)
def test_conforms_tells_a_fitting_value_from_one_that_needs_conversion(annotation: Any, value: Any, fits: bool) -> None:
    assert conforms(annotation, value) is fits


def test_a_container_is_told_from_a_scalar() -> None:
    assert container_kind(list[int] | None) is list
    assert container_kind(Optional[dict[str, int]]) is dict  # noqa: UP045
    assert container_kind(str | None) is None
    assert container_kind(Literal["a"]) is None


def test_types_read_as_words() -> None:
    assert describe(dict[str, list[int]]) == "a mapping from text to a list of integers"
    assert describe(tuple[int, ...]) == "a list of integers"
    assert describe(list[int | None]) == "a list of (an integer or null)"


def test_values_read_as_words_with_their_kind() -> None:
    assert show(None) == "null"
    assert show(True) == "the boolean true"
    assert show({"a": 1, "b": 2}) == "a mapping with the keys a, b"
    assert show({}) == "an empty mapping"
    assert show((1, "a")) == "the list [1, 'a']"
    assert show(Colour) == f"{Colour!r} (EnumType)"


def test_unions_are_taken_apart_and_wrappers_off() -> None:
    assert union_members(Annotated[int | None, "x"]) == (int, type(None))
    assert union_members(Optional[str]) == (str, type(None))  # noqa: UP045
    assert union_members(int) == (int,)
    assert is_supported(Annotated[list[int] | None, "x"])
    assert not is_supported(Callable[..., Any])
