"""Who is to blame when ranks lose each other, what a process leaves of what it did, and how ranks meet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from hp_protocols.errors import ConfigError
from hp_protocols.testing import run_world
from hp_trainer.faults import RankFailure
from hp_trainer.faults.activity import Activity, RecordFile, Status
from hp_trainer.faults.joining import Joined, Member, join
from hp_trainer.faults.processes import is_gone, is_stopped, lost_others
from hp_trainer.faults.verdict import Report, judge
from hp_trainer.faults.watch import Watch

FORWARD = "forward and backward"


def report(rank: int, state: str, doing: str = FORWARD, place: str = "") -> Report:
    return Report(rank, f"rank {rank} (host h, pid {100 + rank})", state, 7, doing, 12.0, place)


@pytest.mark.parametrize(
    ("reports", "kind", "culprits", "words"),
    [
        ([report(0, "lost"), report(1, "gone")], "gone", (1,), "ended without a word in step 7, forward"),
        ([report(0, "lost"), report(1, "stopped"), report(2, "busy")], "stopped", (1,), "is stopped"),
        ([report(0, "lost"), report(1, "silent", "")], "silent", (1,), "does not answer any more"),
        ([report(0, "lost"), report(1, "busy", "waiting for data")], "late", (1,), "in step 7, waiting for data"),
        ([report(0, "lost"), report(1, "communicating"), report(2, "busy")], "late", (2,), "rank 2 "),
        # A mistake that one rank alone has found: it leaves, and tells it after rank 0 had the time to.
        ([report(0, "lost"), report(1, "left")], "raised", (1,), "has left the run (its own message says why)"),
        ([report(0, "lost"), report(1, "told")], "raised", (1,), "its own message says why"),
        ([report(0, "lost"), report(1, "lost", "validating"), report(2, "lost")], "parted", (1,), "another place"),
        ([report(0, "lost", place="a.py:1"), report(1, "lost", place="b.py:2")], "parted", (), "different places"),
        ([report(0, "lost"), report(1, "lost")], "network", (), "lost each other"),
    ],
)
def test_the_rank_to_blame_is_told_from_what_the_ranks_say(
    reports: list[Report], kind: str, culprits: tuple[int, ...], words: str
) -> None:
    verdict = judge(reports, "nothing was heard for 10 s")
    assert (verdict.kind, verdict.culprits) == (kind, culprits)
    assert words in verdict.message.splitlines()[0]
    assert "the run ends on all ranks" in verdict.message


def test_a_message_about_many_ranks_stays_readable() -> None:
    message = judge([report(rank, "lost") for rank in range(1000)], "why").message
    assert len(message.splitlines()) < 20
    assert "984 more ranks" in message


def test_a_killed_process_leaves_what_it_was_doing(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys, time\n"
        "from hp_trainer.faults.activity import activity\n"
        "activity.publish(pathlib.Path(sys.argv[1]))\n"
        "activity.at_step(7)\n"
        "activity.now('waiting for data')\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "record")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "RANK": "3"}) as child:
        assert child.stdout is not None
        child.stdout.readline()
        record = RecordFile(tmp_path / "record")
        child.send_signal(signal.SIGSTOP)
        end = time.monotonic() + 60
        while sys.platform == "linux" and not is_stopped(child.pid):
            assert time.monotonic() < end
        assert not is_gone(child.pid)
        child.kill()
        while not is_gone(child.pid):  # before its parent has looked after it
            assert time.monotonic() < end
    found = record.read()
    assert (found.pid, found.rank, found.where) == (child.pid, 3, "step 7, waiting for data")
    assert found.status is Status.RUNNING


def test_an_activity_within_another_gives_it_back_unless_it_fails() -> None:
    activity = Activity()
    activity.now("reporting the step")
    with activity.during("Mine.on_step_end"):
        assert activity.where == "Mine.on_step_end"
    assert activity.where == "reporting the step"
    with pytest.raises(ValueError, match="planted"), activity.during("Mine.on_step_end"):
        raise ValueError("planted")
    assert activity.where == "Mine.on_step_end", "the place of the error is kept for the message"


def test_errors_of_a_lost_rank_are_told_from_a_rank_s_own() -> None:
    gloo = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
    assert lost_others(gloo)
    wrapped = ValueError("cannot save")
    wrapped.__cause__ = gloo
    assert lost_others(wrapped)
    assert not lost_others(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"))
    assert not lost_others(KeyError("gloo/"))


def _join(
    rank: int, world_size: int, folder: Path, variables: dict[int, dict[str, str]], short: tuple[int, ...] = ()
) -> str:
    """`short`: the ranks that wait in vain, and so only for two seconds."""
    os.environ.update(variables.get(rank, {}))
    # The two seconds begin when all processes are there.
    (folder / f"{os.environ['MASTER_PORT']}.{rank}").touch()
    while len(list(folder.glob(f"{os.environ['MASTER_PORT']}.*"))) < world_size:
        time.sleep(0.01)
    try:
        joined = join(2.0 if rank in short else 60.0)
    except (ConfigError, RankFailure) as error:
        return str(error)
    return " ".join(member.who for member in joined.members)


def test_ranks_meet_and_know_each_other(tmp_path: Path) -> None:
    results = run_world(_join, 2, tmp_path, {}, init_process_group=False)
    assert results[0] == results[1]
    assert results[0].startswith("rank 0 (host ")
    assert "rank 1 (host " in results[0]


def test_a_rank_that_is_missing_started_twice_or_of_another_world_is_named(tmp_path: Path) -> None:
    def meet(variables: dict[int, dict[str, str]], *short: int) -> list[str]:
        return run_world(_join, 2, tmp_path, variables, short, init_process_group=False)

    missing = meet({0: {"WORLD_SIZE": "3"}, 1: {"WORLD_SIZE": "3"}}, 0, 1)
    assert all("rank 2 of 3 did not come within 2 s (comm.init_timeout_seconds)" in said for said in missing)
    twice = meet({1: {"RANK": "0"}}, 0, 1)
    assert any("RANK: 0 was started twice" in said for said in twice)
    other = meet({1: {"WORLD_SIZE": "3"}}, 1)
    assert "WORLD_SIZE: is not the same on every rank: rank 1" in other[0]
    outside = meet({1: {"RANK": "5"}}, 0)
    assert "RANK: 5 is no rank of 2 (WORLD_SIZE); allowed: 0 to 1" in outside[1]


def test_what_a_rank_says_once_it_has_failed_is_not_replaced_by_what_its_thread_was_about_to_say(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server = TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    own = Member(0, "here", os.getpid(), "", "launcher", 1)
    looks = threading.Event()

    def slowly() -> str:
        """Where the main thread stands, for its thread that was asked and has seen no failure yet."""
        looks.set()
        time.sleep(0.5)
        return "a.py:1 in work"

    monkeypatch.setattr("hp_trainer.faults.processes.place_of_main", slowly)
    watch = Watch(Joined(0, [own], PrefixStore("test", server), server), limit_seconds=60)
    store = PrefixStore("watch", PrefixStore("test", server))
    try:
        store.add("round", 1)
        assert looks.wait(30)
        watch.explain(RuntimeError("Connection closed by peer"))
    finally:
        watch.close()
    asked, said = json.loads(store.get("report/0"))
    assert said["state"] == "lost"
    assert asked > 1_000_000, "an answer to every round"
    assert "lost each other" in capfd.readouterr().err
