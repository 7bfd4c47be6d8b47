"""Memory on a device that is stood in for: nothing here has one."""

from __future__ import annotations

import pytest

from hp_components.metrics.memory import host_memory_gib, reset_device_peak, take_device_memory_gib
from hp_protocols.platform import get_platform

PEAK = {"gib": 0.0}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds one GiB all the time."""
    platform = type(get_platform())
    monkeypatch.setattr(platform, "max_memory", lambda self: int(PEAK["gib"] * 2**30))
    monkeypatch.setattr(platform, "reset_max_memory", lambda self: PEAK.update(gib=1.0))


def test_the_peak_of_the_device_is_that_since_it_was_last_taken_whoever_has_reset_it_meanwhile(device: None) -> None:
    PEAK["gib"] = 5.0
    assert take_device_memory_gib() == 5.0
    assert take_device_memory_gib() == 1.0
    for needed in (3.0, 7.0, 2.0):
        PEAK["gib"] = needed
        assert reset_device_peak()
        assert PEAK["gib"] == 1.0
    assert take_device_memory_gib() == 7.0
    assert take_device_memory_gib() == 1.0


def test_the_cpu_has_no_peak_to_reset_and_a_process_has_a_size() -> None:
    assert not reset_device_peak()
    assert take_device_memory_gib() is None
    assert host_memory_gib() > 0.01
