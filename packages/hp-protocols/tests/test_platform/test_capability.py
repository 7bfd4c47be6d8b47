"""A backend refuses by name what it does not offer; nothing falls through to an AttributeError or to silence."""

from __future__ import annotations

import inspect
import pickle

import pytest

from hp_protocols.distributed import (
    apply_ac,
    apply_compile,
    apply_fsdp,
    apply_replicate,
    clip_grad_norm_,
    lay_out_gradients,
)
from hp_protocols.platform import Capability, CapabilityError, Platform, get_platform, selection
from hp_protocols.platform.mindspore_backend import MindsporePlatform

# What a platform answers without any capability.
_ALWAYS = {"require"}


def members(cls):
    return [name for name, value in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")]


def test_mindspore_refuses_every_member_that_it_does_not_offer_by_name():
    platform = MindsporePlatform()
    for name in set(members(Platform)) - _ALWAYS:
        method = getattr(platform, name)
        required = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
        values = {p.name: None for p in required}
        with pytest.raises(CapabilityError, match=f"platform 'mindspore' does not offer '{name}'") as caught:
            method(**values)
        assert caught.value.capability not in platform.capabilities
        assert caught.value.feature == name
    for name in ("Module", "nn", "F", "ops", "init", "Shard", "DeviceMesh", "local_map"):
        with pytest.raises(CapabilityError, match=f"'{name}'.*HYPER_PARALLEL_PLATFORM=torch"):
            getattr(platform, name)
    with pytest.raises(AttributeError, match="no attribute 'Modul'"):
        platform.Modul  # noqa: B018


def test_torch_offers_every_member_of_a_platform():
    torch_platform = type(get_platform())
    for name in set(members(Platform)) - _ALWAYS:
        ours, theirs = getattr(Platform, name), getattr(torch_platform, name)
        assert theirs is not ours, name
        assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters), name


def test_parallelism_asks_for_its_capability_before_it_touches_a_model(monkeypatch):
    monkeypatch.setattr(selection, "_platform", MindsporePlatform())
    calls = [
        lambda: apply_fsdp(None, mesh=None, units=[]),
        lambda: apply_replicate(None, mesh=None, units=[]),
        lambda: apply_ac(None, blocks=[], mode="full"),
        lambda: apply_ac(None, blocks=[], mode="memory_budget", compile_enabled=True),
        lambda: apply_compile(blocks=[]),
        lambda: clip_grad_norm_([], 1.0),
        lambda: lay_out_gradients([]),
    ]
    for call in calls:
        with pytest.raises(CapabilityError, match="platform 'mindspore' does not offer"):
            call()


def test_a_capability_error_says_what_was_asked_of_whom_and_survives_pickling():
    with pytest.raises(CapabilityError) as caught:
        MindsporePlatform().require(Capability.FSDP, "apply_fsdp")
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.feature, error.capability, error.backend) == ("apply_fsdp", Capability.FSDP, "mindspore")
        assert str(error).startswith("platform 'mindspore' does not offer 'apply_fsdp' (capability 'fsdp')")
