"""What a config class declares: types, docstrings, and what stays off the command line."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import toy_trainer

from hp_config.fields import field_docs, fields_of
from hp_config.tree import find_nodes, find_options, find_refused

if TYPE_CHECKING:
    from nowhere import Missing


@dataclass
class Base:
    """A section."""

    plain: int = 1
    """The base's sentence."""
    shadowed: int = 2
    """The base's other sentence."""


@dataclass
class Derived(Base):
    constant: ClassVar[int] = 3
    shadowed: int = 4
    """The subclass's sentence, over
    two lines."""
    opaque: Missing | None = None
    computed: int = field(default=0, init=False)
    _private: int = 0
    param_init: dict[str, Any] | None = None


def test_fields_of_all_classes_count_but_constants_and_computed_ones_do_not() -> None:
    assert list(fields_of(Derived)) == ["plain", "shadowed", "opaque", "_private", "param_init"]


def test_a_type_that_cannot_be_resolved_makes_a_field_opaque_and_no_other() -> None:
    infos = fields_of(Derived)
    assert infos["opaque"].annotation is None
    assert not infos["opaque"].readable
    assert infos["plain"].annotation is int


def test_private_fields_and_those_of_models_stay_off_the_command_line() -> None:
    assert list(find_options(Derived())) == ["plain", "shadowed"]
    assert set(find_refused(Derived())) == {"opaque", "_private", "param_init"}


def test_docstrings_come_from_the_class_that_declares_the_field_last() -> None:
    assert field_docs(Derived) == {
        "plain": "The base's sentence.",
        "shadowed": "The subclass's sentence, over two lines.",
    }
    assert field_docs(toy_trainer.Adam.Config) == {
        "lr": "Peak learning rate.",
        "betas": "Decay rates of the moments.",
    }


def test_a_class_without_source_has_no_sentences() -> None:
    assert field_docs(make_dataclass("Made", [("x", int, 1)])) == {}


def test_nodes_are_found_in_lists_and_mappings() -> None:
    config = toy_trainer.small()
    config.dataloader.extra = {"a": [toy_trainer.Layer.Config()], "b": (toy_trainer.Layer.Config(),)}
    paths = [path for path, _ in find_nodes(config)]
    assert paths[0] == ""
    assert {"model_spec.model.layers.3", "dataloader.extra.a.0", "dataloader.extra.b.0"} <= set(paths)
