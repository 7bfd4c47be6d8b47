"""One load: from a source, after comparing everything, into the parts of a run.

In: a `RunState` and a `Source`. Out: the state overwritten, and a line about what was not loaded and why.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from hp_components._rank_zero import log
from hp_components.checkpoint.agreement import on_all_ranks
from hp_components.checkpoint.folder import CheckpointInfo
from hp_components.checkpoint.run_state import RunState
from hp_components.checkpoint.sources import Source
from hp_components.checkpoint.storage import load_weights, matching_contents, read, require_states
from hp_protocols.platform import get_platform
from hp_protocols.state_dict_adapter import BaseStateDictAdapter

__all__ = ["Loader"]

logger = logging.getLogger(__name__)


class Loader:
    """Loads into `state`, leaving out the parts in `exclude`."""

    def __init__(
        self,
        state: RunState,
        exclude: Collection[str],
        adapter: BaseStateDictAdapter | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.state = state
        self.exclude = tuple(exclude)
        self.adapter = adapter
        self.group = group

    def load(self, source: Source) -> None:
        """Load what `source` says. Collective.

        Raises:
            ConfigError: it is of another model, or lacks a part; every name that does not fit is told.
            CheckpointError: it could not be read.
        """
        if source.model_only:
            self._load_weights(source)
            reason = "only the weights were asked for"
            left_out = [name for name in self.state.names if name != "model"]
        else:
            assert source.info is not None
            self._load_everything(source.info)
            reason = "checkpoint.exclude_from_loading"
            left_out = [name for name in self.state.names if name in self.exclude]
        if left_out:
            log(logger, logging.INFO, "not loaded from %s: %s (%s)", source.path, ", ".join(left_out), reason)

    def _load_weights(self, source: Source) -> None:
        if "model" in self.exclude:
            log(logger, logging.WARNING, "nothing is loaded from %s: exclude_from_loading has model", source.path)
        elif source.in_hf:
            from hp_components.checkpoint.hf_loading import load_hf

            assert self.adapter is not None
            load_hf(self.state.model, source.path, self.adapter, self.group)
        else:
            load_weights(self.state.model, source.path, self.group)

    def _load_everything(self, info: CheckpointInfo) -> None:
        where, group = str(info.path), self.group
        reader = FileSystemReader(info.path)
        contents, saved = matching_contents(reader, lambda: self.state.tensors(self.exclude), where, group)
        ranks = [] if "rng" in self.exclude else _saved_ranks(info)
        contents["rng"] = {f"rank{rank}": b"" for rank in ranks}
        contents["states"] = {name: b"" for name in self.state.states if name not in self.exclude}
        if "optimizer" in contents:
            prefix = "hyperparameters."
            contents["hyperparameters"] = {name.removeprefix(prefix): b"" for name in saved if name.startswith(prefix)}
        on_all_ranks(f"load {where}", lambda: require_states(contents, saved, info.path, self.exclude), group)
        on_all_ranks(f"load {where}", lambda: read(contents, reader, group), group)
        on_all_ranks(f"restore {where}", lambda: self.state.restore(contents, info, ranks, self.exclude), group)


def _saved_ranks(info: CheckpointInfo) -> Sequence[int]:
    """The ranks whose random-number states this rank reads: its own, or all of them to derive new ones."""
    platform = get_platform()
    return [platform.rank()] if info.world_size == platform.world_size() else range(info.world_size or 0)
