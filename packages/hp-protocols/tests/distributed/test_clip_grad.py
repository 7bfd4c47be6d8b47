"""clip_grad_norm_ on plain, sharded and mixed gradients, against torch on the gathered ones."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hp_protocols.distributed import ParallelDims, apply_fsdp, clip_grad_norm_
from hp_protocols.platform import get_platform
from hp_protocols.testing import run_world


def parameters(shapes, seed=3):
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_plain_gradients_get_torchs_own_bits(max_norm, foreach):
    ours, torchs = parameters([(5, 3), (7,), ()]), parameters([(5, 3), (7,), ()])
    norm = clip_grad_norm_((p for p in ours), max_norm, foreach=foreach)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(torchs, max_norm, foreach=foreach))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, torchs, strict=True))
    assert type(norm) is torch.Tensor
    assert norm.ndim == 0


def test_parameters_without_gradients_do_not_count():
    some = parameters([(5, 3), (7,)])
    some[0].grad = None
    assert torch.equal(clip_grad_norm_(some, 1e9), some[1].grad.norm())
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0
    assert clip_grad_norm_([], 1.0) == 0


def test_a_norm_that_is_not_finite_raises_before_anything_is_scaled():
    broken = parameters([(5, 3), (7,)])
    broken[1].grad[2] = math.nan
    before = broken[0].grad.clone()
    with pytest.raises(RuntimeError, match="the global gradient norm is nan"):
        clip_grad_norm_(broken, 0.1, error_if_nonfinite=True)
    assert torch.equal(broken[0].grad, before)
    assert clip_grad_norm_(broken, 0.1).isnan()


def test_the_platform_offers_the_same_function():
    ours, other = parameters([(5, 3)]), parameters([(5, 3)])
    assert torch.equal(get_platform().clip_grad_norm_(ours, 0.5), clip_grad_norm_(other, 0.5))


def check_fsdp(rank, world_size):
    """FSDP2's own bits, and torch's norm on the gathered model to 1e-6; 7 rows are uneven over 4 ranks."""
    mesh = ParallelDims(world_size=world_size).get_mesh("fsdp")

    def gradients():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        apply_fsdp(model, mesh=mesh, units=[model[0]])
        model(torch.linspace(-1, 1, 10).view(2, 5) + rank).square().sum().backward()
        return list(model.parameters())

    ours, torchs = gradients(), gradients()
    full = [p.grad.full_tensor() for p in ours]
    norm = clip_grad_norm_(ours, 0.5)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(torchs, 0.5).full_tensor())
    assert all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in zip(ours, torchs, strict=True))

    gathered = [nn.Parameter(torch.zeros_like(g)) for g in full]
    for parameter, grad in zip(gathered, full, strict=True):
        parameter.grad = grad.clone()
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(gathered, 0.5), rtol=1e-6, atol=0)
    for a, b in zip(ours, gathered, strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-6, atol=1e-7)
    return norm


def check_mixed_meshes(rank, world_size, max_norm):
    """Gradients sharded over fsdp × tp, over fsdp only, over tp with a pending sum, and plain ones, in one call."""
    dims = ParallelDims(tp=2, world_size=world_size)
    fsdp, tp, both = dims.get_mesh("fsdp"), dims.get_mesh("tp"), dims.get_mesh(["fsdp", "tp"])
    plain = parameters([(7, 6), (5, 4), (3, 2), (4,), (2, 2)])
    layouts = [
        (both, [Shard(0), Shard(1)]),
        (fsdp, [Shard(0)]),
        (tp, [Replicate()]),
        None,
        (tp, [Partial()]),
    ]
    mixed = []
    for parameter, layout in zip(plain, layouts, strict=True):
        value, grad = parameter.detach().clone(), parameter.grad.clone()
        if layout is not None:
            mesh, placements = layout
            pending = placements == [Partial()]
            value = distribute_tensor(value, mesh, [Replicate()] if pending else placements)
            share = grad * (0.75 if mesh.get_local_rank() == 0 else 0.25) if pending else grad
            grad = DTensor.from_local(share, mesh, placements) if pending else distribute_tensor(grad, mesh, placements)
        mixed.append(nn.Parameter(value))
        mixed[-1].grad = grad
    norm = clip_grad_norm_(mixed, max_norm)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain, max_norm), rtol=1e-6, atol=0)
    for ours, theirs in zip(mixed, plain, strict=True):
        grad = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        torch.testing.assert_close(grad, theirs.grad, rtol=1e-6, atol=1e-7)
        if isinstance(ours, DTensor):
            assert ours.grad.placements == ours.placements, "a gradient is laid out as its parameter"
    assert type(norm) is torch.Tensor
    return norm


def check_four(rank, world_size):
    said = []
    handler = logging.Handler()
    handler.emit = said.append
    logging.getLogger("torch.distributed.tensor._redistribute").addHandler(handler)
    norms = clip_on_four(rank, world_size)
    assert not said, "torch's advice on meshes is not for the user"
    return norms


def clip_on_four(rank, world_size):
    return [
        check_fsdp(rank, world_size),
        check_mixed_meshes(rank, world_size, 0.5),
        check_mixed_meshes(rank, world_size, 1e9),
    ]


def test_sharded_gradients_are_clipped_by_the_true_global_norm_which_every_rank_knows():
    first, *others = run_world(check_four, 4)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
