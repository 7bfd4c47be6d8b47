"""apply_cp and SequenceAxis on real processes: cut, gathered, summed; and what is refused, with its name."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from hp_protocols import LocalMapConfig, MeshAxisName, Module, ShardingConfig
from hp_protocols.distributed import SequenceAxis, apply_cp
from hp_protocols.testing import run_world

CP, TP = MeshAxisName.CP, MeshAxisName.TP


class Look(Module):
    """softmax(q kᵀ + bias) v over the sequence; q [B, S, E], the optional bias [S, S] by query and key."""

    def forward(self, q, k, v, bias=None):
        score = q @ k.transpose(1, 2)
        return (score if bias is None else score + bias).softmax(-1) @ v


class Place(Module):
    """Adds to each token its place in the row."""

    def forward(self, x, places):
        return x + places.unsqueeze(-1)


class PlaceOfStretch(Place):
    sequence_axis: SequenceAxis

    def forward(self, x, places):
        return super().forward(x, self.sequence_axis.cut(places, 1))


class Model(Module):
    """Takes whole rows; `cut` stands where a decoder has its embedding."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        look: ShardingConfig | None = None
        cut: ShardingConfig | None = None

    def __init__(self, config):
        super().__init__()
        self.cut = Cut.Config(sharding_config=config.cut).build()
        self.place = Place.Config().build()
        self.look = Look.Config(sharding_config=config.look).build()

    def forward(self, x, bias=None):
        places = torch.arange(x.shape[1], dtype=x.dtype).expand(x.shape[:2])
        x = self.place(self.cut(x), places)
        return self.look(x, x.sin(), x.cos(), bias)


class Cut(Module):
    def forward(self, x):
        return x.clone()


def declared(**changes):
    part, whole, summed = {CP: Shard(1), TP: Replicate()}, {CP: Replicate()}, {CP: Partial()}
    look = ShardingConfig(
        in_src_shardings={"q": part, "k": part, "v": part, "bias": whole},
        in_dst_shardings={"q": part, "k": whole, "v": whole, "bias": {CP: Shard(0)}},
        out_src_shardings=part,
        local_map=LocalMapConfig(in_grad_placements=(part, summed, summed)),
    )
    cut = ShardingConfig(in_src_shardings={"x": whole}, in_dst_shardings={"x": part})
    return {"look": look, "cut": cut, **changes}


def rows():
    return torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def cp_mesh(world_size):
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))


def computed(rank, world_size):
    mesh = cp_mesh(world_size)
    bias = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = Model.Config(**declared()).build()
    names = list(model.state_dict())
    assert apply_cp(model, mesh=mesh, across={Place: PlaceOfStretch}) is model
    assert list(model.state_dict()) == names
    # The gather of its own values is exercised where a gradient flows: through a scale that every rank has.
    scale = torch.full((), 0.5, dtype=torch.float64, requires_grad=True)
    model.look.register_forward_pre_hook(
        lambda _, inputs: (inputs[0], inputs[1] * scale, inputs[2] * scale, *inputs[3:])
    )
    found = []
    for given in (None, bias):
        out = copy.deepcopy(model)(rows(), given)
        (gradient,) = torch.autograd.grad(out.square().sum(), scale)
        found.append((out.detach(), gradient))
    return found


def test_stretches_are_cut_gathered_and_their_gradients_summed():
    model = Model.Config().build()
    bias = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = run_world(computed, 3)
    for index, given in enumerate((None, bias)):
        scale = torch.full((), 0.5, dtype=torch.float64, requires_grad=True)
        x = model.place(rows(), torch.arange(6.0).expand(2, 6))
        expected = model.look(x, x.sin() * scale, x.cos() * scale, given)
        (gradient,) = torch.autograd.grad(expected.square().sum(), scale)
        torch.testing.assert_close(torch.cat([r[index][0] for r in results], dim=1), expected.detach())
        torch.testing.assert_close(sum(r[index][1] for r in results), gradient)


def axis_values(rank, world_size):
    axis = SequenceAxis(cp_mesh(world_size))
    assert copy.deepcopy(axis) is axis
    value = torch.full((2,), float(rank + 1), requires_grad=True)
    each = axis.gather_each(value)
    # Each rank weighs what it got otherwise; a value's gradient is the sum of the weights.
    (each.sum() * (rank + 1)).backward()
    try:
        axis.bounds(5)
    except ValueError as error:
        text = str(error)
    return (
        axis.rank,
        axis.size,
        axis.bounds(6),
        axis.cut(torch.arange(6), 0).tolist(),
        each.tolist(),
        value.grad.tolist(),
        text,
    )


def test_an_axis_knows_its_stretches_and_sums_gradients_of_what_it_gathered():
    for rank, found in enumerate(run_world(axis_values, 3)):
        assert found[:4] == (rank, 3, (2 * rank, 2 * rank + 2), [2 * rank, 2 * rank + 1])
        assert found[4] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
        assert found[5] == [6.0, 6.0]
        assert "5 tokens cannot be cut into 3 equal stretches" in found[6]


@pytest.fixture(scope="module")
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield cp_mesh(1)
    torch.distributed.destroy_process_group()


def model_with(**changes):
    return Model.Config(**declared(**changes)).build()


def test_a_gathered_input_without_a_partial_gradient_is_refused(mesh):
    for local_map in (None, LocalMapConfig(), LocalMapConfig(in_grad_placements=(None, {CP: Replicate()}))):
        look = declared()["look"]
        look.local_map = local_map
        with pytest.raises(ValueError, match=r"look: input 'k' is gathered .* declare it as Partial"):
            apply_cp(model_with(look=look), mesh=mesh)


def test_a_layout_that_is_neither_cut_nor_gathered_is_refused(mesh):
    cut = ShardingConfig(in_src_shardings={"x": {CP: Shard(0)}}, in_dst_shardings={"x": {CP: Shard(1)}})
    with pytest.raises(ValueError, match=r"cut: input 'x' cannot go from S\(0\) to S\(1\)"):
        apply_cp(model_with(cut=cut), mesh=mesh)
    cut = ShardingConfig(in_src_shardings={"x": {TP: Replicate()}}, in_dst_shardings={"x": {TP: Replicate()}})
    with pytest.raises(ValueError, match=r"cut: input 'x': no placement is declared for mesh axis 'cp'"):
        apply_cp(model_with(cut=cut), mesh=mesh)


def test_a_model_is_cut_once_and_before_it_is_parallelized(mesh):
    model = model_with()
    apply_cp(model, mesh=mesh)
    with pytest.raises(ValueError, match="cut: was laid out before; apply_cp comes once, before parallelize"):
        apply_cp(model, mesh=mesh)


def test_a_model_that_declares_nothing_is_refused(mesh):
    with pytest.raises(ValueError, match=r"no layer of Model declares .* on the axis 'cp'"):
        apply_cp(Model.Config().build(), mesh=mesh)


def test_a_variant_stands_in_for_its_own_class_only(mesh):
    model = model_with()
    model.place.__class__ = type("Other", (Place,), {})
    with pytest.raises(ValueError, match="place: PlaceOfStretch stands in for Place itself, not for Other"):
        apply_cp(model, mesh=mesh, across={Place: PlaceOfStretch})
    with pytest.raises(ValueError, match="place: Look stands in for Place"):
        apply_cp(model_with(), mesh=mesh, across={Place: Look})


def test_what_cannot_be_exchanged_is_refused_when_it_comes(mesh):
    model = apply_cp(model_with(), mesh=mesh)
    with pytest.raises(ValueError, match=r"look: input 'bias' is a float, .* pass a tensor"):
        model(rows(), 1.0)
    with pytest.raises(ValueError, match="requires a gradient cannot be cut"):
        model(rows().requires_grad_())
