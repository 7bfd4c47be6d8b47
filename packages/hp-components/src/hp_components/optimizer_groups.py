"""Which parameter is trained with which hyperparameters.

In: model parts, the optimizer's config, patterns on parameter names. Out: torch's parameter groups, one list per model
part, the group of everything else first; or a `ConfigError` that names the patterns which match nothing.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from hp_components._rank_zero import log
from hp_components.optimizer_kinds import Kind
from hp_protocols.distributed import canonical_named_parameters
from hp_protocols.errors import ConfigError, Fault

if TYPE_CHECKING:
    from hp_components.optimizer import OptimizersContainer

__all__ = ["DEFAULT_DECAY_KEYWORDS", "ParamGroupConfig", "group_parameters"]

logger = logging.getLogger(__name__)

DEFAULT_DECAY_KEYWORDS = ("bias", "norm")


@dataclass(kw_only=True, slots=True)
class ParamGroupConfig:
    """Parameters that are trained differently: a pattern, and what differs; everything else is the optimizer's."""

    pattern: str
    """Regular expression, searched for in the parameter's name (`layers.0.mlp.up_proj.weight`). A parameter belongs
    to the first group whose pattern it matches."""

    lr: float | None = None
    """Learning rate of the group; the schedule scales it like every other."""

    lr_multiplier: float = 1.0
    """The optimizer's rate times this, as an alternative to `lr`."""

    weight_decay: float | None = None
    """Weight decay of the whole group, whatever `decay_keywords` says of its names."""

    weight_decay_multiplier: float = 1.0
    """The optimizer's weight decay times this; names with a keyword still get none."""

    betas: tuple[float, float] | None = None
    """Decay rates of the running means."""

    eps: float | None = None
    """Added to the denominator."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer for this group."""

    def faults(self, path: str) -> list[Fault]:
        """Values that no group could have."""
        faults = []
        try:
            re.compile(self.pattern)
        except re.error as error:
            faults.append(Fault(f"{path}.pattern", f"'{self.pattern}' is no regular expression: {error}"))
        if not self.pattern:
            faults.append(Fault(f"{path}.pattern", "an empty pattern would match every parameter"))
        for name in ("lr", "lr_multiplier", "weight_decay", "weight_decay_multiplier"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < math.inf:
                faults.append(Fault(f"{path}.{name}", f"{value} is out of range", allowed="0 or more"))
        for name in ("lr", "weight_decay"):
            if getattr(self, name) is not None and getattr(self, f"{name}_multiplier") != 1.0:
                hint = "drop one of them"
                faults.append(Fault(f"{path}.{name}", f"given together with {name}_multiplier", hint=hint))
        return faults


@dataclass(frozen=True, slots=True)
class _Member:
    """A trainable parameter, the group it belongs to (-1: none was declared for it), and whether it decays."""

    name: str
    parameter: nn.Parameter
    group: int
    decays: bool


def group_parameters(
    parts: Sequence[nn.Module], config: OptimizersContainer.Config, kind: Kind
) -> list[tuple[nn.Module, list[dict[str, Any]]]]:
    """The parts that train anything, each with its groups as torch's optimizers take them.

    Every parameter is in one group of one part: a tied one where it comes first, a frozen one nowhere.

    Raises:
        ConfigError: a pattern or a keyword matches no trainable parameter that is left for it, or the optimizer cannot
            train one.
        ValueError: nothing can be trained.
    """
    names = [name for part in parts for name, _ in canonical_named_parameters(part)]
    seen: set[int] = set()
    members = [list(_members(part, config, seen)) for part in parts]
    every = [member for part in members for member in part]
    if not every:
        owners = ", ".join(dict.fromkeys(type(part).__name__ for part in parts))
        raise ValueError(f"{owners} has no parameter that requires a gradient")
    if faults := [*_pattern_faults(config, every, names), *_keyword_faults(config, every), *_kind_faults(kind, every)]:
        raise ConfigError(faults)
    _report(config, kind, every)
    return [(part, _groups(own, config, kind)) for part, own in zip(parts, members, strict=True) if own]


def _members(part: nn.Module, config: OptimizersContainer.Config, seen: set[int]) -> Iterator[_Member]:
    for name, parameter in canonical_named_parameters(part):
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        matching = (i for i, group in enumerate(config.param_groups) if re.search(group.pattern, name))
        group = next(matching, -1)
        stated = group >= 0 and config.param_groups[group].weight_decay is not None
        decays = stated or not any(keyword.lower() in name.lower() for keyword in config.decay_keywords)
        yield _Member(name, parameter, group, decays)


def _groups(members: Sequence[_Member], config: OptimizersContainer.Config, kind: Kind) -> list[dict[str, Any]]:
    by_group: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for member in members:
        by_group.setdefault((member.group, member.decays), []).append(member.parameter)
    # Those of no pattern first, then by pattern; decaying ones before the others.
    order = sorted(by_group, key=lambda key: (key[0], not key[1]))
    return [{"params": by_group[key], **_settings(config, kind, *key)} for key in order]


def _settings(config: OptimizersContainer.Config, kind: Kind, index: int, decays: bool) -> dict[str, Any]:
    """What a group says itself; the optimizer's defaults fill in the rest."""
    group = config.param_groups[index] if index >= 0 else None
    lr, weight_decay = config.lr, config.weight_decay
    settings: dict[str, Any] = {}
    if group is not None:
        lr = lr * group.lr_multiplier if group.lr is None else group.lr
        weight_decay = (
            weight_decay * group.weight_decay_multiplier if group.weight_decay is None else group.weight_decay
        )
        given = {"betas": group.betas, "eps": group.eps}
        settings |= {name: value for name, value in given.items() if value is not None} | kind.read(group.kwargs)
    settings |= {"lr": lr, "initial_lr": lr}
    if kind.takes_field("weight_decay"):
        settings["weight_decay"] = weight_decay if decays else 0.0
    return settings


def _pattern_faults(
    config: OptimizersContainer.Config, members: Sequence[_Member], names: Sequence[str]
) -> Iterator[Fault]:
    used = {member.group for member in members}
    for index, group in enumerate(config.param_groups):
        if index in used:
            continue
        where = f"optimizer.param_groups.{index}.pattern"
        taken = {member.group for member in members if re.search(group.pattern, member.name)}
        if taken:
            earlier = ", ".join(f"'{config.param_groups[other].pattern}'" for other in sorted(taken))
            hint = "the first pattern that matches a name has it: put the narrower one first"
            yield Fault(where, f"'{group.pattern}' matches only what {earlier} has taken", hint=hint)
        elif frozen := next((name for name in names if re.search(group.pattern, name)), None):
            yield Fault(where, f"'{group.pattern}' matches only frozen parameters, such as {frozen}")
        else:
            near = ", ".join(_near(group.pattern, names))
            yield Fault(where, f"'{group.pattern}' matches no parameter", hint=f"there are {near}")


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    """Up to three names that look like a pattern without its special characters, or simply the first ones."""
    plain = re.sub(r"[\\^$.*+?()\[\]{}|]+", ".", pattern).strip(".")
    parts = {part: name for name in reversed(names) for part in (name, *name.split("."))}
    close = difflib.get_close_matches(plain, parts, n=3, cutoff=0.5)
    return list(dict.fromkeys(parts[part] for part in close)) or list(names[:3])


def _keyword_faults(config: OptimizersContainer.Config, members: Sequence[_Member]) -> Iterator[Fault]:
    """A keyword of the user's own that no name contains; the default ones suit most models, not all."""
    for keyword in sorted(set(config.decay_keywords) - set(DEFAULT_DECAY_KEYWORDS)):
        if not any(keyword.lower() in member.name.lower() for member in members):
            hint = "see the names in model.named_parameters()"
            yield Fault("optimizer.decay_keywords", f"{keyword!r} matches no parameter", hint=hint)


def _kind_faults(kind: Kind, members: Sequence[_Member]) -> Iterator[Fault]:
    """The first parameter that the optimizer cannot train stands for all of them."""
    problems = (kind.parameter_problem(member.name, member.parameter) for member in members)
    if problem := next(filter(None, problems), None):
        yield Fault("optimizer.name", f"{kind.name} {problem}", hint="AdamW trains any")


def _report(config: OptimizersContainer.Config, kind: Kind, members: Sequence[_Member]) -> None:
    keywords = ", ".join(config.decay_keywords) or "nothing"
    for index in sorted({member.group for member in members}):
        group = [member for member in members if member.group == index]
        settings = _settings(config, kind, index, True)
        decaying = sum(member.decays for member in group)
        decay = "no weight decay"
        if "weight_decay" in settings:
            decay = f"weight decay {settings['weight_decay']:g} on {decaying}, none on {len(group) - decaying}"
        log(
            logger,
            logging.INFO,
            "optimizer %s, %s: %d tensors, lr %g, %s (names with %s)",
            kind.name,
            f"pattern '{config.param_groups[index].pattern}'" if index >= 0 else "all others",
            len(group),
            settings["lr"],
            decay,
            keywords,
        )
