"""ParallelDims: the degrees it accepts, and its meshes on real processes, against ranks written down by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hp_protocols.distributed import ParallelDims
from hp_protocols.errors import ConfigError
from hp_protocols.platform import get_platform
from hp_protocols.testing import run_world


def test_minus_one_takes_what_the_other_degrees_leave():
    dims = ParallelDims(dp_replicate=2, dp_shard=-1, cp=1, tp=2, pp=1, ep=1, world_size=16)
    assert dims.dp_shard == 4
    assert ParallelDims(1, -1, 1, 1, 1, 1, 1).dp_shard == 1


@pytest.mark.parametrize(
    ("degrees", "world_size", "text"),
    [
        ({"dp_shard": 2, "tp": 3}, 8, r"dp_shard 2 × cp 1 × tp 3 = 6, but the world has 8 processes"),
        ({"dp_shard": -1, "tp": 3}, 8, r"dp_shard 2 × cp 1 × tp 3 = 6, but the world has 8 processes"),
        ({"dp_shard": -1, "tp": 16}, 8, r"dp_shard 1 × cp 1 × tp 16 = 16, but the world has 8 processes"),
        ({"dp_shard": 2, "ep": 4}, 2, r"parallelism.ep: 4 does not divide dp_shard 2 × cp 1 × tp 1 = 2"),
    ],
)
def test_degrees_that_do_not_fit_show_the_product_and_the_world(degrees, world_size, text):
    with pytest.raises(ConfigError, match=text):
        ParallelDims(**degrees, world_size=world_size)


def test_every_degree_that_is_not_positive_is_named_at_once():
    with pytest.raises(ValueError, match="not positive") as caught:
        ParallelDims(dp_replicate=0, dp_shard=-2, cp=1, tp=-1, pp=1, ep=1, world_size=8)
    assert [fault.where for fault in caught.value.faults] == [
        "parallelism.dp_replicate",
        "parallelism.dp_shard",
        "parallelism.tp",
    ]


def test_what_is_enabled_follows_from_the_degrees():
    dims = ParallelDims(dp_replicate=2, dp_shard=1, cp=2, tp=2, pp=1, ep=1, world_size=8)
    assert dims.dp_enabled
    assert dims.dp_replicate_enabled
    assert not dims.dp_shard_enabled
    assert dims.fsdp_enabled
    assert dims.cp_enabled
    assert dims.dp_cp_enabled
    assert dims.tp_enabled
    assert not dims.pp_enabled
    assert not dims.ep_enabled
    assert (dims.fsdp, dims.batch, dims.loss, dims.efsdp) == (2, 2, 4, 4)
    assert dims.non_data_parallel_size == 4
    assert dims.seq_len_divisor == 4
    assert not ParallelDims(dp_replicate=4, dp_shard=1, world_size=4).fsdp_enabled


def test_degrees_come_from_the_trainers_section():
    class Section:
        data_parallel_replicate_degree = 2
        data_parallel_shard_degree = -1
        context_parallel_degree = 1
        tensor_parallel_degree = 2
        pipeline_parallel_degree = 1
        expert_parallel_degree = 1

    assert ParallelDims.from_config(Section(), 8) == ParallelDims(2, 2, 1, 2, 1, 1, 8)


def test_the_degrees_cannot_be_changed_after_the_check():
    dims = ParallelDims(world_size=4)
    with pytest.raises(AttributeError):
        dims.tp = 2


def test_meshes_need_a_process_group():
    with pytest.raises(RuntimeError, match=r"init_process_group\(\) first"):
        ParallelDims(world_size=1).get_mesh("fsdp")


def test_one_process_has_an_fsdp_mesh_and_nothing_else():
    platform = get_platform()
    platform.init_process_group(device="cpu")
    try:
        dims = ParallelDims(world_size=1)
        assert dims.get_mesh("fsdp").size() == 1
        assert dims.world_mesh.mesh.tolist() == [0]
        for name in ("dp_replicate", "tp", "batch", "loss", "ep", "efsdp"):
            assert dims.get_optional_mesh(name) is None
        assert dims.get_all_one_dimensional_meshes() == {}
        with pytest.raises(ValueError, match=r"there is no mesh \['fsdp', 'tp'\]: tp \(degree 1\) is off"):
            dims.get_mesh(["fsdp", "tp"])
        with pytest.raises(ValueError, match="no mesh axis dp; there are: pp, dp_replicate"):
            dims.get_mesh("dp")
        with pytest.raises(ValueError, match="cannot stand in one mesh"):
            dims.get_optional_mesh(["tp", "fsdp"])
        with pytest.raises(ValueError, match="cannot stand in one mesh"):
            dims.get_optional_mesh(["batch", "tp"])
        with pytest.raises(ValueError, match="ParallelDims is for 2 processes, here are 1"):
            ParallelDims(world_size=2).get_mesh("fsdp")
    finally:
        platform.destroy_process_group()


def collect_meshes(rank, world_size, degrees, combinations):
    """Each axis' ranks around this rank; each combination's ranks; and the sum of ranks over each axis' group."""
    dims = ParallelDims(**degrees, world_size=world_size)
    axes = dims.get_all_one_dimensional_meshes()
    for name, mesh in axes.items():
        assert mesh.mesh_dim_names == (name,)
        total = torch.tensor(float(rank))
        dist.all_reduce(total, group=mesh.get_group())
        assert total.item() == sum(mesh.mesh.tolist())
        assert dims.get_mesh(name) is mesh
    stacked = {}
    for names in combinations:
        mesh = dims.get_mesh(names)
        assert mesh.mesh_dim_names == tuple(names)
        assert mesh is dims.get_optional_mesh(tuple(names))
        # No new process groups for a combination.
        for name in names:
            assert mesh.get_group(name).group_name == axes[name].get_group().group_name
        stacked[tuple(names)] = mesh.mesh.tolist()
    return {name: mesh.mesh.tolist() for name, mesh in axes.items()}, stacked


@pytest.mark.parametrize(
    ("world_size", "degrees", "rank", "axes", "stacked"),
    [
        (2, {}, 1, {"fsdp": [0, 1], "batch": [0, 1], "loss": [0, 1]}, {}),
        (
            4,
            {"dp_replicate": 4, "dp_shard": 1},
            2,
            {"dp_replicate": [0, 1, 2, 3], "batch": [0, 1, 2, 3], "loss": [0, 1, 2, 3]},
            {},
        ),
        (
            8,
            {"dp_replicate": 2},
            5,
            {
                "dp_replicate": [1, 5],
                "fsdp": [4, 5, 6, 7],
                "batch": [0, 1, 2, 3, 4, 5, 6, 7],
                "loss": [0, 1, 2, 3, 4, 5, 6, 7],
            },
            {("dp_replicate", "fsdp"): [[0, 1, 2, 3], [4, 5, 6, 7]]},
        ),
        (
            8,
            {"tp": 2},
            5,
            {"fsdp": [1, 3, 5, 7], "tp": [4, 5], "batch": [1, 3, 5, 7], "loss": [1, 3, 5, 7]},
            {("fsdp", "tp"): [[0, 1], [2, 3], [4, 5], [6, 7]]},
        ),
        (
            8,
            {"cp": 2, "tp": 2, "ep": 4},
            6,
            {
                "fsdp": [0, 2, 4, 6],
                "cp": [4, 6],
                "tp": [6, 7],
                "batch": [2, 6],
                "loss": [0, 2, 4, 6],
                "ep": [4, 5, 6, 7],
                "efsdp": [2, 6],
            },
            {("cp", "tp"): [[4, 5], [6, 7]], ("efsdp", "ep"): [[0, 1, 2, 3], [4, 5, 6, 7]]},
        ),
        (
            8,
            {"pp": 2, "dp_replicate": 2, "dp_shard": 1, "cp": 2},
            3,
            {
                "pp": [3, 7],
                "dp_replicate": [1, 3],
                "fsdp": [2, 3],
                "cp": [2, 3],
                "batch": [1, 3],
                "loss": [0, 1, 2, 3],
            },
            {("pp", "dp_replicate", "fsdp"): [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]},
        ),
    ],
)
def test_meshes_hold_the_ranks_that_the_layout_says(world_size, degrees, rank, axes, stacked):
    results = run_world(collect_meshes, world_size, degrees, list(stacked))
    assert results[rank] == (axes, stacked)


def collect_expert_meshes(rank, world_size):
    dims = ParallelDims(ep=2, world_size=world_size)
    # efsdp stays although one rank is left for it: experts get their dtypes there.
    assert dims.get_mesh("efsdp").size() == 1
    return dims.get_mesh(["efsdp", "ep"]).mesh.tolist()


def test_efsdp_is_there_whenever_ep_is():
    assert run_world(collect_expert_meshes, 2) == [[[0, 1]], [[0, 1]]]
