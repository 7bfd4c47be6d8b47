"""The data-parallel group: from the caller's mesh context, else from the world.

In: `PassConfig` and maybe a mesh context. Out: `DataParallelMesh` (or None), and a config with resolved degrees.
Every fault here is raised before a collective has been issued.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hp_compile import _torch_compat as compat
from hp_compile.pass_config import PassConfig

compat.one_thread_per_gloo_group()


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the data-parallel mesh; `group_name` is the process group's own name (G15)."""

    name: str
    size: int
    rank: int
    group: Any
    group_name: str


@dataclass(frozen=True)
class DataParallelMesh:
    """The axes over which parameters are sharded and replicated; a size-1 axis is kept, it says what was asked."""

    mode: str
    device_mesh: DeviceMesh
    shard: MeshAxis | None
    replicate: MeshAxis | None

    @property
    def size(self) -> int:
        return self.shard_size * self.replicate_size

    @property
    def shard_size(self) -> int:
        return self.shard.size if self.shard else 1

    @property
    def replicate_size(self) -> int:
        return self.replicate.size if self.replicate else 1

    @property
    def axes(self) -> list[MeshAxis]:
        return [axis for axis in (self.replicate, self.shard) if axis is not None]

    @property
    def rank(self) -> int:
        """Place of this rank in the whole data-parallel group."""
        at = self.shard.rank if self.shard else 0
        return at + self.shard_size * (self.replicate.rank if self.replicate else 0)

    def placements(self, sharded: bool) -> tuple[Placement, ...]:
        """Placements over `device_mesh` of a parameter that is sharded on dim 0, or of a replica."""
        if self.mode == "ddp" or not sharded:
            return (Replicate(),) * self.device_mesh.ndim
        return (Shard(0),) if self.mode == "fsdp" else (Replicate(), Shard(0))


@dataclass(frozen=True)
class MeshLayout:
    """The data-parallel mesh before it is built: what is known without communication.

    Attributes:
        config: a copy of the caller's, with the degrees filled in.
        mesh: the caller's, or None: one of `shape` over the world is to be built.
    """

    config: PassConfig
    shape: tuple[int, ...]
    names: tuple[str, ...]
    mesh: DeviceMesh | None = None

    def build(self, device_type: str) -> DataParallelMesh:
        """Every rank at the same time: where the mesh is not the caller's, its groups are made here."""
        mesh = self.mesh
        if mesh is None:
            mesh = init_device_mesh(device_type, self.shape, mesh_dim_names=self.names)
        return _with_axes(self.config, mesh)


def resolve_mesh(
    config: PassConfig, mesh_context: Any = None, device_type: str = "cpu"
) -> tuple[DataParallelMesh | None, PassConfig]:
    """The data-parallel mesh and a copy of the config with its degrees filled in; raises what `layout_of` raises."""
    layout = layout_of(config, mesh_context)
    return (None, replace(config)) if layout is None else (layout.build(device_type), layout.config)


def layout_of(config: PassConfig, mesh_context: Any = None) -> MeshLayout | None:
    """The layout of the data-parallel mesh, without communication; None where there is nothing to be parallel over.

    Raises:
        ValueError: a degree that does not fit, or a mesh context without the needed dims.
        RuntimeError: a degree above 1 without an initialised process group; a gloo group with two threads.
    """
    if not config.fsdp_enabled:
        return None
    mesh = None
    if mesh_context is not None:
        mesh = _mesh_of_context(config, mesh_context)
        shape = tuple(mesh.size(dim) for dim in range(mesh.ndim))
        names = tuple(mesh.mesh_dim_names or ("dp",) * mesh.ndim)
    elif dist.is_available() and dist.is_initialized():
        shape, names = _shape_over_world(config)
    else:
        for name in ("fsdp_degree", "dp_replicate_degree"):
            if (getattr(config, name) or 1) > 1:
                raise RuntimeError(
                    f"{name}={getattr(config, name)}, but torch.distributed is not initialised; start with torchrun "
                    "and call torch.distributed.init_process_group first, or leave the degree None"
                )
        return None
    shards = 1 if config.dp_mode == "ddp" else shape[-1]
    replicas = 1 if config.dp_mode == "fsdp" else shape[0]
    for name, size in (("fsdp_degree", shards), ("dp_replicate_degree", replicas)):
        asked = getattr(config, name)
        if asked is not None and asked != size:
            raise ValueError(
                f"{name}={asked}, but the mesh's axis for it has {size} ranks; set it to {size} or None"
                + _hsdp_hint(config)
            )
    _refuse_groups_with_two_threads(mesh)
    resolved = replace(config, fsdp_degree=shards, dp_replicate_degree=replicas)
    return MeshLayout(resolved, shape, names, mesh)


def _refuse_groups_with_two_threads(mesh: DeviceMesh | None) -> None:
    groups = [dist.group.WORLD] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
    if any(compat.gloo_threads(group) > 1 for group in groups):
        raise RuntimeError(
            f"a gloo process group runs its collectives on two threads, which corrupts memory in torch "
            f"{torch.__version__} when both end at once; import hp_compile's GraphTrainer before "
            "torch.distributed.init_process_group, and each group is made with one"
        )


def _hsdp_hint(config: PassConfig) -> str:
    if config.dp_mode != "fsdp":
        return ""
    return "; to shard over a part of the group and replicate over the rest, set dp_mode='hsdp'"


def _shape_over_world(config: PassConfig) -> tuple[tuple[int, ...], tuple[str, ...]]:
    world = dist.get_world_size()
    if config.dp_mode == "hsdp":
        replicas = config.dp_replicate_degree
        shards = config.fsdp_degree or (world // replicas if replicas else world)
        replicas = replicas or max(world // shards, 1)
        if replicas * shards != world:
            raise ValueError(
                f"dp_replicate_degree × fsdp_degree = {replicas} × {shards} is not the world size {world}; choose "
                "degrees whose product it is, or give a mesh_context"
            )
        return (replicas, shards), ("fsdp_replicate", "fsdp_shard")
    name = "fsdp_degree" if config.dp_mode == "fsdp" else "dp_replicate_degree"
    asked = getattr(config, name)
    if asked is not None and asked != world:
        raise ValueError(
            f"{name}={asked} is not the world size {world}; set it to {world} or None, or give a mesh_context"
            + _hsdp_hint(config)
        )
    return (world,), ("dp",)


def _mesh_of_context(config: PassConfig, context: Any) -> DeviceMesh:
    mesh = getattr(context, "fsdp_non_moe_mesh", None)
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        shard, replicate = getattr(context, "fsdp_dims", ("fsdp_shard", "fsdp_replicate"))
        if shard not in names:
            raise ValueError(f"mesh_context.fsdp_non_moe_mesh has dims {names}; it needs {shard!r}")
        replicas = mesh[replicate].size() if replicate in names else None
        if config.dp_mode == "hsdp":
            if replicas is None:
                raise ValueError(
                    f"dp_mode='hsdp', but mesh_context.fsdp_non_moe_mesh has dims {names}; it needs {replicate!r} "
                    f"and {shard!r}"
                )
            return mesh[replicate, shard]
        if (replicas or 1) > 1 and (config.dp_mode == "fsdp" or mesh[shard].size() > 1):
            raise ValueError(
                f"dp_mode={config.dp_mode!r}, but mesh_context.fsdp_non_moe_mesh has {replicas} replicas on "
                f"{replicate!r}, which would drift apart; set dp_mode='hsdp'"
            )
        return mesh[replicate] if (replicas or 1) > 1 else mesh[shard]
    mesh = getattr(context, "device_mesh", None)
    if mesh is None:
        raise ValueError(
            f"mesh_context ({type(context).__name__}) has neither fsdp_non_moe_mesh (dim 'fsdp_shard') nor device_mesh "
            "(dim 'dp')"
        )
    names = mesh.mesh_dim_names or ()
    if config.dp_mode == "hsdp":
        raise ValueError(
            f"dp_mode='hsdp' needs mesh_context.fsdp_non_moe_mesh with dims 'fsdp_replicate' and 'fsdp_shard'; "
            f"device_mesh has dims {names}"
        )
    if "dp" not in names:
        raise ValueError(f"mesh_context.device_mesh has dims {names}; it needs 'dp'")
    return mesh["dp"] if mesh.ndim > 1 else mesh


def axes_of(mesh: DeviceMesh) -> list[MeshAxis]:
    return [
        MeshAxis(
            name=(mesh.mesh_dim_names or ("dp",) * mesh.ndim)[dim],
            size=mesh.size(dim),
            rank=mesh.get_local_rank(dim),
            group=mesh.get_group(dim),
            group_name=mesh.get_group(dim).group_name,
        )
        for dim in range(mesh.ndim)
    ]


def _with_axes(config: PassConfig, mesh: DeviceMesh) -> DataParallelMesh:
    axes = axes_of(mesh)
    if config.dp_mode == "hsdp":
        return DataParallelMesh("hsdp", mesh, shard=axes[1], replicate=axes[0])
    if config.dp_mode == "ddp":
        return DataParallelMesh("ddp", mesh, shard=None, replicate=axes[0])
    return DataParallelMesh("fsdp", mesh, shard=axes[0], replicate=None)
