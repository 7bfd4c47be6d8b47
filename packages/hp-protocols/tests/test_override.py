"""override: nodes of a config tree replaced by pattern, in a copy (M4)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest

from hp_protocols.configurable import Configurable
from hp_protocols.errors import ConfigError
from hp_protocols.override import override


class Linear(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        size: int = 1
        bias: bool = False


class Adapted(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        base: Linear.Config
        rank: int = 8


class Layer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        wq: Linear.Config = field(default_factory=Linear.Config)
        wk: Linear.Config = field(default_factory=lambda: Linear.Config(size=2))


class Model(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        layers: tuple[Layer.Config, ...] = field(default_factory=lambda: tuple(Layer.Config() for _ in range(3)))
        head: Linear.Config = field(default_factory=lambda: Linear.Config(size=3))


def test_a_pattern_replaces_every_match_in_a_copy() -> None:
    config = Model.Config()
    before = copy.deepcopy(config)
    result = override(config, "layers.*.wq", Linear.Config(size=9))
    assert [layer.wq.size for layer in result.layers] == [9, 9, 9]
    assert [layer.wk.size for layer in result.layers] == [2, 2, 2]
    assert result.layers[0].wq is not result.layers[1].wq
    assert config == before


def test_a_function_makes_the_new_node_from_the_old_one() -> None:
    result = override(Model.Config(), ["layers.[02].wk", "head"], lambda old: Adapted.Config(base=old, rank=2))
    assert result.head == Adapted.Config(base=Linear.Config(size=3), rank=2)
    assert [type(layer.wk) for layer in result.layers] == [Adapted.Config, Linear.Config, Adapted.Config]


def test_fields_of_matching_nodes_can_be_changed() -> None:
    result = override(Model.Config(), "**", config_cls=Linear.Config, bias=True)
    assert [node.bias for _, node, _, _ in result.traverse(Linear.Config)] == [True] * 7


def test_one_star_matches_one_part_of_an_fqn_only() -> None:
    with pytest.raises(ConfigError, match=r"override 'layers\.\*q': matches no config"):
        override(Model.Config(), "layers.*q", bias=True)
    assert override(Model.Config(), "**.wq", size=5).layers[2].wq.size == 5


def test_a_pattern_that_matches_nothing_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as raised:
        override(Model.Config(), ["head", "layers.0.wz", "nothing.like.it"], size=2)
    assert [fault.where for fault in raised.value.faults] == ["override 'layers.0.wz'", "override 'nothing.like.it'"]
    assert "did you mean 'layers.0.w" in str(raised.value)


def test_matches_inside_matches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layers\.0 and, inside it, layers\.0\.wq"):
        override(Model.Config(), "layers.**", lambda old: old)


def test_what_to_put_there_must_be_said_once() -> None:
    with pytest.raises(ValueError, match="either a replacement or changes"):
        override(Model.Config(), "head")
    with pytest.raises(ValueError, match="either a replacement or changes"):
        override(Model.Config(), "head", Linear.Config(), size=3)


def test_a_replacement_that_is_no_config_is_refused() -> None:
    with pytest.raises(TypeError, match="replacement for head is no config but 3"):
        override(Model.Config(), "head", lambda old: old.size)
