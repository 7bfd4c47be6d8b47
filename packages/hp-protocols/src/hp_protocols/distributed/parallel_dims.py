"""How the processes of a run are divided between the kinds of parallelism, and the device meshes for each.

In: a degree per kind and the world size. Out: `ParallelDims`; it checks the degrees at once and builds the meshes on
first use. "Axis" is a mesh's, "dim" would be a tensor's.

    world = pp × dp_replicate × dp_shard × cp × tp        outermost first; ranks of tp are neighbours
    fsdp  = dp_shard × cp      batch = dp_replicate × dp_shard
    efsdp = fsdp × tp / ep     loss  = batch × cp
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hp_protocols.errors import ConfigError, Fault
from hp_protocols.platform import get_platform

if TYPE_CHECKING:
    from hp_protocols.platform import DeviceMesh

__all__ = ["ParallelDims"]

logger = logging.getLogger(__name__)

_DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
_VIEWS = ("batch", "loss")
# Axes that can stand in one mesh, in this order: for activations, for dense parameters, for experts' parameters.
_COMBINATIONS = (
    ("pp", "dp_replicate", "fsdp", "tp"),
    ("pp", "dp_replicate", "efsdp", "ep"),
    ("pp", "cp", "tp"),
)
_NAMES = ("pp", "dp_replicate", "fsdp", "cp", "tp", "ep", "efsdp", *_VIEWS)


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """The degree of each kind of parallelism, and the meshes that follow.

    Attributes:
        dp_replicate: copies of the model (DDP, or the outer axis of HSDP).
        dp_shard: ranks that share a copy's parameters between them; -1: what is left of the world.
        cp: ranks that share one sequence.
        tp: ranks that share each matrix.
        pp: stages of the pipeline.
        ep: ranks that share the experts; a part of dp_shard × cp × tp, so not a factor of the world.
        world_size: the number of processes.

    Raises:
        ConfigError: a degree is not positive, or the product is not the world size.
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    world_size: int = 1
    _meshes: dict[str | tuple[str, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_config(cls, parallelism: Any, world_size: int) -> ParallelDims:
        """From the trainer's section, any object with the attributes `<kind>_parallel_degree`."""
        return cls(
            dp_replicate=parallelism.data_parallel_replicate_degree,
            dp_shard=parallelism.data_parallel_shard_degree,
            cp=parallelism.context_parallel_degree,
            tp=parallelism.tensor_parallel_degree,
            pp=parallelism.pipeline_parallel_degree,
            ep=parallelism.expert_parallel_degree,
            world_size=world_size,
        )

    def __post_init__(self) -> None:
        faults = [
            Fault(f"parallelism.{name}", f"degree {degree} is not positive", allowed=_allowed(name))
            for name in _DEGREES
            if (degree := getattr(self, name)) < 1 and not (name == "dp_shard" and degree == -1)
        ]
        if self.world_size < 1:
            faults.append(Fault("world_size", f"{self.world_size} is not positive"))
        if faults:
            raise ConfigError(faults)
        if self.dp_shard == -1:
            others = self.dp_replicate * self.cp * self.tp * self.pp
            # Where nothing whole is left, 1 makes the check below show the product that does not fit.
            object.__setattr__(self, "dp_shard", max(1, self.world_size // others))
        self._check_product()
        self._check_experts()

    def _check_product(self) -> None:
        factors = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        product = math.prod(getattr(self, name) for name in factors)
        if product != self.world_size:
            shown = " × ".join(f"{name} {getattr(self, name)}" for name in factors)
            raise ConfigError(
                Fault(
                    "parallelism",
                    f"{shown} = {product}, but the world has {self.world_size} processes",
                    allowed=f"degrees whose product is {self.world_size}",
                    hint=f"start {product} processes, or let dp_shard = -1 take what the other degrees leave",
                )
            )

    def _check_experts(self) -> None:
        ranks = self.dp_shard * self.cp * self.tp
        if ranks % self.ep != 0:
            raise ConfigError(
                Fault(
                    "parallelism.ep",
                    f"{self.ep} does not divide dp_shard {self.dp_shard} × cp {self.cp} × tp {self.tp} = {ranks}",
                    allowed=f"a divisor of {ranks}",
                )
            )

    # Degrees

    @property
    def fsdp(self) -> int:
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        return self.fsdp * self.tp // self.ep

    @property
    def batch(self) -> int:
        """Ranks that read different rows of a batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def loss(self) -> int:
        """Ranks whose token losses differ and have to be summed."""
        return self.batch * self.cp

    @property
    def dp_enabled(self) -> bool:
        return self.dp_replicate > 1 or self.dp_shard > 1

    @property
    def dp_replicate_enabled(self) -> bool:
        return self.dp_replicate > 1

    @property
    def dp_shard_enabled(self) -> bool:
        return self.dp_shard > 1

    @property
    def cp_enabled(self) -> bool:
        return self.cp > 1

    @property
    def dp_cp_enabled(self) -> bool:
        return self.dp_enabled or self.cp_enabled

    @property
    def fsdp_enabled(self) -> bool:
        return self.fsdp > 1

    @property
    def tp_enabled(self) -> bool:
        return self.tp > 1

    @property
    def pp_enabled(self) -> bool:
        return self.pp > 1

    @property
    def ep_enabled(self) -> bool:
        return self.ep > 1

    @property
    def non_data_parallel_size(self) -> int:
        return self.cp * self.tp * self.pp

    @property
    def seq_len_divisor(self) -> int:
        """What a sequence's length must be a multiple of, so that tp and cp ranks hold equal parts of it."""
        return self.tp * self.cp

    # Meshes

    def build_meshes(self) -> None:
        """Build all meshes now; every rank has to, at the same time, since it makes process groups.

        Otherwise the first look at a mesh builds them.
        """
        self._built()

    @property
    def world_mesh(self) -> DeviceMesh:
        """All processes as one axis, `world`; the root of all other meshes but the views."""
        return self._built()["world"]

    def get_optional_mesh(self, names: str | Sequence[str]) -> DeviceMesh | None:
        """The mesh with these axes, or None if one of them is off.

        An axis is off when its degree is 1, except `fsdp`, which is always there (it also casts to the dtypes of mixed
        precision), and `efsdp`, which is there when ep is on. The same names give the same object.

        Args:
            names: one of `pp, dp_replicate, fsdp, cp, tp, ep, efsdp` or the views `batch, loss`; or a list of axes
                from one of (pp, dp_replicate, fsdp, tp), (pp, dp_replicate, efsdp, ep), (pp, cp, tp), in that order.

        Raises:
            ValueError: a name is unknown, or the axes cannot stand in one mesh, or not in this order.
        """
        axes = (str(names),) if isinstance(names, str) else tuple(str(name) for name in names)
        _check_names(axes)
        meshes = self._built()
        if any(axis not in meshes for axis in axes):
            return None
        if len(axes) == 1:
            return meshes[axes[0]]
        if axes not in meshes:
            meshes[axes] = get_platform().stack_meshes([meshes[axis] for axis in axes])
        return meshes[axes]

    def get_mesh(self, names: str | Sequence[str]) -> DeviceMesh:
        """As `get_optional_mesh`.

        Raises:
            ValueError: also where `get_optional_mesh` returns None.
        """
        mesh = self.get_optional_mesh(names)
        if mesh is None:
            axes = [names] if isinstance(names, str) else names
            off = [str(axis) for axis in axes if axis not in self._meshes]
            shown = ", ".join(f"{axis} (degree {getattr(self, axis)})" for axis in off)
            raise ValueError(f"there is no mesh {list(map(str, axes))}: {shown} is off; get_optional_mesh returns None")
        return mesh

    def get_all_one_dimensional_meshes(self) -> dict[str, DeviceMesh]:
        """Every axis and view with more than one rank, by name."""
        return {name: mesh for name in _NAMES if (mesh := self._built().get(name)) is not None and mesh.size() > 1}

    def _built(self) -> dict[str | tuple[str, ...], Any]:
        if not self._meshes:
            platform = get_platform()
            if not platform.is_initialized():
                raise RuntimeError("meshes need a process group: call get_platform().init_process_group() first")
            if platform.world_size() != self.world_size:
                raise ValueError(f"ParallelDims is for {self.world_size} processes, here are {platform.world_size()}")
            self._meshes.update(_build_meshes(self, platform))
            sizes = {name: mesh.size() for name, mesh in self._meshes.items()}
            logger.info("device meshes: %s", ", ".join(f"{name} {size}" for name, size in sizes.items()))
        return self._meshes


def _allowed(degree: str) -> str:
    return "1, 2, … or -1 for the rest of the world" if degree == "dp_shard" else "1, 2, …"


def _check_names(axes: tuple[str, ...]) -> None:
    unknown = [axis for axis in axes if axis not in _NAMES]
    if unknown or not axes:
        raise ValueError(f"no mesh axis {', '.join(unknown) or '(none given)'}; there are: {', '.join(_NAMES)}")
    if len(axes) > 1 and not any(axes == tuple(name for name in row if name in axes) for row in _COMBINATIONS):
        rows = " or ".join(f"({', '.join(row)})" for row in _COMBINATIONS)
        raise ValueError(f"axes {axes} cannot stand in one mesh; several axes come from one of {rows}, in that order")


def _build_meshes(dims: ParallelDims, platform: Any) -> dict[str, Any]:
    """One-axis meshes by name. Axes that are off are not built: each process group costs memory and start-up time."""
    world = platform.world_mesh()
    layout = {"pp": dims.pp, "dp_replicate": dims.dp_replicate, "fsdp": dims.fsdp, "tp": dims.tp}
    on = {name: size for name, size in layout.items() if size > 1 or name == "fsdp"}
    dense = platform.split_axis(world, "world", list(on.values()), list(on))
    meshes = {"world": world, **{name: dense[name] for name in on}}

    sharded = {name: size for name, size in {"dp_shard": dims.dp_shard, "cp": dims.cp}.items() if size > 1}
    data = dense
    if dims.cp > 1:
        data = platform.split_axis(dense, "fsdp", list(sharded.values()), list(sharded))
        meshes["cp"] = data["cp"]
    replicas = ["dp_replicate"] if dims.dp_replicate > 1 else []
    rows = [*replicas, *(["dp_shard"] if dims.cp > 1 else ["fsdp"])] if dims.dp_shard > 1 else replicas
    tokens = [*replicas, *(["fsdp"] if dims.fsdp > 1 else [])]
    meshes["batch"] = _view(platform, data, rows, "batch")
    # Without cp the two views are the same ranks, and need only one group.
    same = dims.cp == 1 and meshes["batch"] is not None
    meshes["loss"] = platform.rename_axis(meshes["batch"], "loss") if same else _view(platform, dense, tokens, "loss")

    if dims.ep > 1:
        source, axis = (
            (platform.join_axes(dense, ["fsdp", "tp"], "fsdp_tp"), "fsdp_tp") if dims.tp > 1 else (dense, "fsdp")
        )
        experts = platform.split_axis(source, axis, [dims.efsdp, dims.ep], ["efsdp", "ep"])
        meshes |= {"efsdp": experts["efsdp"], "ep": experts["ep"]}
    return {name: mesh for name, mesh in meshes.items() if mesh is not None}


def _view(platform: Any, mesh: Any, axes: list[str], name: str) -> Any:
    """Several axes seen as one, or one under another name; None of none."""
    if not axes:
        return None
    if len(axes) == 1:
        return platform.rename_axis(mesh[axes[0]], name)
    return platform.join_axes(mesh, axes, name)
