"""Everything that makes a run go on where it stopped, by name.

In: model parts, optimizers, other states. Out: the tree that is saved, and the way back; by `exclude` parts stay as
they are.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from hp_components._rank_zero import log
from hp_components.checkpoint.contents import ModelParts, pack, split_optimizer_state, tell_new_hyperparameters, unpack
from hp_components.checkpoint.folder import CheckpointInfo
from hp_components.checkpoint.rng import capture_rng, rederive_rng, restore_rng
from hp_protocols.platform import get_platform

__all__ = ["RunState"]

logger = logging.getLogger(__name__)


class RunState:
    """The parts of a run: `model`, `optimizer`, `rng`, and every other state under its own name."""

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        optimizers: Stateful | None,
        states: Mapping[str, Stateful],
        device_type: str | None,
    ) -> None:
        self.model = ModelParts(model_parts)
        self.optimizers = optimizers
        self.states = dict(states)
        self.device_type = device_type

    @property
    def names(self) -> list[str]:
        """What can be left out of a load."""
        return ["model", *(["optimizer"] if self.optimizers is not None else []), "rng", *self.states]

    def tensors(self, exclude: Collection[str] = ()) -> dict[str, dict[str, Any]]:
        """The live tensors, not copies."""
        tree: dict[str, dict[str, Any]] = {}
        if "model" not in exclude:
            tree["model"] = self.model.state_dict()
        if self.optimizers is not None and "optimizer" not in exclude:
            tree["optimizer"] = split_optimizer_state(self.optimizers.state_dict())[0]
        return tree

    def everything(self) -> dict[str, dict[str, Any]]:
        """What this rank has to save: live tensors, and all else as bytes of this moment. States are rank 0's."""
        rank = get_platform().rank()
        tree: dict[str, dict[str, Any]] = {"model": self.model.state_dict()}
        if self.optimizers is not None:
            tree["optimizer"], hyperparameters = split_optimizer_state(self.optimizers.state_dict())
            tree["hyperparameters"] = {f"rank{rank}": pack("hyperparameters", hyperparameters)}
        tree["rng"] = {f"rank{rank}": pack("rng", capture_rng(self.device_type))}
        if rank == 0:
            tree["states"] = {name: pack(name, state.state_dict()) for name, state in self.states.items()}
        return tree

    def restore(
        self,
        contents: Mapping[str, Mapping[str, Any]],
        info: CheckpointInfo,
        ranks: Sequence[int],
        exclude: Collection[str],
    ) -> None:
        """Take over what was read; `ranks` are those whose random-number states were."""
        if "model" not in exclude:
            self.model.load_state_dict(dict(contents["model"]))
        if self.optimizers is not None and "optimizer" not in exclude:
            self._restore_optimizers(contents, str(info.path))
        for name, state in self.states.items():
            if name not in exclude:
                state.load_state_dict(unpack(contents["states"][name]))
        if "rng" not in exclude:
            self._restore_rng([unpack(contents["rng"][f"rank{rank}"]) for rank in ranks], info)

    def _restore_optimizers(self, contents: Mapping[str, Mapping[str, Any]], where: str) -> None:
        assert self.optimizers is not None
        own = split_optimizer_state(self.optimizers.state_dict())[1]
        saved: dict[str, Any] = {}
        for packed in contents["hyperparameters"].values():
            saved |= unpack(packed)
        tell_new_hyperparameters(own.keys(), saved.keys(), where)
        self.optimizers.load_state_dict({**contents["optimizer"], **saved})

    def _restore_rng(self, saved: Sequence[Mapping[str, Any]], info: CheckpointInfo) -> None:
        platform = get_platform()
        if info.world_size == platform.world_size():
            restore_rng(dict(saved[0]), info.step, self.device_type)
        elif saved:
            rederive_rng([state["seed"] for state in saved], info.step, platform.rank(), platform.world_size())
        else:
            log(
                logger,
                logging.WARNING,
                "%s is not from this package; random numbers start from the run's seed",
                info.path,
            )


def drop_repeated_hyperparameters(tree: dict[str, dict[str, Any]], group: Any) -> None:
    """Keep this rank's hyperparameters only if no lower rank has the same; with pipeline stages they differ."""
    platform = get_platform()
    mine = hashlib.sha256(b"".join(tree.get("hyperparameters", {}).values())).hexdigest()
    if mine in platform.all_gather_object(mine, group)[: platform.rank()]:
        tree.pop("hyperparameters", None)
