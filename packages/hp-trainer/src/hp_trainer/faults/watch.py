"""A thread of every rank that answers for it while its main thread waits, and ends it when the run is over.

In: the meeting of the ranks (`Joined`). Out: when something fails on some rank, one message on each machine, and the
end of every rank. In a run where nothing fails: two requests to the store per rank and half second.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from hp_components.checkpoint import CheckpointError
from hp_trainer.faults import processes
from hp_trainer.faults.activity import LAUNCHER_FOLDER, RecordFile, Status, activity
from hp_trainer.faults.failure import RankFailure
from hp_trainer.faults.joining import Joined, Member
from hp_trainer.faults.verdict import Report, Verdict, judge

__all__ = ["Watch"]

INTERVAL = 0.5
RANKS_PER_SECOND = 4000
"""Of which the store takes two requests each; more ranks ask less often."""
GRACE_SECONDS = 5.0
"""For the main thread to end by itself, once it is known why the run ends."""
ROUND, VERDICT = "round", "verdict"
NEVER_OLD = 1 << 60
TRIES = 3
SECOND_LOOK_SECONDS = 2.0
"""For ranks that seem busy and may only be a little later in noticing the same."""


class Watch:
    """One rank's. `limit_seconds`: how long the main thread may be in one phase before the others are asked whether
    they are still there (not how long a phase may take). `rests`: the main thread is in no phase of the run, so that
    others may have ended and nobody is asked."""

    def __init__(self, joined: Joined, limit_seconds: float, limit_name: str = "the time limit") -> None:
        self.limit_seconds, self.limit_name = limit_seconds, limit_name
        self.rests = False
        self._rank, self._members, self._own = joined.rank, joined.members, joined.own
        self._joined = joined
        self._records: dict[int, RecordFile] = joined.local_records()
        self._interval = max(INTERVAL, len(joined.members) / RANKS_PER_SECOND)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._answered = 0
        self._asked_at = time.monotonic()
        self._mine: Report | None = None  # what the main thread says of itself, once it has failed
        # Held from reading `_mine` until the report is there: the thread's older word must not replace the newer one.
        self._reporting = threading.Lock()
        self._store = joined.store
        # A client of its own: one that waits would hold up the other thread.
        self._beside = dist.PrefixStore("watch", joined.store.clone())  # type: ignore[attr-defined]
        self._main = dist.PrefixStore("watch", joined.store)
        self._thread = threading.Thread(target=self._run, name="hp-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """This rank's part of the run is over; nobody waits for it any more."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(self._interval * 4)
        with contextlib.suppress(dist.DistError):  # whoever held the store has ended before
            self._main.set(f"left/{self._rank}", "1")

    def explain(self, error: BaseException) -> RankFailure:
        """Called by the main thread with what ended its work: finds out which rank is to blame, and tells it.

        Takes up to some seconds where the others have to be asked.
        """
        where, own = activity.where, not processes.lost_others(error)
        doing = (activity.step, activity.doing, time.monotonic() - activity.since)
        place = processes.error_place(error.__traceback__)
        self._report_loss(Report(self._rank, self._own.who, "lost", *doing, place))
        if own:
            self._let_the_cause_speak_first(error)
            text = f"{self._own.who} failed in {where}: {_named(error)}; the run ends on all ranks"
            verdict = self._settle(Verdict("raised", (self._rank,), text), self._main)
        else:
            verdict = self._find(self._main, self._reason(error, doing[2]))
        if verdict.culprits == (self._rank,) and verdict.kind == "raised":
            self._tell(verdict, self._main, "".join(traceback.format_exception(error)))
        else:
            self._tell(verdict, self._main)
        return RankFailure(verdict.message)

    def _report_loss(self, report: Report) -> None:
        """From now on the thread says nothing of this rank any more. No use to the others where the store is gone."""
        # The thread is longer only in a store that does not answer, where no word replaces another.
        alone = self._reporting.acquire(timeout=GRACE_SECONDS)
        try:
            self._mine = report
            self._try(lambda: self._post(report, self._main, NEVER_OLD))
        finally:
            if alone:
                self._reporting.release()

    def _let_the_cause_speak_first(self, error: BaseException) -> None:
        """A failed save is raised on every rank; the traceback of the one where it happened says most."""
        if isinstance(error, CheckpointError) and error.__cause__ is None and len(self._members) > 1:
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline and not self._try(lambda: self._main.check([VERDICT])):
                time.sleep(0.05)

    # ---- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        seen = ""
        try:
            while not self._ended.wait(self._interval):
                number = self._beside.add(ROUND, 0)
                if number > self._answered:
                    self._answer(number)
                    self._asked_at = time.monotonic()
                    if self._beside.check([VERDICT]):
                        self._obey(_read(self._beside))
                        return
                if (now := activity.where) != seen:
                    seen = now
                    self._beside.set(f"seen/{self._rank}", json.dumps([activity.step, activity.doing]))
                if self._waits_long():
                    self._ask_whether_all_live()
        except dist.DistError:
            return  # whoever held the store has ended; the main thread hears of it from its next message

    def _answer(self, number: int) -> None:
        self._answered = number
        with self._reporting:
            if self._mine is not None:
                return  # the main thread has said it already, and knows more
            state = "communicating" if processes.main_waits() else "busy"
            seconds = time.monotonic() - activity.since
            report = Report(
                self._rank, self._own.who, state, activity.step, activity.doing, seconds, processes.place_of_main()
            )
            self._post(report, self._beside, number)

    def _post(self, report: Report, store: dist.Store, number: int) -> None:
        """Returns when the report is there: one that the other client of this rank sends later replaces it."""
        store.set(key := f"report/{self._rank}", json.dumps([number, asdict(report)]))
        store.check([key])  # `set` waits for no answer

    def _waits_long(self) -> bool:
        if self.rests:
            return False
        since = max(activity.since, self._asked_at)
        return time.monotonic() - since > self.limit_seconds + 2 * self._interval

    def _ask_whether_all_live(self) -> None:
        """A save may wait longer for a disk than a step for a rank. One that stands still is found all the same."""
        self._asked_at = time.monotonic()
        for _ in range(TRIES):
            reports = self._ask(self._beside)
            # Code that holds Python's lock for some seconds keeps a rank from answering; it lives all the same.
            if any(report.state in ("gone", "stopped") for report in reports):
                break
            if self._ended.wait(self._interval) or not any(report.state == "silent" for report in reports):
                return
        if any(report.state in ("gone", "stopped", "silent") for report in reports):
            reason = f"nothing was heard of it for {self.limit_seconds:g} s, {self.limit_name}"
            self._obey(self._settle(judge(reports, reason), self._beside))

    def _obey(self, verdict: Verdict) -> None:
        """The run is over: the main thread has a little time to see it, then the process ends."""
        if verdict.kind == "raised":
            if verdict.culprits[0] == self._rank:
                return  # it is on its way, and may still wait for a save in the background
            self._wait_for_end_of(self._members[verdict.culprits[0]])
        else:
            self._tell(verdict, self._beside)
        if self._rank in verdict.culprits and self._mine is None:
            _say(f"hp train: where rank {self._rank} stands:\n{processes.main_stack()}")
            # Not before whoever waited for this rank has said why.
            self._ended.wait(1.0)
        elif self._ended.wait(GRACE_SECONDS):
            return
        activity.end(Status.QUIET)
        os._exit(1)

    def _wait_for_end_of(self, member: Member) -> None:
        """A rank that raised waits for its save in the background, which needs the others."""
        while not self._ended.wait(self._interval):
            if self._beside.check([f"left/{member.rank}"]):
                return
            if member.host == self._own.host and processes.is_gone(member.pid):
                return

    # ---- finding out -----------------------------------------------------------------------------------------

    def _reason(self, error: BaseException, seconds: float) -> str:
        if "imed out" in str(error) or "imeout" in str(error):
            return f"nothing was heard for {seconds:.0f} s, the limit is {self.limit_name}"
        return "the connection was closed"

    def _find(self, store: dist.Store, reason: str) -> Verdict:
        try:
            if store.check([VERDICT]):
                return _read(store)
            reports = self._ask(store)
            if store.check([VERDICT]):
                return _read(store)
        except dist.DistError:
            return self._without_store(reason)
        return self._settle(judge(reports, reason), store)

    def _ask(self, store: dist.Store) -> list[Report]:
        """Every rank's report. Waits for their threads, which answer within their interval if they live."""
        number = store.add(ROUND, 1)
        if store is self._beside:
            self._answer(number)
        deadline = time.monotonic() + 3 * self._interval + 1.5
        reports = self._collect(number, store, deadline, enough=lambda found: len(found) == len(self._members))
        if any(report.state == "busy" for report in reports.values()):
            deadline = time.monotonic() + SECOND_LOOK_SECONDS
            reports |= self._collect(
                number, store, deadline, enough=lambda found: all(report.state != "busy" for report in found.values())
            )
        if any(report.state in ("gone", "told") for report in reports.values()):
            return [reports[rank] for rank in sorted(reports)]  # the others were not given the time
        return [reports.get(member.rank) or self._unanswered(member, store) for member in self._members]

    def _collect(
        self, number: int, store: dist.Store, deadline: float, enough: Callable[[dict[int, Report]], bool]
    ) -> dict[int, Report]:
        """The reports there are, as soon as they are enough, a rank is gone, or the reason is known already."""
        while True:
            looked = {member.rank: self._look(member, number, store) for member in self._members}
            reports = {rank: report for rank, report in looked.items() if report is not None}
            known = any(report.state in ("gone", "told") for report in reports.values()) or store.check([VERDICT])
            if known or enough(reports) or time.monotonic() > deadline:
                return reports
            time.sleep(0.05)

    def _look(self, member: Member, number: int, store: dist.Store) -> Report | None:
        """What is known of a rank by now."""
        if store.check([key := f"report/{member.rank}"]):
            asked, report = json.loads(store.get(key))
            if asked >= number:
                return Report(**report)
        file = self._records.get(member.rank)
        record = file.read() if file is not None else None
        known = (record.step, record.doing) if record is not None else ()
        if record is not None and processes.is_gone(member.pid):
            return Report(member.rank, member.who, _STATE[record.status], *known)
        if store.check([f"left/{member.rank}"]):
            return Report(member.rank, member.who, "left", *known)
        return None

    def _unanswered(self, member: Member, store: dist.Store) -> Report:
        file = self._records.get(member.rank)
        if file is not None:
            record = file.read()
            state = "stopped" if processes.is_stopped(member.pid) else "silent"
            return Report(member.rank, member.who, state, record.step, record.doing)
        step, doing = 0, ""
        if store.check([key := f"seen/{member.rank}"]):
            step, doing = json.loads(store.get(key))
        return Report(member.rank, member.who, "silent", step, doing)

    def _without_store(self, reason: str) -> Verdict:
        """The store is gone, with the launcher of machine 0 or with rank 0: the neighbours are all that can be seen."""
        gone = [(rank, file.read()) for rank, file in self._records.items() if processes.is_gone(file.read().pid)]
        reports = [Report(rank, one.who, _STATE[one.status], one.step, one.doing) for rank, one in gone]
        if any(report.state in ("gone", "told") for report in reports):
            return judge([*reports, *([self._mine] if self._mine else [])], reason)
        who = self._members[0].who
        return Verdict("silent", (0,), f"{who} or its launcher is gone, which held the ranks together ({reason})")

    def _settle(self, verdict: Verdict, store: dist.Store) -> Verdict:
        """The first verdict holds for all ranks."""
        try:
            text = json.dumps(asdict(verdict))
            there = store.compare_set(VERDICT, "", text).decode()
            store.add(ROUND, 1)
            return verdict if there == text else _verdict_of(there)
        except dist.DistError:
            return verdict

    def _tell(self, verdict: Verdict, store: dist.Store, trace: str = "") -> None:
        """Once on every machine; by the launcher, if one of ours started the rank that has ended."""
        with self._lock:
            if self._told:
                return
            self._told = True
            if not self._speaks(verdict, store, has_trace=bool(trace)):
                activity.end(Status.QUIET)
                return
            activity.end(Status.TOLD)
            _say(f"hp train: {verdict.message}\n{trace}")

    _told = False

    def _speaks(self, verdict: Verdict, store: dist.Store, *, has_trace: bool) -> bool:
        if verdict.kind == "gone" and self._launcher_tells(verdict):
            return False
        if has_trace:
            key, by = f"said/{self._own.launcher}", str(self._rank)
            self._try(lambda: store.set(key, by))
            return True
        if verdict.kind == "raised" and self._members[verdict.culprits[0]].launcher == self._own.launcher:
            return False  # it says so itself
        key, by = f"said/{self._own.launcher}", str(self._rank)
        said = self._try(lambda: store.compare_set(key, "", by).decode())
        # Without the store nobody knows who has spoken: rather twice than not at all.
        return said in (None, by)

    def _launcher_tells(self, verdict: Verdict) -> bool:
        gone = self._members[verdict.culprits[0]]
        return LAUNCHER_FOLDER in os.environ and gone.launcher == self._own.launcher

    @staticmethod
    def _try(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except dist.DistError:
            return None


_STATE = {Status.RUNNING: "gone", Status.FINISHED: "left", Status.TOLD: "told", Status.QUIET: "told"}


def _read(store: dist.Store) -> Verdict:
    return _verdict_of(store.get(VERDICT).decode())


def _verdict_of(text: str) -> Verdict:
    verdict = Verdict(**json.loads(text))
    return replace(verdict, culprits=tuple(verdict.culprits))


def _named(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _say(text: str) -> None:
    sys.stdout.flush()
    os.write(2, (text.rstrip("\n") + "\n").encode())
