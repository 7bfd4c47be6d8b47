"""Knobs that do not fit together are refused before anything runs; switched off, the profiler is not there."""

import subprocess
import sys
import time

import pytest

from hp_components import Profiler
from hp_protocols.errors import ConfigError


def test_a_cycle_that_is_too_short_is_refused_with_one_that_fits(tmp_path):
    config = Profiler.Config(enable_profiling=True, profile_freq=4, profiler_warmup=3, profiler_active=2)
    (fault,) = config.faults("profiler")
    assert fault.where == "profiler.profile_freq, profiler.profiler_warmup, profiler.profiler_active"
    assert fault.allowed == "profiler_warmup + profiler_active <= profile_freq (5 <= 4)"
    assert fault.hint == "--profiler.profiler_warmup=2"
    with pytest.raises(ConfigError, match="3 steps of warm-up and 2 recorded ones do not fit"):
        config.build(run_folder=tmp_path)
    short = Profiler.Config(enable_profiling=True, profile_freq=1, profiler_warmup=0, profiler_active=2)
    assert short.faults("profiler")[0].hint == "--profiler.profile_freq=2"
    # Without traces there is no cycle: snapshots may come as often as one likes.
    assert Profiler.Config(enable_memory_snapshot=True, profile_freq=1).faults("profiler") == []


def test_every_value_that_no_run_could_have_is_told_at_once():
    config = Profiler.Config(
        profile_freq=0,
        profiler_active=0,
        profiler_warmup=-1,
        profiler_repeat=0,
        save_traces_folder="/tmp/x",
        memory_snapshot_max_entries=0,
    )
    assert {fault.where.removeprefix("profiler.") for fault in config.faults("profiler")} == {
        "profile_freq",
        "profiler_active",
        "profiler_warmup",
        "profiler_repeat",
        "save_traces_folder",
        "memory_snapshot_max_entries",
    }


def test_switched_off_it_costs_nothing_and_writes_nothing(tmp_path):
    profiler = Profiler.Config().build(run_folder=tmp_path)
    with profiler.active():
        began = time.process_time()
        for _ in range(100_000):
            profiler.step()
        assert (time.process_time() - began) / 100_000 < 2e-6
    assert profiler.files == []
    assert list(tmp_path.iterdir()) == []


def test_switched_off_it_loads_no_profiler():
    code = (
        "import sys\nfrom hp_components import Profiler\n"
        "with Profiler.Config().build(run_folder='.').active(): pass\n"
        "assert 'hp_components.profiler.traces' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
