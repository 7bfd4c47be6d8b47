"""metrics.jsonl: whole lines only, cut back on resume, and no record lost to a full disk that recovers."""

import json
import logging
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

from hp_components.metrics import read_records
from hp_components.metrics.jsonl import JsonlWriter


def written(path, *records, step=0):
    writer = JsonlWriter(path)
    dropped = writer.open(step)
    for record in records:
        writer.write(record)
    writer.close()
    return dropped


def test_each_record_is_one_line_of_json(tmp_path):
    path = tmp_path / "run/metrics.jsonl"
    written(path, {"step": 1, "text": "grün"}, {"step": 2, "nothing": None})
    assert path.read_text().splitlines() == ['{"step": 1, "text": "grün"}', '{"step": 2, "nothing": null}']


def test_opening_again_goes_on_behind_the_resumed_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(path, *[{"step": step} for step in range(1, 6)])
    assert written(path, {"step": 4, "again": True}, step=3) == 2
    assert [record["step"] for record in read_records(path)] == [1, 2, 3, 4]
    assert list(read_records(path))[-1]["again"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_half_a_line_of_a_killed_process_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert written(path, {"step": 3}, step=10) == 1
    assert [record["step"] for record in read_records(path)] == [1, 2, 3]


def test_a_whole_record_without_its_newline_is_not_joined_to_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    written(path, {"step": 3}, step=10)
    assert [record["step"] for record in read_records(path)] == [1, 3]


def test_lines_that_are_no_records_are_skipped_with_their_place(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\nnot json\n[1]\n\xff\n{"step": 2}\n')
    with caplog.at_level(logging.WARNING):
        assert [record["step"] for record in read_records(path)] == [1, 2]
    assert f"{path}:2: skipped" in caplog.text
    assert len(caplog.records) == 3


def test_a_kill_at_any_time_leaves_the_records_that_were_written(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom hp_components.metrics.jsonl import JsonlWriter\n"
        "writer = JsonlWriter(Path(sys.argv[1]))\nwriter.open(0)\nwriter.write({'step': 1})\n"
        "print('written', flush=True)\nsys.stdin.read()"
    )
    path = tmp_path / "metrics.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    assert path.read_text() == '{"step": 1}\n'


@contextmanager
def no_room_beyond(size):
    """The kernel lets no file of this process grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_delays_records_and_loses_none(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.open(0)
    writer.write({"step": 1})
    with no_room_beyond(path.stat().st_size + 5):
        writer.write({"step": 2})  # five bytes of it find room, and must not stay
        assert path.read_text() == '{"step": 1}\n'
    with no_room_beyond(path.stat().st_size):
        writer.write({"step": 3})
    assert path.read_text() == '{"step": 1}\n'
    assert "1 records not written yet: only 5 of 12 bytes written" in caplog.text
    assert "2 records not written yet: [Errno 27] File too large" in caplog.text
    writer.write({"step": 4})
    writer.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_records_that_never_found_room_are_counted_at_the_end(tmp_path, caplog):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.open(0)
    with no_room_beyond(0):
        writer.write({"step": 1})
    writer.close()
    assert "1 records could not be written" in caplog.text
