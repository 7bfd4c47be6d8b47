"""What the string plans of a bare model say of it, by name.

In: a model with `_tp_plan` and `_cp_modules`, its own and what the user's file adds. Out: names of its modules and
parameters. Whatever a plan says that cannot be carried out is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from hp_protocols.errors import ConfigError, Fault, nearest
from hp_protocols.platform import nn

if TYPE_CHECKING:
    from hp_models._legacy.qwen3_5 import Qwen3_5
    from hp_protocols.platform import Module

__all__ = ["COLWISE", "ROWWISE", "TensorPlan", "matches", "read_cp_modules", "read_tp_plan"]

COLWISE = "colwise"
"""Cut along dim 0 of the parameter: the outputs of a Linear, the vocabulary of an Embedding, heads or channels."""

ROWWISE = "rowwise"
"""Cut along dim 1, the inputs of a Linear; what the ranks compute is summed."""

REPLICATE = "replicate"
"""Whole on every rank, as what no plan names; takes something out of the model's own plan."""

WORDS = (COLWISE, ROWWISE, REPLICATE)
TP_PLAN, CP_MODULES = "model.tp_plan", "model.cp_modules"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """`words`: colwise or rowwise, by the name of a matrix or of a block's own parameter; what is not in it, every
    rank computes whole. `blocks`: names of the modules that ranks share between them, from their input to the
    rowwise matrices at their end."""

    words: dict[str, str]
    blocks: tuple[str, ...]


def matches(glob: str, name: str) -> bool:
    """Whether the parts between dots match one by one: `*` stays within its part."""
    globs, parts = glob.split("."), name.split(".")
    return len(globs) == len(parts) and all(map(fnmatchcase, parts, globs))


def read_tp_plan(model: Qwen3_5) -> TensorPlan:
    """The plan of a model. Of two globs that match, the later one wins.

    Raises:
        ConfigError: an unknown word, a glob of the user's that matches nothing, a cut that does not add up.
    """
    targets = [name for name, _ in _matrices_and_parameters(model)]
    own_plan = type(model)._tp_plan
    faults = [
        fault
        for glob, word in model._tp_plan.items()
        if own_plan.get(glob) != word
        for fault in _entry_faults(glob, word, targets)
    ]
    words = _words(model._tp_plan, targets)
    if not faults:
        faults = _sum_faults(model, words, _words(own_plan, targets))
    if faults:
        raise ConfigError(faults)
    words = {name: word for name, word in words.items() if word != REPLICATE}
    return TensorPlan(words, tuple(block for block, _ in _blocks(model, words)))


def _words(plan: Mapping[str, str], targets: Iterable[str]) -> dict[str, str]:
    found = {name: [word for glob, word in plan.items() if matches(glob, name)] for name in targets}
    return {name: words[-1] for name, words in found.items() if words}


def read_cp_modules(model: Qwen3_5, kinds: tuple[type, ...]) -> list[str]:
    """The names that `_cp_modules` matches. `kinds`: the classes that mix tokens, all of which have to be named.

    Raises:
        ConfigError: a glob of the user's that matches nothing, or something else; a module that mixes is left out.
    """
    every = dict(model.named_modules())
    mixing = [name for name, module in every.items() if isinstance(module, kinds)]
    own = type(model)._cp_modules
    faults, named = [], []
    for glob in model._cp_modules:
        found = [name for name in every if name and matches(glob, name)]
        wrong = [name for name in found if name not in mixing]
        if wrong or not (found or glob in own):
            problem = f"{glob!r}: {wrong[0]} does not mix tokens" if wrong else f"{glob!r} matches no module"
            faults.append(Fault(CP_MODULES, problem, allowed=", ".join(own)))
        named += found
    if not faults and (left_out := [name for name in mixing if name not in named]):
        problem = f"{left_out[0]} mixes tokens and is not named, so a rank would see its own stretch only"
        faults.append(Fault(CP_MODULES, problem, allowed=", ".join(own), hint="leave the key out"))
    if faults:
        raise ConfigError(faults)
    return list(dict.fromkeys(named))


def _matrices_and_parameters(model: Module) -> Iterator[tuple[str, Module]]:
    """What a plan can name, with its owner: Linear and Embedding modules, and parameters outside of these."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            yield name, module
        else:
            for parameter, _ in module.named_parameters(recurse=False):
                yield f"{name}.{parameter}" if name else parameter, module


def _entry_faults(glob: str, word: str, targets: list[str]) -> Iterator[Fault]:
    where = f"{TP_PLAN}[{glob}]"
    if word not in WORDS:
        near = nearest(str(word), WORDS)
        hint = f"did you mean {near}?" if near else None
        yield Fault(where, f"{word!r} is no way to split a matrix", ", ".join(WORDS), hint)
    if not any(matches(glob, name) for name in targets):
        near = nearest(glob, targets)
        hint = f"did you mean {near}?" if near else "a * stays between two dots, as in layers.*.mlp.*"
        yield Fault(where, "matches no Linear, no Embedding and no parameter of the model", hint=hint)


def _sum_faults(model: Qwen3_5, words: dict[str, str], own: dict[str, str]) -> list[Fault]:
    """A block is cut as the model's own plan says, so that the parts add up, or every rank computes all of it."""
    faults, wrong = [], []
    for block, parts in _blocks(model, words):
        fitting = {part: own.get(f"{block}.{part}", REPLICATE) for part in parts}
        if parts != fitting:
            wrong.append((block, parts, fitting))
    if wrong:
        block, parts, fitting = wrong[0]
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        problem = f"{block}{more}: {_listed(parts)}: what the ranks compute does not add up to its output"
        faults.append(Fault(TP_PLAN, problem, allowed=f"{_listed(fitting)}; or all replicate"))
    ends = {name: words.get(name, REPLICATE) for name in ("embed_tokens", "lm_head")}
    faults += [
        Fault(f"{TP_PLAN}[{name}]", f"{word}: the vocabulary is dim 0 of its matrix", f"{COLWISE}, {REPLICATE}")
        for name, word in ends.items()
        if word == ROWWISE
    ]
    if not faults and model.config.tie_word_embeddings and len(set(ends.values())) > 1:
        faults.append(Fault(TP_PLAN, f"{_listed(ends)}: they are one matrix (tied)", allowed="the same word for both"))
    return faults


def _listed(parts: dict[str, str]) -> str:
    return ", ".join(f"{part} {word}" for part, word in parts.items())


def _blocks(model: Module, words: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The modules with something that is cut: the word of each of their own matrices and parameters."""
    parts: dict[str, dict[str, str]] = {}
    for name, _ in _matrices_and_parameters(model):
        block, _, part = name.rpartition(".")
        if block:
            parts.setdefault(block, {})[part] = words.get(name, REPLICATE)
    return ((block, found) for block, found in parts.items() if set(found.values()) != {REPLICATE})
