"""run_world: real processes, results by rank, and failures that say what every rank did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from hp_protocols.testing import WorldError, WorldTimeout, run_world


def report(rank, world_size, factor):
    print(f"rank {rank} speaks")
    total = torch.tensor(float(rank)) * factor
    dist.all_reduce(total)
    return {
        "rank": rank,
        "world": (dist.get_world_size(), world_size),
        "total": total,
        "threads": torch.get_num_threads(),
        "variables": {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MINE", "YOURS")},
        "pid": os.getpid(),
        "parent": os.getppid(),
    }


def test_results_come_back_by_rank_from_single_threaded_processes_of_one_server(capsys, monkeypatch):
    monkeypatch.setenv("MINE", "1")
    monkeypatch.delenv("RANK", raising=False)
    results = run_world(report, 3, 2.0, env={"YOURS": "2"})
    for rank, result in enumerate(results):
        assert result["rank"] == rank
        assert result["world"] == (3, 3)
        assert torch.equal(result["total"], torch.tensor(6.0))
        assert result["threads"] == 1
        assert result["variables"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": str(rank),
            "MINE": "1",
            "YOURS": "2",
        }
    assert "RANK" not in os.environ
    assert "YOURS" not in os.environ
    assert len({result["pid"] for result in results}) == 3
    assert capsys.readouterr().out == "".join(f"[rank {rank}] rank {rank} speaks\n" for rank in range(3))
    (again,) = run_world(report, 1, 1.0)
    assert {again["parent"]} == {result["parent"] for result in results}


def fail_on_one(rank, world_size):
    dist.barrier()  # both are connected, so each hears when the other is gone
    if rank == 1:
        raise KeyError("only here")
    dist.barrier()


def test_a_failure_shows_every_ranks_traceback():
    with pytest.raises(WorldError) as caught:
        run_world(fail_on_one, 2)
    text = str(caught.value)
    assert "KeyError: 'only here'" in text
    assert "rank 0 failed" in text
    assert "dist.barrier()" in text
    assert not isinstance(caught.value, WorldTimeout)


def fail_while_the_other_sleeps(rank, world_size):
    if rank == 1:
        raise KeyError("only here")
    time.sleep(1000)


def test_a_rank_that_outlives_a_failed_one_is_shown_where_it_stands_and_ended():
    start = time.monotonic()
    with pytest.raises(WorldError, match="only here") as caught:
        run_world(fail_while_the_other_sleeps, 2, timeout=200)
    assert time.monotonic() - start < 150
    assert "rank 0: still running" in str(caught.value)
    assert "in fail_while_the_other_sleeps" in str(caught.value)


def hang(rank, world_size, folder):
    (folder / str(rank)).write_text(str(os.getpid()))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (folder / f"child{rank}").write_text(str(child.pid))
    if rank == 0:
        dist.barrier()
    time.sleep(1000)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # A zombie of an ended process waits for whoever takes orphans.
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks into /proc")
def test_a_hang_shows_every_ranks_stack_and_leaves_no_process_behind(tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        for timeout in (8, 40):  # eight seconds are enough to get there, but not on every busy machine
            folder = tmp_path / str(timeout)
            folder.mkdir()
            told = rf"of 2 ranks, \[0, 1\] were still running after {timeout} s"
            with pytest.raises(WorldTimeout, match=told) as caught:
                run_world(hang, 2, folder, timeout=timeout)
            if len(list(folder.iterdir())) == 4:
                break
        text = str(caught.value)
        for rank, line in ((0, "barrier"), (1, "in hang")):
            assert any(line in entry for entry in text.splitlines() if entry.startswith(f"[rank {rank}]")), text
        pids = [int(path.read_text()) for path in folder.iterdir()]
        assert len(pids) == 4
        deadline = time.monotonic() + 30
        while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(is_running(pid) for pid in pids)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def die(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def test_a_rank_that_crashes_is_reported_with_its_signal_and_stack():
    with pytest.raises(WorldError, match="died without a report") as caught:
        run_world(die, 2)
    assert "SIGSEGV" in str(caught.value)
    assert any(line.startswith("[rank 1]") and "in die" in line for line in str(caught.value).splitlines())


def return_a_lambda(rank, world_size):
    return lambda: None


def test_what_cannot_travel_between_processes_is_an_error_and_not_a_hang():
    with pytest.raises(WorldError, match="pickle"):
        run_world(return_a_lambda, 1)

    def local(rank, world_size):
        return None

    for fn in (local, lambda rank, world_size: None):
        with pytest.raises(ValueError, match="defined at module level"):
            run_world(fn, 1)
    with pytest.raises(ValueError, match="at least 1"):
        run_world(report, 0)


def load_with_workers(rank, world_size):
    data = torch.arange(8)
    return [batch.tolist() for batch in torch.utils.data.DataLoader(data, batch_size=4, num_workers=1)]


def test_a_rank_may_have_worker_processes_of_its_own():
    assert run_world(load_with_workers, 1) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def start_by_itself(rank, world_size):
    from hp_protocols.platform import get_platform

    assert not dist.is_initialized()
    get_platform().init_process_group()
    return get_platform().all_gather_object(rank)


def test_a_function_may_start_the_process_group_itself():
    assert run_world(start_by_itself, 2, init_process_group=False) == [[0, 1], [0, 1]]


def test_a_script_can_use_it_too(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "from hp_protocols.testing import run_world\n"
        "def double(rank, world_size): return 2 * rank\n"
        "if __name__ == '__main__': print(run_world(double, 2))\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert result.stdout.strip() == "[0, 2]", result.stderr
