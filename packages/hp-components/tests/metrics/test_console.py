"""The console on a real pseudo-terminal and off one: readable, narrow enough, free of control characters."""

import fcntl
import io
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
from dataclasses import replace

import pytest

from hp_components.metrics.console import fitting, record_fields
from hp_components.metrics.record import Record
from hp_components.metrics.units import duration

RECORD = Record(
    step=40,
    time=9.0,
    loss=5.43211,
    lr=2.9e-4,
    grad_norm=1.234,
    tokens=81920,
    tokens_per_second=4512.3,
    memory_gib=0.8123,
    mfu=None,
    data_wait=0.0,
)

PROGRAM = """
    import logging, sys, time
    from hp_components.metrics.console import make_console, record_fields
    from hp_components.metrics.record import Record
    console = make_console(None)
    if sys.stderr.isatty():
        logging.basicConfig(format="%(message)s", stream=sys.stderr)
    console.begin(0, 256)
    rest = dict(time=1.0, loss=5.43211, lr=2.9e-4, grad_norm=1.234, tokens=1, memory_gib=0.8, mfu=None, data_wait=0.0)
    for step in range(1, 5):
        console.record(record_fields(Record(step=step, tokens_per_second=4512.3, **rest), 256, 92.0))
        console.progress(step)
        time.sleep(0.3)
    if sys.stderr.isatty():
        logging.warning("a line of the log")
    console.note("done [1/2] with %s brackets")
    console.note("saved as /a/long/path/that/should/stay/in/one/piece/to/be/copied")
    console.close()
    if sys.stderr.isatty():
        logging.warning("after the bar")
"""


def on_terminal(columns, program=PROGRAM, stderr=None, **environment):
    """What the program writes on a pseudo-terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    ruled_out = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM")
    cleared = {name: value for name, value in os.environ.items() if name not in ruled_out}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=theirs,
        stderr=theirs if stderr is None else stderr,
        stdin=theirs,
        env=cleared | {"TERM": "xterm-256color"} | environment,
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the terminal is gone with its last process
            break
        if not chunk:
            break
        said += chunk
    assert process.wait() == 0
    os.close(ours)
    return said.decode()


def shown(text):
    """What was drawn, piece by piece, without control sequences: a line may be drawn over."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [piece.rstrip() for piece in re.split(r"[\r\n]+", plain)]


def line(total_steps=256, **changes):
    return "  ".join(record_fields(replace(RECORD, **changes), total_steps, 92.0).values())


def test_a_record_reads_as_one_line():
    text = "step  40/256  loss 5.4321  lr 2.9e-04  grad 1.23  mem 0.8 GiB  4,512 tok/s  mfu n/a  eta 1m32s"
    assert line() == text


def test_data_wait_is_shown_when_there_is_something_to_say():
    assert "mfu 41.2%  data wait 25%" in line(mfu=0.412, data_wait=0.25)


def test_what_is_not_known_is_not_available_and_what_is_not_finite_is_shown_as_such():
    text = line(loss=math.inf, grad_norm=math.nan, memory_gib=None, tokens_per_second=None)
    assert text == "step  40/256  loss inf  lr 2.9e-04  grad nan  mem n/a  mfu n/a  eta 1m32s"
    assert "loss -inf" in line(loss=-math.inf)


def test_columns_stand_from_the_first_step_to_the_last_of_a_long_run():
    assert line(10_000_000, step=1).startswith("step        1/10000000  loss 5.4321")
    assert len(line(10_000_000, step=1)) == len(line(10_000_000, step=10_000_000))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (92, "1m32s"), (3600, "1h00m"), (7500, "2h05m"), (273600, "3d04h")]
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_step_and_loss_stay_however_narrow_it_gets():
    fields = record_fields(RECORD, 256, 92.0)
    for width in range(1, 120):
        text = "  ".join(fitting(fields, width).values())
        assert text.startswith("step  40/256  loss 5.4321")
        assert len(text) <= max(width, len("step  40/256  loss 5.4321"))
    assert fitting(fields, 200) == fields


def test_off_a_terminal_there_are_plain_lines_only():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, check=True)
    lines = done.stdout.decode().splitlines()
    assert len(lines) == 6
    assert lines[0] == "step   1/256  loss 5.4321  lr 2.9e-04  grad 1.23  mem 0.8 GiB  4,512 tok/s  mfu n/a  eta 1m32s"
    assert lines[-2] == "done [1/2] with %s brackets"
    assert all(byte >= 32 or byte == 10 for byte in done.stdout)


def test_on_a_terminal_lines_stand_above_a_bar():
    text = on_terminal(120)
    lines = shown(text)
    assert "step   4/256  loss 5.4321  lr 2.9e-04  grad 1.23  mem 0.8 GiB  4,512 tok/s  mfu n/a  eta 1m32s" in lines
    assert "done [1/2] with %s brackets" in lines
    assert "a line of the log" in lines
    assert lines[-2:] == ["after the bar", ""]
    assert any("training" in line and "4/256" in line and "━" in line for line in lines)


def test_a_log_that_goes_to_a_file_stays_there(tmp_path):
    program = PROGRAM.replace("if sys.stderr.isatty():", "if True:")
    with (tmp_path / "log").open("wb") as file:
        text = on_terminal(120, program=program, stderr=file)
    assert (tmp_path / "log").read_text() == "a line of the log\nafter the bar\n"
    assert "log" not in text


def test_forty_columns_do_not_break_the_lines():
    lines = shown(on_terminal(40))
    assert "saved as /a/long/path/that/should/stay/in/one/piece/to/be/copied" in lines
    assert all(len(line) <= 40 or line.startswith("saved as") for line in lines), lines
    assert any(line.startswith("step   4/256  loss 5.4321") for line in lines)
    assert any("training" in line and "4/256" in line for line in lines)


def test_no_color_is_respected():
    assert re.search(r"\x1b\[[0-9;]*m", on_terminal(120))
    assert not re.search(r"\x1b\[[0-9;]*[1-9][0-9;]*m", on_terminal(120, NO_COLOR="1"))


def test_a_dumb_terminal_gets_plain_lines():
    assert "\x1b" not in on_terminal(120, TERM="dumb")


def test_a_closed_stream_is_no_terminal():
    from hp_components.metrics.console import PlainConsole, make_console

    stream = io.StringIO()
    console = make_console(stream)
    assert isinstance(console, PlainConsole)
    console.note("hello")
    assert stream.getvalue() == "hello\n"


RESIZED = """
    import fcntl, os, signal, struct, sys, termios, time
    from hp_components.metrics.console import make_console
    console = make_console(None)
    console.begin(0, 9_000_000)
    for columns, step in ((100, 1), (50, 2)):
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.kill(os.getpid(), signal.SIGWINCH)
        time.sleep(0.3)
        console.record({"step": f"step {step}", "loss": "loss 5.4321", "eta": "eta 1m32s " * 6})
        console.progress(step)
    console.table("a run", [("loss", "7.6612 to 3.9120"), ("memory", "n/a (the process: 0.81 GiB, all of it)")])
    console.close()
"""


def test_a_window_that_is_resized_gets_lines_of_its_new_width():
    lines = shown(on_terminal(100, program=RESIZED))
    wide = next(line for line in lines if line.startswith("step 1"))
    narrow = next(line for line in lines if line.startswith("step 2"))
    assert len(wide) > 60
    assert narrow == "step 2  loss 5.4321"
    bars = [line for line in lines if line.startswith("training")]
    assert len(bars[0]) > 90
    assert all(len(line) <= 50 for line in lines[lines.index(narrow) :]), lines


def test_the_table_fits_into_forty_columns_without_a_word_lost():
    program = RESIZED.replace("(100, 1), (50, 2)", "(40, 1),")
    lines = shown(on_terminal(40, program=program))
    start = next(number for number, line in enumerate(lines) if line.startswith("╭"))
    table = lines[start - 1 : start + 6]
    assert table[0] == "a run"
    assert all(len(line) <= 40 for line in table)
    words = " ".join(word for line in table for word in line.split() if word != "│")
    assert "memory n/a (the process: 0.81 GiB, all of it)" in words


def test_colors_can_be_switched_off_by_the_config_too():
    program = PROGRAM.replace("make_console(None)", "make_console(None, color=False)")
    assert not re.search(r"\x1b\[[0-9;]*[1-9][0-9;]*m", on_terminal(120, program=program))


def test_a_bar_over_ten_million_steps_costs_next_to_nothing_per_step():
    program = """
        import time
        from hp_components.metrics.console import make_console
        console = make_console(None)
        console.begin(9_000_000, 10_000_000)
        began = time.process_time()
        for step in range(9_000_001, 9_020_001):
            console.progress(step)
        seconds = (time.process_time() - began) / 20_000
        console.close()
        print("seconds", seconds)
    """
    assert float(on_terminal(120, program=program).split()[-1]) < 50e-6
