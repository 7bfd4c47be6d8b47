"""Function: a callable in a config, by object or by dotted name (M23, M3)."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from hp_protocols.configurable import Configurable
from hp_protocols.errors import ConfigError
from hp_protocols.function import Function


def scale(value: float, *, by: float = 2.0) -> float:
    return value * by


def test_build_returns_the_function_itself() -> None:
    assert Function.Config(fn=scale).build() is scale
    assert Function.Config(fn="math.hypot").build() is math.hypot


def test_build_binds_kwargs() -> None:
    assert Function.Config(fn=scale, kwargs={"by": 10.0}).build()(3.0) == 30.0


def test_the_bound_kwargs_are_a_copy() -> None:
    config = Function.Config(fn=scale, kwargs={"by": 10.0})
    function = config.build()
    config.kwargs["by"] = 0.0
    assert function(3.0) == 30.0


def test_a_function_and_its_name_are_equal_configs() -> None:
    name = f"{__name__}.scale"
    assert Function.Config(fn=scale) == Function.Config(fn=name)
    assert Function.Config(fn=scale) != Function.Config(fn=math.hypot)
    assert Function.Config(fn=scale, kwargs={"by": 1.0}) != Function.Config(fn=name)
    assert Function.Config(fn=scale) != "scale"


def test_a_function_is_written_by_name_and_read_without_importing_it() -> None:
    config = Function.Config(fn=math.hypot)
    assert config.to_dict() == {
        "_type": "hp_protocols.function.Function.Config",
        "fn": "math.hypot",
        "kwargs": {},
    }
    assert Function.Config.from_dict({"fn": "no.such.module"}) == Function.Config(fn="no.such.module")
    assert Function.Config.from_dict(config.to_dict()) == config


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'math\.hipot' is unknown[\s\S]*did you mean 'math\.hypot'"):
        Function.Config(fn="math.hipot").build()
    with pytest.raises(ConfigError, match="there is no module 'nowhere'"):
        Function.Config(fn="nowhere.at_all").build()
    with pytest.raises(ConfigError, match="not a dotted name"):
        Function.Config(fn="hypot").build()


def test_a_name_of_something_else_than_a_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not callable"):
        Function.Config(fn="math.pi").build()


def test_kwargs_that_the_function_does_not_take_are_refused_at_build() -> None:
    with pytest.raises(ConfigError, match=r"Function\.Config\.kwargs: .*'bye'.*allowed: value, by"):
        Function.Config(fn=scale, kwargs={"bye": 1.0}).build()


@pytest.mark.parametrize("fn", [lambda x: x, functools.partial(scale, by=1.0), Function.Config(fn=scale).to_dict])
def test_a_callable_without_a_name_is_refused(fn: Any) -> None:
    with pytest.raises(TypeError, match=r"Function\.Config: fn: "):
        Function.Config(fn=fn).build()


def test_build_takes_no_arguments() -> None:
    with pytest.raises(TypeError, match="takes no arguments, got by"):
        Function.Config(fn=scale).build(by=3)


def test_a_function_object_can_be_called() -> None:
    assert Function(Function.Config(fn=scale, kwargs={"by": 4.0}))(2.0) == 8.0
    assert issubclass(Function, Configurable)
