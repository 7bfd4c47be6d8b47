"""Which rank is to blame: from what every rank says of itself to one message.

In: a `Report` of each rank that answered. Out: a `Verdict`. Decides on what it is given alone; asks nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hp_trainer.faults.activity import describe

__all__ = ["Report", "Verdict", "judge"]

SHOWN = 16


@dataclass(frozen=True, slots=True)
class Report:
    """One rank, as it says itself or as its neighbours see it.

    Attributes:
        who: `rank 1 (host h, pid 7)`.
        state: `lost` (a message to or from others failed, or took too long), `communicating` (it waits in one),
            `busy` (it does something of its own), `left` (its part of the run is over), `gone` (the process has
            ended), `told` (the same, and it has said why), `stopped` (by a signal), or `silent` (no answer).
        step: the step it is in; 0 outside of training.
        doing: the phase.
        seconds: since that phase began; None if not known.
        place: the line of Python where it stands, where known.
    """

    rank: int
    who: str
    state: str
    step: int = 0
    doing: str = ""
    seconds: float | None = None
    place: str = ""

    @property
    def where(self) -> str:
        return describe(self.step, self.doing) or "in a place that is not known"

    def line(self) -> str:
        """As a row of a table."""
        how = {
            "lost": "waited for others",
            "communicating": "waits for others",
            "busy": "is busy",
            "left": "is done",
            "gone": "has ended",
            "told": "has ended",
            "stopped": "is stopped",
            "silent": "does not answer",
        }[self.state]
        since = f" for {self.seconds:.0f} s" if self.seconds is not None else ""
        place = f", at {self.place}" if self.place else ""
        return f"{self.who}: {self.where}; {how}{since}{place}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the run ends.

    Attributes:
        kind: `raised`, `gone`, `stopped`, `silent`, `late`, `parted` (all wait, for different things) or `network`.
        culprits: the ranks that did it, as far as known.
        message: what a person is told.
    """

    kind: str
    culprits: tuple[int, ...]
    message: str


def judge(reports: Sequence[Report], reason: str) -> Verdict:
    """The verdict when a message between ranks has failed or taken too long.

    Args:
        reports: of all ranks.
        reason: what went wrong at the rank that noticed, with its time limit.
    """
    for state, kind, how in (
        ("told", "raised", "has ended (its own message says why) in"),
        ("left", "raised", "has left the run (its own message says why) in"),
        ("gone", "gone", "has ended without a word in"),
        ("stopped", "stopped", "is stopped (SIGSTOP, or a debugger) in"),
        ("silent", "silent", "does not answer any more (it is gone, or stands still); last seen in"),
    ):
        if found := [report for report in reports if report.state == state]:
            return _verdict(kind, found, how, reports, reason)
    waiting = [report for report in reports if report.state in ("lost", "communicating")]
    busy = [report for report in reports if report.state == "busy"]
    if busy and waiting:
        return _verdict("late", busy, "is late: the others wait for it while it is in", reports, reason)
    groups = _by_place(reports)
    if len(groups) > 1:
        first, second = groups[0], groups[1]
        if len(first) < len(second):
            how = "waits for the others in another place than they wait for it, in"
            return _verdict("parted", first, how, reports, reason)
        text = f"the ranks wait for each other in different places ({reason})"
        return Verdict("parted", (), _table(text, reports))
    text = f"the ranks lost each other, and none is known to be at fault ({reason})"
    return Verdict("network", (), _table(text, reports))


def _by_place(reports: Sequence[Report]) -> list[list[Report]]:
    """Reports of the same place together, the smallest group first."""
    by_place: dict[tuple[int, str, str], list[Report]] = {}
    for report in reports:
        by_place.setdefault((report.step, report.doing, report.place), []).append(report)
    return sorted(by_place.values(), key=lambda found: (len(found), found[0].step))


def _verdict(kind: str, found: list[Report], how: str, reports: Sequence[Report], reason: str) -> Verdict:
    first = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    text = f"{first.who}{more} {how} {first.where} ({reason})"
    # One that has ended is known for certain; where the others were does not matter.
    rows = () if kind in ("gone", "raised") else reports
    return Verdict(kind, tuple(report.rank for report in found), _table(text, rows, first=found if rows else ()))


def _table(text: str, reports: Sequence[Report], first: Sequence[Report] = ()) -> str:
    others = [report for report in reports if report not in first]
    rows = [report.line() for report in [*first, *others][:SHOWN]]
    if len(reports) > SHOWN:
        rows.append(f"… and {len(reports) - SHOWN} more ranks")
    return "\n    ".join([f"{text}; the run ends on all ranks", *rows])
