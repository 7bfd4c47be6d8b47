"""RunLock between real processes: a second run is refused, a dead one is no obstacle."""

import os
import signal
import stat
import subprocess
import sys

import pytest
from torch import nn

from hp_components import CheckpointManager, RunLock
from hp_components.checkpoint.lock import held_by_another
from hp_protocols.errors import ConfigError

TAKE_IT = """\
import os, sys, time
from hp_components import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
"""
WAITING = "print('held', flush=True); time.sleep(60)"
WITH_A_WORKER = """\
if os.fork() == 0:
    print('held', os.getpid(), flush=True)  # the worker says it, when it is past what it does after a fork
time.sleep(60)
"""


def start_holder(folder, then=WAITING):
    """A process that takes the lock, and what it says next."""
    process = subprocess.Popen([sys.executable, "-c", TAKE_IT + then, str(folder)], stdout=subprocess.PIPE, text=True)
    said = process.stdout.readline().split()
    assert said[0] == "held"
    return process, said[1:]


def test_a_second_process_is_refused_and_told_who_holds_the_folder(tmp_path):
    holder, _ = start_holder(tmp_path)
    try:
        with pytest.raises(ConfigError, match=rf"another run is using this folder \(pid {holder.pid} on .+\)"):
            RunLock(tmp_path).acquire()
        assert held_by_another(tmp_path)
    finally:
        holder.kill()
        holder.wait()


def test_a_killed_holder_leaves_the_folder_free(tmp_path):
    holder, _ = start_holder(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / ".lock").exists()
    assert not held_by_another(tmp_path)
    with RunLock(tmp_path) as lock:
        assert lock.held


def test_a_forked_worker_does_not_keep_the_lock_of_a_dead_parent(tmp_path):
    holder, (worker,) = start_holder(tmp_path, WITH_A_WORKER)
    try:
        holder.kill()
        holder.wait()
        with RunLock(tmp_path) as lock:
            assert lock.held
    finally:
        os.kill(int(worker), signal.SIGKILL)


def test_what_a_running_save_looks_like_is_left_alone_while_its_run_holds_the_folder(tmp_path):
    partial = tmp_path / "checkpoint/.step-4.partial-0123abcd"
    partial.mkdir(parents=True)
    config, model = CheckpointManager.Config(), nn.Linear(2, 2)
    holder, _ = start_holder(tmp_path)
    try:
        config.build(run_folder=tmp_path, model_parts=[model])
        assert partial.exists()
    finally:
        holder.kill()
        holder.wait()
    with RunLock(tmp_path):
        config.build(run_folder=tmp_path, model_parts=[model])
    assert not partial.exists()


def test_release_frees_it_within_one_process(tmp_path):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    with first:
        with pytest.raises(ConfigError):
            second.acquire()
        assert not held_by_another(tmp_path)  # it is this process
    with second:
        assert second.held
    assert not second.held
    second.release()


def test_taking_it_twice_is_a_mistake(tmp_path):
    lock = RunLock(tmp_path)
    with lock, pytest.raises(RuntimeError, match="held by this object already"):
        lock.acquire()


def test_the_folder_is_made_if_needed(tmp_path):
    with RunLock(tmp_path / "a/b"):
        assert (tmp_path / "a/b/.lock").read_text().startswith(f"pid {os.getpid()} on ")


def test_a_folder_that_cannot_be_used_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used as a run folder"):
        RunLock(tmp_path / "file/run").acquire()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_the_users_mistake(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(ConfigError, match="Permission denied"):
        RunLock(tmp_path).acquire()


def test_nobody_holds_a_folder_that_is_not_there(tmp_path):
    assert not held_by_another(tmp_path / "none")
