"""Saves that run out of room for real: a small mounted disk, and a limit on file sizes on one rank of two."""

import contextlib
import errno
import logging
import resource
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hp_components import CheckpointError, CheckpointManager
from hp_components.checkpoint import list_checkpoints
from hp_protocols.testing import run_world


def manager(folder, model, mode="disabled"):
    return CheckpointManager.Config(interval=1, async_mode=mode).build(run_folder=folder, model_parts=[model])


def entries(folder):
    return sorted(path.name for path in (Path(folder) / "checkpoint").iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
        mounted = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(path):
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_costs_one_save_and_nothing_else(small_disk, caplog, mode):
    model = nn.Linear(200, 200)  # 160 kB
    saver = manager(small_disk, model, mode)
    assert saver.save(1, force=True)
    kept = model.weight.detach().clone()
    filler = small_disk / "filler"
    fill(filler)
    filler.write_bytes(bytes(filler.stat().st_size - 8192))  # room for a folder, not for the data
    nn.init.zeros_(model.weight)
    with caplog.at_level(logging.ERROR):
        assert saver.save(2) is (mode == "async")  # on its way, or told at once
        saver.close()
    assert "No space left on device" in caplog.text
    assert "the newest checkpoint is still step-1" in caplog.text
    with pytest.raises(CheckpointError, match="No space left on device"):
        saver.save(2, force=True)
    assert entries(small_disk) == ["step-1"]
    assert manager(small_disk, model).load() == 1
    assert torch.equal(model.weight, kept)
    filler.unlink()
    assert saver.save(3, force=True) is True


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_folder_that_became_read_only_costs_saves_and_no_training(small_disk, caplog, mode):
    model = nn.Linear(20, 20)
    saver = manager(small_disk, model, mode)
    assert saver.save(1, force=True)
    if subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=False).returncode:
        pytest.skip("cannot make a disk read-only here")
    with caplog.at_level(logging.ERROR):
        assert saver.save(2) is False  # no folder can be made, so nothing goes to the background
    assert "Read-only file system" in caplog.text
    assert "the newest checkpoint is still step-1" in caplog.text
    with pytest.raises(CheckpointError, match="Read-only file system"):
        saver.save(2, force=True)
    assert manager(small_disk, model).load() == 1
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert saver.save(3, force=True) is True


def save_with_a_limit(rank, world_size, folder, bad_rank):
    """Save on all ranks while one of them may not write; what this rank saw, and what was left."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",)))
    saver = manager(folder, model)
    seen = [saver.save(1)]
    free = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == bad_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, free[1]))
    seen.append(saver.save(2))
    with pytest.raises(CheckpointError) as caught:
        saver.save(2, force=True)
    left = entries(folder)
    dist.barrier()  # rank 0 begins the next save by making a folder
    resource.setrlimit(resource.RLIMIT_FSIZE, free)
    seen.append(saver.save(3))
    return seen, str(caught.value), left


class Broken:
    def state_dict(self):
        raise ValueError("lost my place")

    def load_state_dict(self, state_dict):
        pass


def save_a_broken_state(folder):
    config = CheckpointManager.Config(interval=1)
    saver = config.build(run_folder=folder, model_parts=[nn.Linear(4, 4)], states={"data": Broken()})
    with pytest.raises(CheckpointError) as caught:
        saver.save(1, force=True)
    return str(caught.value)


def on_two_ranks(rank, world_size, folder):
    limited = [save_with_a_limit(rank, world_size, folder / str(bad_rank), bad_rank) for bad_rank in (0, 1)]
    return limited, save_a_broken_state(folder / "broken")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two(folder):
    return run_world(on_two_ranks, 2, folder)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_rank_that_cannot_write_fails_the_save_on_every_rank_alike(two, folder, bad_rank):
    (seen, reason, left), other = (limited[bad_rank] for limited, _ in two)
    assert other == (seen, reason, left)
    assert seen == [True, False, True]
    assert f"rank {bad_rank}: OSError: [Errno {errno.EFBIG}] File too large" in reason
    assert left == ["step-1"]
    assert [info.step for info in list_checkpoints(folder / str(bad_rank) / "checkpoint")] == [1, 3]


def test_a_state_that_fails_on_rank_zero_fails_the_save_on_every_rank(two, folder):
    for _, reason in two:
        assert reason == "cannot collect the state: rank 0: ValueError: lost my place"
    assert entries(folder / "broken") == []
