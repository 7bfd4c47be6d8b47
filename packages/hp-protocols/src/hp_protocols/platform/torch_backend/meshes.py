"""Device meshes cut from one world, so that their axes can be combined.

In: a mesh with named axes. Out: `TorchMeshes`, the mesh half of the platform. Every result shares the root of its
source; FSDP2 asks for that where a parameter is already sharded over another axis.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_protocols.platform.base import Platform

from . import _torch_compat

__all__ = ["TorchMeshes"]


class TorchMeshes(Platform):
    """DeviceMesh's splitting and joining, which torch has not made public yet."""

    def world_mesh(self, device: str | None = None) -> DeviceMesh:
        return init_device_mesh(self.device_type(device), (self.world_size(),), mesh_dim_names=("world",))

    def split_axis(self, mesh: DeviceMesh, axis: str, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
        return _torch_compat.unflatten_mesh(mesh, axis, tuple(sizes), tuple(names))

    def join_axes(self, mesh: DeviceMesh, axes: Sequence[str], name: str) -> DeviceMesh:
        return _torch_compat.flatten_mesh(mesh[tuple(axes)], name)

    def stack_meshes(self, meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        return _torch_compat.concatenate_meshes(list(meshes))

    def rename_axis(self, mesh: DeviceMesh, name: str) -> DeviceMesh:
        return DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh_dim_names=(name,))
