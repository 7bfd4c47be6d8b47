"""Memory snapshots: at the right steps, when memory runs out, and refused where there is nothing to record."""

import pickle

import pytest
import torch

from hp_components import Profiler
from hp_protocols.errors import ConfigError
from hp_protocols.platform import get_platform

ON_CPU = get_platform().device_type() == "cpu"


class Memory:
    """A recorder without a device: it remembers what was asked of it."""

    def __init__(self):
        self.calls = []

    def start(self, max_entries):
        self.calls.append(("start", max_entries))

    def snapshot(self):
        self.calls.append("snapshot")
        return {"segments": [], "device_traces": [[{"action": "oom"}]]}

    def stop(self):
        self.calls.append("stop")


def train(folder, steps, *, after=0, error=None, memory=None, **knobs):
    config = Profiler.Config(enable_memory_snapshot=True, profile_freq=3, **knobs)
    profiler = config.build(run_folder=folder, rank=2, memory=memory or Memory())
    with profiler.active(after):
        for _ in range(steps):
            profiler.step()
        if error is not None:
            raise error
    return profiler


def names(folder):
    return sorted(str(path.relative_to(folder / "profiling/memory_snapshot")) for path in folder.rglob("*.pickle"))


def test_a_snapshot_every_profile_freq_steps_of_the_run(tmp_path):
    memory = Memory()
    profiler = train(tmp_path, 7, after=4, memory=memory, memory_snapshot_max_entries=77)
    assert names(tmp_path) == ["step_6/rank2.pickle", "step_9/rank2.pickle"]
    assert [path.parent.name for path in profiler.files] == ["step_6", "step_9"]
    assert memory.calls == [("start", 77), "snapshot", "snapshot", "stop"]
    with (tmp_path / "profiling/memory_snapshot/step_6/rank2.pickle").open("rb") as file:
        assert file.read(2) == b"\x80\x04"  # the newest protocol that the viewer reads
        file.seek(0)
        assert pickle.load(file)["segments"] == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("NPU out of memory.")])
def test_memory_that_runs_out_leaves_a_snapshot_of_the_step_that_was_under_way(tmp_path, error):
    memory = Memory()
    with pytest.raises(type(error)) as caught:
        train(tmp_path, 1, after=4, error=error, memory=memory)
    assert caught.value is error
    assert names(tmp_path) == ["step_6_exit/rank2.pickle"]
    assert memory.calls[-2:] == ["snapshot", "stop"]


def test_another_error_leaves_none_and_stops_the_recording(tmp_path):
    memory = Memory()
    with pytest.raises(ValueError, match="something else"):
        train(tmp_path, 1, error=ValueError("something else"), memory=memory)
    assert names(tmp_path) == []
    assert memory.calls[-1] == "stop"


def test_a_snapshot_that_cannot_be_written_hides_no_error(tmp_path, caplog):
    (tmp_path / "profiling").write_text("in the way")
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, 1, error=torch.OutOfMemoryError("no room"))
    assert "step_2_exit/rank2.pickle could not be written" in caplog.text


@pytest.mark.skipif(not ON_CPU, reason="needs a machine without an accelerator")
def test_the_cpu_is_refused_by_name_with_what_to_use_instead(tmp_path):
    config = Profiler.Config(enable_memory_snapshot=True)
    assert config.faults("profiler") == []  # another machine may have an accelerator
    with pytest.raises(
        ConfigError, match=r"profiler\.enable_memory_snapshot: records the allocator of an acc"
    ) as caught:
        config.build(run_folder=tmp_path)
    assert "--profiler.profile_memory" in str(caught.value)


@pytest.mark.skipif(ON_CPU, reason="needs an accelerator")
def test_the_devices_own_snapshot_names_the_tensors_that_are_alive(tmp_path):
    profiler = Profiler.Config(enable_memory_snapshot=True, profile_freq=1).build(run_folder=tmp_path)
    with profiler.active():
        kept = torch.empty(1 << 20, device=get_platform().device())
        profiler.step()
    with profiler.files[0].open("rb") as file:
        snapshot = pickle.load(file)
    sizes = [block["size"] for segment in snapshot["segments"] for block in segment["blocks"]]
    assert kept.numel() * 4 in sizes
