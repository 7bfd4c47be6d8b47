"""A torch that has moved a private API is named, with the API, where it is used."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh

from hp_protocols.distributed import ParallelDims, apply_ac, apply_replicate
from hp_protocols.platform import get_platform


@pytest.fixture
def one_rank():
    platform = get_platform()
    platform.init_process_group(device="cpu")
    yield ParallelDims(world_size=1)
    platform.destroy_process_group()


def test_a_private_function_that_is_gone_is_an_import_error_with_torchs_version(one_rank, monkeypatch):
    mesh = one_rank.get_mesh("fsdp")
    monkeypatch.delattr(replicate_with_fsdp, "replicate")
    text = rf"torch {torch.__version__} has no torch\.distributed\._composable\.replicate_with_fsdp\.replicate"
    with pytest.raises(ImportError, match=text.replace("+", r"\+")):
        apply_replicate(nn.Linear(1, 1), mesh=mesh, units=[])


def test_a_private_module_that_is_gone_is_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", None)
    with pytest.raises(ImportError, match=r"has no torch\.distributed\.algorithms\._checkpoint\.checkpoint_wrapper"):
        apply_ac(model := nn.Sequential(nn.Linear(1, 1)), blocks=[model[0]], mode="full")


def test_a_private_method_that_is_gone_is_too(one_rank, monkeypatch):
    monkeypatch.delattr(DeviceMesh, "_unflatten")
    with pytest.raises(ImportError, match=r"has no DeviceMesh\._unflatten, which hp-protocols needs"):
        one_rank.get_mesh("fsdp")


def test_an_operator_that_is_gone_is_too(monkeypatch):
    from hp_protocols.platform.torch_backend import _torch_compat

    _torch_compat.costly_ops.cache_clear()
    monkeypatch.setattr(_torch_compat, "_COSTLY", [("aten", "no_such_operator", True)])
    with pytest.raises(ImportError, match=r"has no torch\.ops\.aten\.no_such_operator"):
        _torch_compat.costly_ops()
    monkeypatch.setattr(_torch_compat, "_COSTLY", [("npu", "no_such_operator", False)])
    assert _torch_compat.costly_ops() == frozenset()
    _torch_compat.costly_ops.cache_clear()
