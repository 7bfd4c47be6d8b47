"""A signal asks for a stop; only a second Ctrl-C, pressed later, ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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
