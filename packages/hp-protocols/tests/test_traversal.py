"""Walking a config tree and replacing nodes where they stand, in fields, lists, tuples and dicts (M3)."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest

from hp_protocols.configurable import Configurable
from hp_protocols.traversal import TupleItems, set_node

Pair = namedtuple("Pair", ["left", "right"])


class Node(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        name: str = ""
        inner: Node.Config | None = None
        in_list: list[Any] = field(default_factory=list)
        in_tuple: tuple[Any, ...] = ()
        in_dict: dict[str, Any] = field(default_factory=dict)


class Other(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        node: Node.Config = field(default_factory=lambda: Node.Config(name="in other"))


@dataclass(kw_only=True)
class PlainSection:
    node: Node.Config


def tree() -> Node.Config:
    return Node.Config(
        name="root",
        inner=Node.Config(name="inner", inner=Node.Config(name="innermost")),
        in_list=[Node.Config(name="list 0"), [Node.Config(name="list 1 0")], Other.Config()],
        in_tuple=(1, Node.Config(name="tuple 1"), (Node.Config(name="tuple 2 0"),)),
        in_dict={"a": Node.Config(name="dict a"), "b": {"c": (Node.Config(name="dict b c 0"),)}},
    )


EXPECTED = {
    "": "root",
    "inner": "inner",
    "inner.inner": "innermost",
    "in_list.0": "list 0",
    "in_list.1.0": "list 1 0",
    "in_list.2.node": "in other",
    "in_tuple.1": "tuple 1",
    "in_tuple.2.0": "tuple 2 0",
    "in_dict.a": "dict a",
    "in_dict.b.c.0": "dict b c 0",
}


def test_traverse_finds_every_node_under_its_fqn() -> None:
    assert {fqn: node.name for fqn, node, _, _ in tree().traverse(Node.Config)} == EXPECTED


def test_traverse_yields_the_root_first_without_parent() -> None:
    root = tree()
    fqn, node, parent, key = next(iter(root.traverse(Node.Config)))
    assert (fqn, parent, key) == ("", None, None)
    assert node is root


def test_traverse_yields_only_the_class_that_was_asked_for() -> None:
    assert [fqn for fqn, _, _, _ in tree().traverse(Other.Config)] == ["in_list.2"]


def test_traverse_gives_every_node_its_parent_and_key() -> None:
    for fqn, node, parent, key in tree().traverse(Node.Config):
        if fqn:
            found = getattr(parent, key) if isinstance(parent, Configurable.Config) else parent[key]
            assert found is node, fqn


def test_every_node_can_be_replaced_where_it_stands() -> None:
    root = tree()
    for fqn, node, parent, key in root.traverse(Node.Config):
        if fqn:
            set_node(parent, key, node.replace(name="new " + node.name))
    # An inner node of a replaced one was replaced in the old one, which is no longer in the tree.
    names = {fqn: node.name for fqn, node, _, _ in root.traverse(Node.Config)}
    assert names == {fqn: name if fqn in ("", "inner.inner") else "new " + name for fqn, name in EXPECTED.items()}


def test_replacing_items_of_a_tuple_keeps_it_a_tuple_of_its_kind() -> None:
    root = Node.Config(in_tuple=(Node.Config(name="a"), Pair(Node.Config(name="b"), 2), 3))
    for fqn, _, parent, key in root.traverse(Node.Config):
        if fqn:
            assert isinstance(parent, TupleItems)
            parent[key] = Node.Config(name="new")
    assert root.in_tuple == (Node.Config(name="new"), Pair(Node.Config(name="new"), 2), 3)
    assert isinstance(root.in_tuple[1], Pair)


def test_torchtitans_way_of_replacing_works_for_fields_and_lists() -> None:
    root = Node.Config(inner=Node.Config(name="a"), in_list=[Node.Config(name="b")])
    for fqn, _, parent, key in root.traverse(Node.Config):
        if isinstance(parent, list):
            parent[key] = Other.Config()
        elif fqn:
            setattr(parent, key, Other.Config())
    assert root == Node.Config(inner=Other.Config(), in_list=[Other.Config()])  # type: ignore[arg-type]


def test_traverse_takes_a_snapshot_so_that_new_nodes_are_not_visited() -> None:
    root = Node.Config(in_list=[Node.Config(name="a")])
    visited = []
    for fqn, node, parent, key in root.traverse(Node.Config):
        visited.append(fqn)
        if fqn:
            set_node(parent, key, Node.Config(name="outer", inner=node))
            root.in_list.append(Node.Config(name="late"))
    assert visited == ["", "in_list.0"]


def test_traverse_goes_through_plain_dataclasses() -> None:
    root = Node.Config(in_list=[PlainSection(node=Node.Config(name="a"))])
    assert [fqn for fqn, _, _, _ in root.traverse(Node.Config)] == ["", "in_list.0.node"]


def test_the_root_cannot_be_replaced_in_place() -> None:
    with pytest.raises(ValueError, match="root"):
        set_node(None, "", Node.Config())
