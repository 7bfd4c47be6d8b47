"""Ranks meet before their first collective, through the store that their process group was initialised with.

In: what this rank is about to build. Out: nothing, or the faults of the ranks that cannot or would not build the same.
A collective cannot serve here: a rank that failed early does not even know its group, and those that wait for it in a
collective block that group for good. A fault of that kind is left as a notice for whoever waits for the rank.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from hp_compile import _torch_compat as compat

_ROOT = "hp_compile"
# The store is one process of the job, and every rank asks it.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1


@dataclass(frozen=True)
class Group:
    """Ranks that meet: a name that they, and no others, have for each other, and what must be alike on all of them.

    `plans` are texts by subject; None where ranks may differ.
    """

    name: str
    ranks: Sequence[int]
    plans: dict[str, str] | None = None


@dataclass
class _Book:
    """What this process remembers of one store: how many builds have met in each group, and how many were stopped.

    Ranks of a group build in the same order, so the number of the next meeting is the same on all of them, also on one
    that leaves a notice instead of coming: the notice says which meeting of each group it stands for.
    """

    met: Counter[str] = field(default_factory=Counter)
    stopped: int = 0
    notices: int = 0


_books: weakref.WeakKeyDictionary[Any, _Book] = weakref.WeakKeyDictionary()


def _open_book(store: Any) -> _Book:
    return _books.setdefault(store, _Book())


def leave_notice(text: str) -> bool:
    """For ranks that will wait for this one: it failed before it knew its group. False if there are no others."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    store, rank = compat.default_store(), dist.get_rank()
    book = _open_book(store)
    notice = {"text": text, "met": book.met, "stopped": book.stopped}
    store.set(f"{_ROOT}/notice/{rank}/{book.notices}", json.dumps(notice))
    book.notices += 1
    book.stopped += 1
    store.add(f"{_ROOT}/notices/{rank}", 1)
    store.add(f"{_ROOT}/notices", 1)
    return True


def roll_call(groups: Sequence[Group]) -> dict[int, str]:
    """Wait for all ranks of each group in turn; returns the faults of all of them, by rank."""
    if not groups:
        return {}
    store = compat.default_store()
    book = _open_book(store)
    faults: dict[int, str] = {}
    for group in groups:
        faults = _meet(store, group, book.met[group.name] + book.stopped, faults)
    if faults:
        book.stopped += 1
    else:
        book.met.update(group.name for group in groups)
    return faults


def _meet(store: Any, group: Group, number: int, faults: dict[int, str]) -> dict[int, str]:
    """One group's meeting; `faults` known already are told, and returned with the others'."""
    rank = dist.get_rank()
    place = f"{_ROOT}/{group.name}/{number}"
    if group.plans is not None and rank not in faults:
        faults = faults | _unlike(store, f"{place}/plans", rank, group.plans)
    for culprit, text in faults.items():
        store.set(f"{place}/fault/{culprit}", text)
    store.add(f"{place}/faults", len(faults))
    store.set(f"{place}/here/{rank}", "")
    store.add(f"{place}/arrived", 1)
    noticed = _wait(store, place, group, lambda other: _notice_for(store, other, group.name, number))
    if not noticed and store.add(f"{place}/faults", 0):
        faults = faults | _read_faults(store, place)
    return faults | noticed


def _wait(store: Any, place: str, group: Group, notice_of: Callable[[int], str | None]) -> dict[int, str]:
    """Until all have arrived, or one has left a notice instead; returns the notices."""
    rank, ranks = dist.get_rank(), group.ranks
    deadline = time.monotonic() + default_pg_timeout.total_seconds()
    pause, known = _FIRST_PAUSE, -1
    while store.add(f"{place}/arrived", 0) < len(ranks):
        total = store.add(f"{_ROOT}/notices", 0)
        if total != known:
            known = total
            noticed = {other: text for other in ranks if other != rank and (text := notice_of(other)) is not None}
            if noticed:
                return noticed
        if time.monotonic() > deadline:
            missing = [other for other in ranks if not store.check([f"{place}/here/{other}"])]
            raise RuntimeError(
                f"rank {rank} waited {default_pg_timeout} for ranks {missing} to build their GraphTrainer over the "
                f"same group of {len(ranks)}; every rank of the group must build one, in the same order"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return {}


def _notice_for(store: Any, rank: int, group: str, number: int) -> str | None:
    """What `rank` left instead of coming to this meeting."""
    for at in reversed(range(store.add(f"{_ROOT}/notices/{rank}", 0))):
        notice = json.loads(store.get(f"{_ROOT}/notice/{rank}/{at}"))
        stands_for = notice["met"].get(group, 0) + notice["stopped"]
        if stands_for <= number:
            return notice["text"] if stands_for == number else None
    return None


def _unlike(store: Any, key: str, rank: int, plans: dict[str, str]) -> dict[int, str]:
    """The first rank's plans are the measure; the others fetch its texts only to say what differs."""
    mine = {subject: hashlib.sha256(text.encode()).hexdigest() for subject, text in plans.items()}
    first = json.loads(store.compare_set(key, "", json.dumps({"rank": rank, **mine})))
    if first["rank"] == rank:
        store.set(f"{key}/texts", json.dumps(plans))
    for subject, digest in mine.items():
        if first[subject] != digest:
            theirs = json.loads(store.get(f"{key}/texts"))[subject]
            return {rank: f"its {subject} differ from rank {first['rank']}'s: {_difference(plans[subject], theirs)}"}
    return {}


def _difference(mine: str, theirs: str) -> str:
    """The first line in which two texts differ."""
    here, there = mine.splitlines(), theirs.splitlines()
    for at in range(max(len(here), len(there))):
        one, other = (lines[at] if at < len(lines) else "nothing" for lines in (here, there))
        if one != other:
            return f"{one}, not {other}"
    return "in white space"


def _read_faults(store: Any, place: str) -> dict[int, str]:
    found = {}
    for rank in range(dist.get_world_size()):
        if store.check([f"{place}/fault/{rank}"]):
            found[rank] = store.get(f"{place}/fault/{rank}").decode()
    return found
