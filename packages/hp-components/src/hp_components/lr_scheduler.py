"""The learning rate as a closed formula of the step, so that a resumed run has exactly the rate it would have had.

In: an OptimizersContainer and the number of training steps. Out: a container that sets every parameter group's
rate: linear warmup, an optional plateau, then decay to the minimum (M31).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hp_components._rank_zero import log
from hp_components.optimizer import OptimizersContainer
from hp_protocols.configurable import Configurable
from hp_protocols.errors import ConfigError, Fault

__all__ = ["LRSchedulersContainer"]

logger = logging.getLogger(__name__)

DecayType = Literal["cosine", "linear", "sqrt", "constant"]

# What remains of the distance to the minimum when `progress` (0 to 1) of the decay is done.
_REMAINING: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "constant": lambda progress: 1.0,
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """The formula: `factor(step)` of the base rate, for steps counted from 0.

    The first step of a warmup of W has 1/W of the rate, step W the whole; the minimum is reached at `total_steps`,
    one step behind the last, so that no step of the run is trained at a rate of 0.
    """

    total_steps: int
    warmup_steps: int
    decay_steps: int
    decay_type: DecayType

    def factor(self, step: int, floor: float) -> float:
        """The factor at `step`; `floor` is the factor to which it decays."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = step - (self.total_steps - self.decay_steps)
        if done <= 0:
            return 1.0
        # Without steps to decay over (all of them warm up) the end is reached at once.
        progress = min(done / self.decay_steps, 1.0) if self.decay_steps else 1.0
        return floor + (1.0 - floor) * _REMAINING[self.decay_type](progress)

    def outlook(self, step: int, floor: float) -> str:
        """What the rate does from `step` on, in words."""
        decay_begins = self.total_steps - self.decay_steps
        end = f"decays ({self.decay_type}) to {floor:g} of its full height at step {self.total_steps}"
        if self.decay_type == "constant" or not self.decay_steps:
            end = f"stays at full height until step {self.total_steps}"
        if step >= self.total_steps:
            return f"the schedule ended at step {self.total_steps}, the rate stays where it is"
        if step < self.warmup_steps:
            return f"it grows to full height at step {self.warmup_steps}, then {end}"
        if step < decay_begins:
            return f"it stays until step {decay_begins}, then {end}"
        return f"it {end}"


class LRSchedulersContainer(Configurable):
    """Sets the learning rate of every parameter group, in all optimizers, from one step counter.

    The rate for the first step is set at construction; `step()` after each optimizer step sets the next.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        warmup_steps: int = 200
        """Steps over which the rate grows linearly to its full value; clamped to the total (and logged)."""

        total_steps: int | None = None
        """Steps of the whole schedule, if not those of the run."""

        decay_ratio: float | None = None
        """Share of the total over which the rate decays, after a plateau at the full rate (warmup-stable-decay).
        None: it decays from the end of the warmup on."""

        decay_type: DecayType = "cosine"
        """Shape of the decay; `constant` keeps the full rate."""

        min_lr_factor: float = 0.0
        """The rate decays to this share of each group's own rate."""

        lr_min: float | None = None
        """The rate decays to this value, as an alternative to `min_lr_factor`."""

        def faults(self, path: str) -> list[Fault]:
            """Values that no schedule could have."""
            faults = []
            if self.warmup_steps < 0:
                faults.append(Fault(f"{path}.warmup_steps", f"{self.warmup_steps} is negative", allowed="0 or more"))
            if self.total_steps is not None and self.total_steps < 1:
                faults.append(Fault(f"{path}.total_steps", f"{self.total_steps} is no length", allowed="at least 1"))
            if self.decay_ratio is not None and not 0.0 <= self.decay_ratio <= 1.0:
                faults.append(Fault(f"{path}.decay_ratio", f"{self.decay_ratio} is no share", allowed="0 to 1"))
            if self.decay_type not in _REMAINING:
                faults.append(
                    Fault(f"{path}.decay_type", f"{self.decay_type!r} is unknown", allowed=", ".join(_REMAINING))
                )
            if not 0.0 <= self.min_lr_factor <= 1.0:
                faults.append(Fault(f"{path}.min_lr_factor", f"{self.min_lr_factor} is no share", allowed="0 to 1"))
            if self.lr_min is not None and not 0.0 <= self.lr_min < math.inf:
                faults.append(Fault(f"{path}.lr_min", f"{self.lr_min} is no learning rate", allowed="0 or more"))
            if self.lr_min is not None and self.min_lr_factor:
                faults.append(
                    Fault(
                        f"{path}.lr_min",
                        "given together with min_lr_factor, which says the same differently",
                        hint="drop one of them",
                    )
                )
            return faults

    def __init__(self, config: Config, *, optimizers: OptimizersContainer, training_steps: int) -> None:
        faults = config.faults("lr_scheduler")
        if faults:
            raise ConfigError(faults)
        if training_steps < 1:
            raise ValueError(f"training_steps={training_steps}: a schedule needs at least one step")
        self.schedule = _schedule(config, config.total_steps or training_steps)
        _report_tail(self.schedule, config, training_steps)
        self._optimizers = optimizers
        self._base_lrs = [group["initial_lr"] for group in optimizers.param_groups]
        self._floors = [_floor(config, base_lr) for base_lr in self._base_lrs]
        self._step = 0
        self._apply()

    def step(self) -> None:
        """Go on to the next step's rate."""
        self._step += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """The rate of each parameter group, as the next optimizer step will use it; first those of no pattern."""
        return [group["lr"] for group in self._optimizers.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The step, and the schedule it belongs to (to notice a changed one)."""
        return {"step": self._step, "schedule": self._described(), "base_lrs": list(self._base_lrs)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved step. The schedule stays this run's; where the saved one differs, a line says so."""
        self._step = int(state_dict["step"])
        self._apply()
        self._report_changes(state_dict)

    def _report_changes(self, state_dict: dict[str, Any]) -> None:
        """Say which parts of the schedule are others than when the state was saved, and what that does to the rate."""
        saved, own = state_dict["schedule"], self._described()
        changes = [
            f"{name} was {_shown(saved.get(name))} when the checkpoint was saved and is {_shown(own.get(name))} now"
            for name in sorted(own.keys() | saved.keys())
            if _shown(saved.get(name)) != _shown(own.get(name))
        ]
        if not changes:
            return
        # For the first group, which stands for all: the schedule scales every group alike.
        before = Schedule(*(saved[name] for name in ("total_steps", "warmup_steps", "decay_steps", "decay_type")))
        would_be = state_dict["base_lrs"][0] * before.factor(self._step, saved["floors"][0])
        log(
            logger,
            logging.WARNING,
            "learning-rate schedule: %s; the rate of step %d is %.4g (the schedule before would have it at %.4g), and "
            "from there %s",
            ", ".join(changes),
            self._step + 1,
            self.get_last_lr()[0],
            would_be,
            self.schedule.outlook(self._step, self._floors[0]),
        )

    def _described(self) -> dict[str, Any]:
        schedule = self.schedule
        return {
            "total_steps": schedule.total_steps,
            "warmup_steps": schedule.warmup_steps,
            "decay_steps": schedule.decay_steps,
            "decay_type": schedule.decay_type,
            "floors": list(self._floors),
        }

    def _apply(self) -> None:
        # Looked up anew each time: loading an optimizer's state replaces its group objects.
        groups = self._optimizers.param_groups
        for group, base_lr, floor in zip(groups, self._base_lrs, self._floors, strict=True):
            group["lr"] = base_lr * self.schedule.factor(self._step, floor)


def _shown(value: Any) -> Any:
    """Floors of many groups are few numbers; other groups alone are no other schedule."""
    if not isinstance(value, list | tuple):
        return value
    return ", ".join(f"{number:g}" for number in sorted(set(value)))


def _schedule(config: LRSchedulersContainer.Config, total_steps: int) -> Schedule:
    """The phases in whole steps, clamped to the total."""
    warmup_steps = config.warmup_steps
    if warmup_steps > total_steps:
        log(
            logger,
            logging.WARNING,
            "learning-rate schedule: warmup of %d steps is longer than the run of %d steps; it is clamped to %d",
            warmup_steps,
            total_steps,
            total_steps,
        )
        warmup_steps = total_steps
    decay_steps = total_steps - warmup_steps
    if config.decay_ratio is not None:
        wanted = round(total_steps * config.decay_ratio)
        if wanted > decay_steps:
            log(
                logger,
                logging.WARNING,
                "learning-rate schedule: warmup (%d) and decay (%d) are longer than the run of %d steps; "
                "the decay is clamped to %d",
                warmup_steps,
                wanted,
                total_steps,
                decay_steps,
            )
        decay_steps = min(wanted, decay_steps)
    return Schedule(total_steps, warmup_steps, decay_steps, config.decay_type)


def _report_tail(schedule: Schedule, config: LRSchedulersContainer.Config, training_steps: int) -> None:
    """A schedule that is shorter than the run leaves steps at its minimum, which may be 0."""
    if schedule.total_steps < training_steps and config.decay_type != "constant":
        log(
            logger,
            logging.WARNING,
            "learning-rate schedule: it ends after %d of %d steps; the others are trained at its minimum",
            schedule.total_steps,
            training_steps,
        )


def _floor(config: LRSchedulersContainer.Config, base_lr: float) -> float:
    # A group with the rate 0 is not trained, and has no height to come down from.
    if config.lr_min is None or base_lr == 0.0:
        return config.min_lr_factor
    if config.lr_min > base_lr:
        raise ConfigError(
            Fault(
                "lr_scheduler.lr_min",
                f"{config.lr_min} is above the learning rate {base_lr} (of the optimizer or one of its param_groups)",
                allowed=f"0 to {base_lr}",
                hint="min_lr_factor is a share of each group's own rate",
            )
        )
    return config.lr_min / base_lr
