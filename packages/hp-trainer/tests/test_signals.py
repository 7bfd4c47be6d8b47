"""A signal asks for a stop; only a second Ctrl-C, pressed later, ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hp_trainer.signals import SAME_PRESS_SECONDS, EndBeforeTraining, StopRequest


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


def press_twice(child: subprocess.Popen[bytes]) -> None:
    """The second time when the first was heard, later than one press could arrive twice."""
    assert child.stderr is not None
    child.send_signal(signal.SIGINT)
    assert child.stderr.readline() == b"\n"
    assert b"press Ctrl-C again" in child.stderr.readline()
    time.sleep(SAME_PRESS_SECONDS + 0.1)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)


def test_one_press_of_ctrl_c_that_arrives_twice_does_not_end_the_process() -> None:
    program = (
        "import os, signal\n"
        "from hp_trainer.signals import StopRequest\n"
        "with StopRequest():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


WORKS = """
import time
from hp_trainer.signals import StopRequest
with StopRequest():
    print("works", flush=True)
    time.sleep(300)
"""


HANGS = """
import ctypes
from hp_trainer.signals import StopRequest
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with StopRequest():
    library.pthread_mutex_lock(mutex)
    print("hangs", flush=True)
    library.pthread_mutex_lock(mutex)  # as a collective that waits for another rank: Python's handlers never run
"""


@pytest.mark.parametrize(
    "program", [WORKS, pytest.param(HANGS, marks=pytest.mark.skipif(sys.platform != "linux", reason="a lock of glibc"))]
)
def test_a_second_ctrl_c_ends_a_process_at_once_also_if_its_main_thread_never_comes_back(program: str) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            press_twice(child)
            _, said = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 130
    assert b"press Ctrl-C again" not in said
    assert b"ended at once" in said


FORKS = """
import os, signal, time
from hp_trainer.signals import StopRequest
reader, writer = os.pipe()
with StopRequest() as stop:
    child = os.fork()
    if child == 0:
        os.write(writer, b"x")
        time.sleep(30)
        os._exit(0)
    os.read(reader, 1)
    os.kill(child, signal.SIGTERM)  # as a loader ends its workers
    _, status = os.waitpid(child, 0)
    time.sleep(0.2)
    print(os.waitstatus_to_exitcode(status), stop.name)
"""


def test_a_signal_to_a_data_worker_is_none_to_the_run() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60)
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
        _, said = child.communicate(timeout=60)
    assert child.returncode == 1
    assert b"ended by SIGTERM before training began (building the model); nothing was run" in said


INSTANTS = """
import os, signal, sys, time
from hp_trainer import signals
from hp_trainer.signals import EndBeforeTraining, StopRequest

def strike_at(number):
    lines = 0
    def trace(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename != signals.__file__ or frame.f_code.co_name == "_read":
            return None
        lines += event == "line"
        if lines == number and event == "line":
            os.kill(os.getpid(), signal.SIGTERM)
        return trace
    with EndBeforeTraining():
        sys.settrace(trace)
        with StopRequest() as stop:
            sys.settrace(None)
            if lines < number:
                os._exit(9)
            end = time.monotonic() + 30
            while stop.name is None and time.monotonic() < end:
                time.sleep(0.001)
            os._exit(0 if stop.name == "SIGTERM" else 8)

codes = []
while 9 not in codes:
    child = os.fork()
    if child == 0:
        strike_at(len(codes) + 1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(*codes)
"""


def test_at_no_instant_between_building_and_training_does_a_signal_end_the_process_by_itself() -> None:
    done = subprocess.run([sys.executable, "-c", INSTANTS], capture_output=True, text=True, timeout=120)
    codes = [int(code) for code in done.stdout.split()]
    assert len(codes) > 15, done.stderr
    ends = codes.count(1)  # at first, nothing was run; then the wish to stop is noted
    assert codes == [1] * ends + [0] * (len(codes) - ends - 1) + [9]
    assert done.stderr.count("ended by SIGTERM before training began") == ends


def test_training_that_is_over_leaves_the_handlers_from_before_the_building() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with EndBeforeTraining():
        assert signal.getsignal(signal.SIGTERM) != before
        with StopRequest():
            pass
        assert signal.getsignal(signal.SIGTERM) == before
        assert signal.set_wakeup_fd(-1) == -1
    assert signal.getsignal(signal.SIGTERM) == before


STRIKES = """
import os, signal, sys
from hp_trainer import hyper_trainer
from hp_trainer.cli import train

def struck(owner, name):
    work = getattr(owner, name)
    def then_the_signal(*arguments):
        result = work(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return result
    setattr(owner, name, then_the_signal)

for owner, name in ((train, "announce_rank"), (train, "opening"), (hyper_trainer.HyperTrainer, "begin")):
    child = os.fork()
    if child == 0:
        struck(owner, name)
        os._exit(train.run_rank(sys.argv[1:] + ["--dump_folder", name]))
    print("exit code:", name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_signal_to_a_rank_that_starts_or_begins_is_answered_with_a_message_or_a_save(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {number}: {number**7}\n" for number in range(3000)))
    recipe = ["--module", "qwen3_5_v2", "--config", "qwen3_5_v2_debugmodel", "--training.seq_len", "64"]
    recipe += ["--dataloader.dataset_path", "text.txt", "--tokenizer.vocab_size", "300"]
    environment = {**os.environ, "HP_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", STRIKES, *recipe],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=environment,
    )
    codes = [line for line in done.stdout.splitlines() if line.startswith("exit code:")]
    assert codes == [f"exit code: {end}" for end in ("announce_rank 1", "opening 1", "begin 0")], done.stderr
    assert done.stderr.count("ended by SIGTERM before training began") == 2
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "text.txt", "begin"}
    assert (tmp_path / "begin" / "checkpoint" / "step-1").is_dir()
