"""The vocabulary of meshes and placements, and their order on a mesh."""

from __future__ import annotations

import pytest

from hp_protocols.platform import Partial, Replicate, Shard
from hp_protocols.sharding import ShardingConfig, resolve_placements
from hp_protocols.types import MeshAxisName, Placement

TP, FSDP, CP = MeshAxisName.TP, MeshAxisName.FSDP, MeshAxisName.CP


def test_axis_names_are_the_names_in_the_mesh() -> None:
    assert [str(axis) for axis in MeshAxisName] == [
        "dp",
        "dp_replicate",
        "dp_shard",
        "fsdp",
        "tp",
        "cp",
        "pp",
        "ep",
        "efsdp",
    ]
    assert MeshAxisName.FSDP == "fsdp"
    assert f"{MeshAxisName.TP}" == "tp"


def test_placements_come_in_the_order_of_the_mesh_axes() -> None:
    named = {TP: Shard(1), FSDP: Shard(0)}
    assert resolve_placements(named, ("fsdp", "tp")) == (Shard(0), Shard(1))
    assert resolve_placements(named, ("tp", "fsdp")) == (Shard(1), Shard(0))


def test_axes_that_the_mesh_lacks_are_ignored() -> None:
    assert resolve_placements({TP: Shard(0), CP: Replicate(), FSDP: Partial()}, ("tp",)) == (Shard(0),)


def test_a_mesh_axis_without_declared_placement_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"mesh axis 'fsdp', 'cp'; declared: tp; the mesh has: fsdp, tp, cp"):
        resolve_placements({TP: Shard(0)}, ("fsdp", "tp", "cp"))


@pytest.mark.parametrize("key", ["tensor", 0, None])
def test_a_key_that_is_no_axis_name_is_refused(key: object) -> None:
    with pytest.raises(ValueError, match=r"is no MeshAxisName; allowed: dp, dp_replicate"):
        resolve_placements({TP: Shard(0), key: Shard(0)}, ("tp",))  # type: ignore[dict-item]


@pytest.mark.parametrize("names", [None, ()])
def test_an_unnamed_mesh_is_refused(names: tuple[str, ...] | None) -> None:
    with pytest.raises(ValueError, match="mesh has no axis names"):
        resolve_placements({TP: Shard(0)}, names)


def test_a_placement_is_recognised_as_one() -> None:
    assert all(isinstance(value, Placement) for value in (Shard(0), Replicate(), Partial()))
    assert not isinstance("Shard(0)", Placement)
    assert not isinstance(None, Placement)


def test_configs_do_not_share_their_defaults() -> None:
    one = ShardingConfig()
    one.state_shardings["weight"] = {TP: Shard(0)}
    assert ShardingConfig().state_shardings == {}
