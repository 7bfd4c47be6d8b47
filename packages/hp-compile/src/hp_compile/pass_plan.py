"""What to partition: which modules' parameters are sharded, and which belong together in one unit.

In: module names and patterns, from code or a YAML file. Out: a `PassPlan`, and through `resolve` the
unit of every parameter. Free of torch: it works on names alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

__all__ = ["FSDPModuleConfig", "PassPlan", "PlanUnits", "create_sharding_plan_from_yaml"]


@dataclass(frozen=True, slots=True)
class FSDPModuleConfig:
    """Marks a module or a parameter as a unit. It has no options yet: every knob that exists acts."""


@dataclass(frozen=True, slots=True)
class PlanUnits:
    """A plan applied to the names of one model.

    Attributes:
        unit_of: parameter FQN to the FQN of its unit; parameters outside the plan are absent.
        unmatched: entries of the plan (names and patterns) that cover no parameter.
    """

    unit_of: dict[str, str]
    unmatched: tuple[str, ...]


@dataclass(frozen=True)
class PassPlan:
    """The modules to shard, by exact FQN and by pattern (`*` crosses dots).

    An empty plan shards nothing: every parameter is replicated and its gradient all-reduced. That is
    not the same as no plan at all (`None`), which lets the pass find the units. With `fsdp_rest`, what no entry
    names is sharded too, as one more unit, like the parameters that FSDP2 leaves to its root.
    """

    fsdp_modules: dict[str, FSDPModuleConfig] = field(default_factory=dict)
    fsdp_patterns: dict[str, FSDPModuleConfig] = field(default_factory=dict)
    fsdp_rest: bool = False

    def __post_init__(self) -> None:
        for registry in ("fsdp_modules", "fsdp_patterns"):
            entries = getattr(self, registry)
            if not isinstance(entries, Mapping):
                raise ValueError(f"{registry}={entries!r} is not allowed; allowed: a dict of name to FSDPModuleConfig")
            for name, config in entries.items():
                _check_name(name, registry)
                if not isinstance(config, FSDPModuleConfig):
                    raise ValueError(f"{registry}[{name!r}]={config!r} is not allowed; allowed: an FSDPModuleConfig")
            # A copy: a plan does not change when the caller's dict does.
            object.__setattr__(self, registry, dict(entries))
        if not isinstance(self.fsdp_rest, bool):
            raise ValueError(f"fsdp_rest={self.fsdp_rest!r} is not allowed; allowed: True or False")

    def lookup(self, fqn: str) -> FSDPModuleConfig | None:
        """The entry that names `fqn` itself: the exact one, else the first pattern that matches."""
        if fqn in self.fsdp_modules:
            return self.fsdp_modules[fqn]
        for pattern, config in self.fsdp_patterns.items():
            if fnmatchcase(fqn, pattern):
                return config
        return None

    def merge(self, other: PassPlan) -> PassPlan:
        """A new plan with the entries of both; on a clash the other's entry wins."""
        if not isinstance(other, PassPlan):
            raise ValueError(f"merge({other!r}) is not allowed; allowed: another PassPlan")
        return PassPlan(
            fsdp_modules={**self.fsdp_modules, **other.fsdp_modules},
            fsdp_patterns={**self.fsdp_patterns, **other.fsdp_patterns},
            fsdp_rest=self.fsdp_rest or other.fsdp_rest,
        )

    def resolve(self, module_fqns: Iterable[str], param_fqns: Iterable[str]) -> PlanUnits:
        """The unit of each parameter: itself if it is marked, else its deepest marked ancestor module.

        A pattern marks, on each path, only the outermost name that it matches; the root (the empty
        name) is matched by no pattern.
        """
        modules = {fqn for fqn in module_fqns if fqn}
        params = list(param_fqns)
        names = modules | set(params)
        marks = {entry: {entry} & names for entry in self.fsdp_modules}
        for pattern in self.fsdp_patterns:
            marks[pattern] = marks.get(pattern, set()) | _outermost(pattern, names)

        marked: set[str] = set().union(*marks.values())
        paths = {fqn: [*_ancestors(fqn), fqn] for fqn in params}
        unit_of = {}
        for fqn, path in paths.items():
            units = [name for name in path if name in marked]
            if units:
                unit_of[fqn] = units[-1]
        covered = {name for path in paths.values() for name in path}
        unmatched = tuple(entry for entry, found in marks.items() if not found & covered)
        return PlanUnits(unit_of, unmatched)

    def check_matches(self, module_fqns: Iterable[str], param_fqns: Iterable[str]) -> PlanUnits:
        """Like `resolve`, but an entry that covers no parameter is an error that lists near names."""
        modules, params = list(module_fqns), list(param_fqns)
        units = self.resolve(modules, params)
        if units.unmatched:
            lines = []
            for entry in units.unmatched:
                near = difflib.get_close_matches(entry, [*filter(None, modules), *params], n=3, cutoff=0.5)
                lines.append(f"  {entry!r}; near names: {', '.join(near) if near else 'none'}")
            raise ValueError(
                "these entries of the plan match no parameter of the model:\n"
                + "\n".join(lines)
                + "\nallowed: FQNs or patterns of modules that hold parameters, or of parameters"
            )
        return units


def create_sharding_plan_from_yaml(path_or_mapping: str | Path | Mapping[str, Any]) -> PassPlan:
    """Read a plan: `fsdp: {enabled: bool, modules: [{name: …}], patterns: [{pattern: …}], rest: bool}`.

    `enabled` defaults to "something is listed"; with `enabled: false` the plan is empty.

    Raises:
        ValueError: missing file, invalid YAML, unknown or repeated key, wrong type, empty name;
            the text names the file and the YAML path of the fault (`fsdp.modules[0].name`).
    """
    if isinstance(path_or_mapping, Mapping):
        return _read_plan(path_or_mapping, "")
    if not isinstance(path_or_mapping, (str, Path)):
        raise ValueError(f"a plan is read from a path or a mapping, not from {type(path_or_mapping).__name__}")
    path = Path(path_or_mapping)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the plan cannot be read: {error}") from error
    try:
        content = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from error
    return _read_plan(content, f"{path}: ")


class _StrictLoader(yaml.SafeLoader):
    """The safe loader, except that a key that occurs twice is an error and not an overwrite."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} occurs twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _read_plan(content: Any, file: str) -> PassPlan:
    root = _mapping(content, "the top level", file, ("fsdp",))
    section = _mapping(root.get("fsdp", {}), "fsdp", file, ("enabled", "modules", "patterns", "rest"))
    modules = _names(section.get("modules", []), "fsdp.modules", "name", file)
    patterns = _names(section.get("patterns", []), "fsdp.patterns", "pattern", file)
    rest = section.get("rest", False)
    enabled = section.get("enabled", bool(modules or patterns or rest))
    for key, value in (("enabled", enabled), ("rest", rest)):
        if not isinstance(value, bool):
            raise ValueError(f"{file}fsdp.{key}={value!r} is not allowed; allowed: true or false")
    if not enabled:
        return PassPlan()
    if not modules and not patterns and not rest:
        raise ValueError(
            f"{file}fsdp.enabled is true, but neither fsdp.modules nor fsdp.patterns lists anything: nothing would be "
            "sharded; list units, or set enabled: false"
        )
    return PassPlan(
        fsdp_modules={name: FSDPModuleConfig() for name in modules},
        fsdp_patterns={pattern: FSDPModuleConfig() for pattern in patterns},
        fsdp_rest=rest,
    )


def _mapping(value: Any, where: str, file: str, allowed: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{file}{where} is {value!r}, not a mapping; allowed keys: {', '.join(allowed)}")
    for key in value:
        if key not in allowed:
            place = str(key) if where == "the top level" else f"{where}.{key}"
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{file}{place} is an unknown key; allowed: {', '.join(allowed)}{hint}")
    return value


def _names(entries: Any, where: str, key: str, file: str) -> list[str]:
    if not isinstance(entries, list):
        raise ValueError(f"{file}{where} is {entries!r}, not a list; allowed: a list of {{{key}: …}}")
    names: list[str] = []
    for index, entry in enumerate(entries):
        place = f"{where}[{index}]"
        item = _mapping(entry, place, file, (key,))
        if key not in item:
            raise ValueError(f"{file}{place}.{key} is missing; allowed: {{{key}: …}}")
        _check_name(item[key], f"{place}.{key}", file)
        if item[key] in names:
            raise ValueError(f"{file}{place}.{key}={item[key]!r} is listed twice")
        names.append(item[key])
    return names


def _check_name(name: Any, where: str, file: str = "") -> None:
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{file}{where}: {name!r} is not allowed; allowed: a text that is not empty")


def _outermost(pattern: str, names: set[str]) -> set[str]:
    matched = {name for name in names if fnmatchcase(name, pattern)}
    return {name for name in matched if not any(ancestor in matched for ancestor in _ancestors(name))}


def _ancestors(fqn: str) -> list[str]:
    """Outermost first, without the root and without `fqn` itself."""
    parts = fqn.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
