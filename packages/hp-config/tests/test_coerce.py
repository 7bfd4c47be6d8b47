"""Reading raw values as declared types, the same for YAML and for a command line."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest

from hp_config import ConfigError
from hp_config.annotations import is_supported
from hp_config.coerce import coerce


class Colour(enum.StrEnum):
    RED = "red"
    DARK_BLUE = "dark-blue"


def fault(annotation: Any, raw: Any, **options: bool) -> str:
    with pytest.raises(ConfigError) as caught:
        coerce(annotation, raw, "a.b", **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("annotation", "raw", "value"),
    [
        (int, 3, 3),
        (int, "-3", -3),
        (int, "1_000", 1000),
        (float, 1, 1.0),
        (float, "1e-4", 1e-4),
        (float, ".inf", math.inf),
        (float, "-inf", -math.inf),
        (bool, True, True),
        (str, "5", "5"),
        (Path, "a/b", Path("a/b")),
        (Any, {"x": [1]}, {"x": [1]}),
        (Literal["none", 2], "none", "none"),
        (Literal["none", 2], "2", 2),
        (Colour, "dark-blue", Colour.DARK_BLUE),
        (Colour, "RED", Colour.RED),
        (int | None, None, None),
        (Optional[float], "1e-4", 1e-4),  # noqa: UP045 (both spellings are in use)
        (Annotated[int, "extra"], "7", 7),
        (list[int], [1, "2"], [1, 2]),
        (tuple[float, float], [0.9, "1e-1"], (0.9, 0.1)),
        (tuple[int, ...], [], ()),
        (set[str], ["a"], {"a"}),
        (dict[str, float], {"a": 1}, {"a": 1.0}),
        (list[list[int]], [[1], ["2"]], [[1], [2]]),
        (float | int, 1, 1),
        (float | int, 1.5, 1.5),
        (str | int, "5", "5"),
        (int | Literal["auto"], "auto", "auto"),
        (list[str] | None, ["a"], ["a"]),
    ],
)
def test_a_value_becomes_what_the_field_declares(annotation: Any, raw: Any, value: Any) -> None:
    read = coerce(annotation, raw, "a.b")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("word", ["true", "yes", "on", "1", "True", "YES", 1, True])
def test_every_spelling_of_yes_is_true(word: Any) -> None:
    assert coerce(bool, word, "a") is True


@pytest.mark.parametrize("word", ["false", "no", "off", "0", "False", "NO", 0, False])
def test_every_spelling_of_no_is_false(word: Any) -> None:
    assert coerce(bool, word, "a") is False


@pytest.mark.parametrize(
    ("annotation", "raw", "message"),
    [
        (int, "ten", "a.b: expected an integer, got the text 'ten'"),
        (int, 1.5, "a.b: expected an integer, got the number 1.5"),
        (int, True, "a.b: expected an integer, got the boolean true"),
        (int, None, "a.b: expected an integer, got null"),
        (int, "1e3", "write 1000"),
        (int, 5.0, "write 5"),
        (int, float("nan"), "got the number nan"),
        (float, "fast", "a.b: expected a number, got the text 'fast'"),
        (float, False, "a.b: expected a number, got the boolean false"),
        (bool, "maybe", "a.b: expected true or false, got the text 'maybe'"),
        (bool, 2, "a.b: expected true or false, got the number 2"),
        (str, 5, 'put it in quotes: "5"'),
        (str, False, "YAML reads an unquoted on, off"),
        (str, [1], "expected text, got the list [1]"),
        (Path, 3, "expected text, got the number 3"),
        (Literal["none", "blocks"], "block", "expected one of none, blocks, got the text 'block'"),
        (Literal["none", "blocks"], "block", "did you mean blocks?"),
        (Literal["on", "off"], False, "put the word in quotes"),
        (Literal[1, 2], True, "expected one of 1, 2, got the boolean true"),
        (Colour, "dark-blu", "did you mean dark-blue?"),
        (int | None, "ten", "a.b: expected an integer or null, got the text 'ten'"),
        (int | Literal["auto"], "many", "a.b: expected an integer or auto, got the text 'many'"),
        (str | None, "None", "YAML writes nothing as null"),
        (tuple[float, float], [1.0], "a.b: expected 2 values (a number, a number), got the list [1.0]"),
        (list[int], 5, "a.b: expected a list of integers, got the number 5"),
        (list[int], "5", "a.b: expected a list of integers, got the text '5'"),
        (list[int], ["x"], "a.b[0]: expected an integer, got the text 'x'"),
        (list[str] | None, [1], "a.b[0]: expected text, got the number 1"),
        (dict[str, int], [1], "a.b: expected a mapping from text to an integer"),
        (dict[str, int], {"k": "x"}, "a.b[k]: expected an integer"),
        (dict[str, int], {1: 1}, "a.b[1]: expected text, got the number 1"),
    ],
)
def test_a_wrong_value_is_named_with_its_place_and_the_expected_type(annotation: Any, raw: Any, message: str) -> None:
    assert message in fault(annotation, raw)


def test_every_wrong_item_of_a_list_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        coerce(list[int], ["x", 1, "y"], "a")
    assert [fault.where for fault in caught.value.faults] == ["a[0]", "a[2]"]


@pytest.mark.parametrize(
    ("annotation", "raw", "value"),
    [
        (int | None, "none", None),
        (str | None, "null", None),
        (str | None, "5", "5"),
        (str | int, "5", 5),
        (str | list[str], "a,b", "a,b"),
        (str | list[str], "[a, b]", ["a", "b"]),
        (list[str], "a,b", ["a", "b"]),
        (list[str], "", []),
        (list[int], "[1, 2]", [1, 2]),
        (tuple[float, float], "(0.9, 0.95)", (0.9, 0.95)),
        (list[int], ["1", "2"], [1, 2]),
        (dict[str, float], "a=1,b=2e-3", {"a": 1.0, "b": 2e-3}),
        (dict[str, float], "{a: 1, b: 2e-3}", {"a": 1.0, "b": 2e-3}),
        (dict[str, float], "", {}),
        (dict[str, float], {"a": "1"}, {"a": 1.0}),
        (Any, "[1, x]", [1, "x"]),
        (Any, "true", True),
    ],
)
def test_text_of_a_command_line_is_read_as_the_declared_type(annotation: Any, raw: Any, value: Any) -> None:
    read = coerce(annotation, raw, "a", text=True)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("annotation", "raw", "message"),
    [
        (dict[str, int], "a", "write key=value,key=value"),
        (list[int], "[1", "cannot be read"),
        (list[int], "{a: 1}", "expected an integer"),
        (dict[str, int], "{[", "cannot be read"),
    ],
)
def test_text_that_is_no_container_is_refused(annotation: Any, raw: str, message: str) -> None:
    assert message in fault(annotation, raw, text=True)


def test_an_annotation_without_a_reading_is_a_mistake_of_the_program() -> None:
    assert not is_supported(Callable[..., Any])
    assert not is_supported(list[Callable[..., Any]])
    with pytest.raises(TypeError, match="no reading is defined"):
        coerce(object, 1, "a")
