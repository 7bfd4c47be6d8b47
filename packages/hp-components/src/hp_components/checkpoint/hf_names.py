"""Which names of Hugging Face's make which names of ours, asked of an adapter with tensors that hold no data.

In: an adapter, names and shapes. Out: the smallest `Translation`s, so that a model is translated piece by piece and
never lies whole in the memory of one rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hp_protocols.state_dict_adapter import BaseStateDictAdapter

__all__ = ["Names", "Translation", "relate", "without_data"]

Tensors = Mapping[str, torch.Tensor]

_ADAPTER_SAYS_NO = (KeyError, ValueError, RuntimeError)
_FIRST_NUMBER = re.compile(r"^.*?\.\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Translation:
    """Names that belong together: `theirs` in, `ours` out, and back.

    Attributes:
        ours: names and shapes of ours that come of it.
    """

    theirs: tuple[str, ...]
    ours: Mapping[str, torch.Size]


@dataclass(frozen=True, slots=True)
class Names:
    """How two sets of names relate.

    Attributes:
        absent: names of ours that nothing makes, with those of theirs that would be needed, if the adapter says so.
        unused: their names that the adapter leaves out by itself.
        unknown: their names that it does not know, with its words.
    """

    translations: list[Translation]
    absent: dict[str, list[str]]
    unused: list[str]
    unknown: dict[str, str]


def without_data(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Whole tensors of the same shapes and types, on the meta device."""
    return {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in tensors.items()}


def relate(theirs: Tensors, ours: Tensors, adapter: BaseStateDictAdapter) -> Names:
    """Relate `theirs` to `ours`, both without data.

    A name of theirs is tried alone first. For what is then still open, the adapter is asked which of their names ours
    would become (parts that are joined); at last a layer's names are tried together (other forms of the same model).
    """
    relation = _Relation(theirs, ours, adapter)
    relation.try_alone()
    needed = relation.try_what_ours_become()
    relation.try_layers()
    # What makes a name of ours in another shape is told as that.
    misfits = [Translation((name,), shapes) for name, (shapes, _) in relation.open.items() if shapes]
    translations = relation.found + misfits
    made = {name for one in translations for name in one.ours}
    absent = {
        name: [their for their in needed.get(name, ()) if their not in theirs] for name in ours if name not in made
    }
    said = {name: words for name, (shapes, words) in relation.open.items() if not shapes}
    unused = [name for name, words in said.items() if not words]
    return Names(translations, absent, unused, relation.unknown | {name: said[name] for name in said if said[name]})


class _Relation:
    """What is known so far. `open` holds the names that make nothing whole alone: what they make, what was said."""

    def __init__(self, theirs: Tensors, ours: Tensors, adapter: BaseStateDictAdapter) -> None:
        self.theirs = theirs
        self.ours = ours
        self.adapter = adapter
        self.found: list[Translation] = []
        self.unknown: dict[str, str] = {}
        self.open: dict[str, tuple[dict[str, torch.Size], str]] = {}

    def try_alone(self) -> None:
        for name in self.theirs:
            made, said = self._make((name,))
            if foreign := sorted(made.keys() - self.ours.keys()):
                self.unknown[name] = f"makes {', '.join(foreign)}, which this model does not have"
            elif not self._accept((name,), made):
                self.open[name] = made, said

    def try_what_ours_become(self) -> dict[str, list[str]]:
        """Their names that each open name of ours becomes."""
        needed: dict[str, list[str]] = {}
        made = {name for one in self.found for name in one.ours}
        for name in [name for name in self.ours if name not in made]:
            try:
                needed[name] = list(self.adapter.to_hf({name: self.ours[name]}))
            except _ADAPTER_SAYS_NO:
                continue  # it takes more of ours to make one of theirs; the layers show it
            if needed[name] and all(their in self.open for their in needed[name]):
                names = tuple(needed[name])
                self._accept(names, self._make(names)[0])
        return needed

    def try_layers(self) -> None:
        layers: dict[str, list[str]] = {}
        for name in self.open:
            layers.setdefault(_layer(name), []).append(name)
        for names in layers.values():
            made, _ = self._make(tuple(names))
            # A name without which the same is made has no part in it.
            needed = tuple(name for name in names if self._make(tuple(n for n in names if n != name))[0] != made)
            self._accept(needed, made)

    def _accept(self, names: tuple[str, ...], made: dict[str, torch.Size]) -> bool:
        """Take it if it makes names of ours, each in its shape."""
        if not made or any(name not in self.ours or shape != self.ours[name].shape for name, shape in made.items()):
            return False
        self.found.append(Translation(names, made))
        for name in names:
            self.open.pop(name, None)
        return True

    def _make(self, names: tuple[str, ...]) -> tuple[dict[str, torch.Size], str]:
        """(what these names make, what the adapter says against them)."""
        try:
            made = self.adapter.from_hf({name: self.theirs[name] for name in names})
        except _ADAPTER_SAYS_NO as error:
            return {}, str(error) or type(error).__name__
        return {name: value.shape for name, value in made.items()}, ""


def _layer(name: str) -> str:
    match = _FIRST_NUMBER.match(name)
    return match[0] if match else ""
