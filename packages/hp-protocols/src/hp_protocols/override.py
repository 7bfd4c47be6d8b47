"""Replacing nodes of a config tree by pattern, before anything is built.

In: a config tree, patterns of FQNs, and what to put there. Out: a changed copy of the tree; the given one stays as it
is. A pattern that matches nothing is an error. Torch-free.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .configurable import Configurable
from .errors import ConfigError, Fault, nearest
from .traversal import set_node, walk

__all__ = ["override"]

ConfigT = TypeVar("ConfigT", bound=Configurable.Config)


def override(
    target: ConfigT,
    fqns: str | Sequence[str],
    replacement: Configurable.Config | Callable[[Any], Configurable.Config] | None = None,
    *,
    config_cls: type[Any] = Configurable.Config,
    **changes: Any,
) -> ConfigT:
    """A copy of `target` in which the matching nodes are replaced.

    `override(config, "layers.*.attention.wq", lambda old: LoRALinear.Config(base=old, rank=8))`
    `override(config, ["**.norm", "**.q_norm"], eps=1e-5)`

    Args:
        target: the tree. Its root is matched by no pattern.
        fqns: one or more patterns of dotted FQNs, as `traverse` gives them. In a part, `*`, `?` and `[…]` match as in
            file names; `**` matches any number of parts.
        replacement: the new node (each place gets a copy), or a function from the old node to the new one.
        config_cls: only nodes of this class are considered.
        changes: instead of `replacement`: fields to change in each matching node.

    Raises:
        ConfigError: a pattern matches no node; with the nearest FQN.
        ValueError: neither or both of `replacement` and `changes` are given, or one match lies inside another.
        TypeError: `replacement` made something that is no config, or `changes` names an unknown field.
    """
    if (replacement is None) == (not changes):
        raise ValueError("override needs either a replacement or changes of fields, and not both")
    patterns = [fqns] if isinstance(fqns, str) else list(fqns)
    result = copy.deepcopy(target)
    nodes = {
        fqn: (node, parent, key) for fqn, node, parent, key in walk(result) if fqn and isinstance(node, config_cls)
    }
    matching = [fqn for fqn in nodes if any(_matches(pattern, fqn) for pattern in patterns)]
    _check_all_match(patterns, list(nodes), config_cls)
    for fqn in matching:
        if inside := [other for other in matching if other.startswith(fqn + ".")]:
            raise ValueError(f"override matches {fqn} and, inside it, {inside[0]}; narrow the pattern or config_cls")
    for fqn in matching:
        node, parent, key = nodes[fqn]
        set_node(parent, key, _new_node(node, replacement, changes, fqn))
    return result


def _new_node(
    old: Any,
    replacement: Configurable.Config | Callable[[Any], Configurable.Config] | None,
    changes: dict[str, Any],
    fqn: str,
) -> Any:
    if replacement is None:
        return old.replace(**copy.deepcopy(changes))
    # A config is never callable, so that the two kinds cannot be mixed up.
    new = copy.deepcopy(replacement) if isinstance(replacement, Configurable.Config) else replacement(old)
    if not isinstance(new, Configurable.Config):
        raise TypeError(f"override: the replacement for {fqn} is no config but {new!r}")
    return new


def _check_all_match(patterns: Sequence[str], fqns: Sequence[str], config_cls: type[Any]) -> None:
    faults = []
    for pattern in patterns:
        if any(_matches(pattern, fqn) for fqn in fqns):
            continue
        near = nearest(pattern, fqns)
        kind = "config" if config_cls is Configurable.Config else config_cls.__qualname__
        hint = f"did you mean {near!r}?" if near else None
        faults.append(Fault(f"override {pattern!r}", f"matches no {kind} of the tree", hint=hint))
    if faults:
        raise ConfigError(faults)


def _matches(pattern: str, fqn: str) -> bool:
    return _match_parts(pattern.split("."), fqn.split("."))


def _match_parts(pattern: list[str], parts: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_match_parts(pattern[1:], parts[skip:]) for skip in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _match_parts(pattern[1:], parts[1:])
