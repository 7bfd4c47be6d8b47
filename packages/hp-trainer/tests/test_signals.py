"""A signal asks for a stop; only a second Ctrl-C, pressed later, ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from hp_trainer.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_becomes_a_wish_to_stop(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert stop.name is None
        os.kill(os.getpid(), number)
        assert stop.name == number.name


def test_the_handlers_before_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("pause", "code"), [(0.0, 0), (1.2, 130)])
def test_a_second_ctrl_c_ends_at_once_but_one_press_that_arrives_twice_does_not(pause: float, code: int) -> None:
    program = (
        "import os, signal, time\n"
        "from hp_trainer.signals import StopRequest\n"
        "with StopRequest():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        f"    time.sleep({pause})\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == code


HANGS = """
import ctypes
from hp_trainer.signals import StopRequest
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with StopRequest():
    library.pthread_mutex_lock(mutex)
    print("hangs", flush=True)
    library.pthread_mutex_lock(mutex)  # as a collective that waits for another rank: Python's handlers never run
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a lock of the C library")
def test_a_second_ctrl_c_ends_a_process_whose_main_thread_never_comes_back_to_python() -> None:
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        time.sleep(1.2)
        assert child.poll() is None
        child.send_signal(signal.SIGINT)
        try:
            _, said = child.communicate(timeout=10)
        finally:
            child.kill()
    assert child.returncode == 130
    assert said.count(b"press Ctrl-C again") == 1
    assert b"ended at once" in said


FORKS = """
import os, signal, time
from hp_trainer.signals import StopRequest
with StopRequest() as stop:
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)  # as a loader ends its workers
    _, status = os.waitpid(child, 0)
    time.sleep(0.2)
    print(os.waitstatus_to_exitcode(status), stop.name)
"""


def test_a_signal_to_a_data_worker_is_none_to_the_run() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=20)
    assert done.stdout.split() == ["-15", "None"], done.stderr


def test_before_training_a_signal_ends_at_once_and_says_what_was_done() -> None:
    program = (
        "import time\n"
        "from hp_trainer.faults import activity\n"
        "from hp_trainer.signals import EndBeforeTraining\n"
        "with EndBeforeTraining():\n"
        "    activity.now('building the model')\n"
        "    print('builds', flush=True)\n"
        "    time.sleep(30)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.terminate()
        _, said = child.communicate(timeout=10)
    assert child.returncode == 1
    assert b"ended by SIGTERM before training began (building the model); nothing was run" in said
