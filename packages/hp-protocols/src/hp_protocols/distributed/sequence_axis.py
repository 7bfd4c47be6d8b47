"""The ranks that share one sequence: contiguous stretches of equal length, in the order of the ranks.

In: tensors of a whole sequence, or of a rank's stretch. Out: `SequenceAxis`, which cuts the one and gathers the other;
the gradient of what was gathered is summed over the ranks and handed back in stretches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hp_protocols.platform import get_platform

if TYPE_CHECKING:
    from hp_protocols.platform import DeviceMesh, Tensor

__all__ = ["SequenceAxis"]


@dataclass(frozen=True)
class SequenceAxis:
    """One mesh axis over which sequences are cut.

    Attributes:
        mesh: the one-axis mesh.
    """

    mesh: DeviceMesh

    def __post_init__(self) -> None:
        if self.mesh.ndim != 1:
            raise ValueError(
                f"a sequence is cut over 1 axis; this mesh has {self.mesh.ndim}: {self.mesh.mesh_dim_names}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceAxis:
        return self  # The mesh has process groups, which cannot be copied.

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """Which stretch is this rank's, counted from 0."""
        return self.mesh.get_local_rank()

    def bounds(self, length: int) -> tuple[int, int]:
        """Where this rank's stretch of `length` tokens begins and ends.

        Raises:
            ValueError: the tokens cannot be cut into equal stretches.
        """
        if length % self.size:
            raise ValueError(
                f"a sequence of {length} tokens cannot be cut into {self.size} equal stretches (context parallelism); "
                f"allowed: a multiple of {self.size}"
            )
        part = length // self.size
        return self.rank * part, (self.rank + 1) * part

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's stretch of a tensor that every rank holds whole; a view. It has no gradient to give back.

        Raises:
            ValueError: the stretches are not equal, or the tensor requires a gradient, of which each rank would only
                compute a part.
        """
        if whole.requires_grad:
            raise ValueError(
                "a tensor that requires a gradient cannot be cut: gather its parts where it is needed whole"
            )
        start, end = self.bounds(whole.shape[dim])
        return whole.narrow(dim, start, end - start)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The whole of what each rank holds a stretch of, along `dim`.

        Every rank may use all of it: the gradients of all ranks are summed, and each gets that of its own stretch.
        """
        platform = get_platform()
        local = platform.DTensor.from_local(part, self.mesh, [platform.Shard(dim)], run_check=False)
        whole = local.redistribute(placements=[platform.Replicate()])
        return whole.to_local(grad_placements=[platform.Partial()])

    def gather_each(self, value: Tensor) -> Tensor:
        """The values of all ranks, [ranks, *value.shape]; gradients as in `gather`."""
        return self.gather(value.unsqueeze(0), 0)
