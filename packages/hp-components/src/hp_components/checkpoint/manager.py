"""Saves a run so that a kill, a full disk or a second start never costs an older checkpoint, and resumes it.

In: the run folder, the model parts, optimizers and every other state. Out: `<run>/checkpoint/step-N`, each one
root of torch.distributed.checkpoint, loadable under any layout and number of processes (M35).
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from hp_components._rank_zero import log
from hp_components.checkpoint import folder as folders
from hp_components.checkpoint.agreement import on_all_ranks, on_rank_zero
from hp_components.checkpoint.contents import ModelParts, pack, unpack
from hp_components.checkpoint.errors import CheckpointError
from hp_components.checkpoint.folder import CheckpointInfo, list_checkpoints
from hp_components.checkpoint.lock import held_by_another
from hp_components.checkpoint.rng import capture_rng, rederive_rng, restore_rng
from hp_components.checkpoint.storage import matching_contents, read, require_states, write
from hp_protocols.configurable import Configurable
from hp_protocols.errors import ConfigError, Fault
from hp_protocols.platform import get_platform

__all__ = ["CheckpointManager"]

logger = logging.getLogger(__name__)


class CheckpointManager(Configurable):
    """Saves every `interval` steps and keeps the latest few; loads the newest, or the one that is asked for.

    A checkpoint grows in a hidden folder and gets its name by one rename after everything is on disk. All methods
    are collective: every rank calls them, and every rank sees the same outcome. The caller holds the folder's
    `RunLock`. Random-number states are saved per rank in addition to what is passed in.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable: bool = True
        """Save and load checkpoints."""

        folder: str = "checkpoint"
        """Folder of the checkpoints, inside the run folder."""

        interval: int = 500
        """Steps between saves."""

        keep_latest_k: int = 10
        """Own checkpoints to keep; 0 keeps all."""

        load_step: int = -1
        """Step to resume from; -1 means the newest."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        """How a save overlaps training; only `disabled` is available yet."""

        def faults(self, path: str) -> list[Fault]:
            """Values that no run could have."""
            faults = []
            for name, least in (("interval", 1), ("keep_latest_k", 0), ("load_step", -1)):
                value = getattr(self, name)
                if value < least:
                    faults.append(Fault(f"{path}.{name}", f"{value} is too small", allowed=f"{least} or more"))
            inside = Path(self.folder)
            if not self.folder or inside.is_absolute() or ".." in inside.parts or inside == Path("."):
                faults.append(
                    Fault(
                        f"{path}.folder",
                        f"{self.folder!r} is not a folder inside the run folder",
                        allowed="a relative path such as 'checkpoint'",
                    )
                )
            if self.async_mode != "disabled":
                faults.append(
                    Fault(f"{path}.async_mode", f"{self.async_mode!r} is not available yet", allowed="disabled")
                )
            return faults

    def __init__(
        self,
        config: Config,
        *,
        run_folder: str | os.PathLike[str],
        model_parts: Sequence[nn.Module],
        optimizers: Stateful | None = None,
        states: Mapping[str, Stateful] | None = None,
        device_type: str | None = None,
    ) -> None:
        """
        Args:
            config: see `Config`.
            run_folder: the run's folder; nothing is made in it before the first save.
            model_parts: the model, or its pipeline stages on this rank.
            optimizers: the state of the optimizers, keyed by parameter name.
            states: everything else by name (schedule, dataloader, step and tokens, metrics). Each is the same on
                every rank; rank 0's is saved, and every rank loads it. Loaded in this order, after the optimizers.
            device_type: whose random numbers to save besides the cpu's; None means the platform's device.
        """
        if faults := config.faults("checkpoint"):
            raise ConfigError(faults)
        self.config = config
        self.run_folder = Path(run_folder)
        self.folder = self.run_folder / config.folder
        self._model = ModelParts(model_parts)
        self._optimizers = optimizers
        self._states = dict(states or {})
        self._device_type = device_type
        self._on_disk: int | None = None  # the step this process saved or loaded last
        if config.enable:
            on_rank_zero(f"tidy up {self.folder}", self._tidy)

    def should_save(self, step: int) -> bool:
        """Whether `step` is one after which to save."""
        return self.config.enable and step > 0 and step % self.config.interval == 0

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint; None if there is none."""
        found = list_checkpoints(self.folder)
        return found[-1].step if found else None

    def save(self, step: int, *, force: bool = False) -> bool:
        """Save the state after `step`, if it is time to.

        A failed save (a full disk, a lost mount) is logged as an error and leaves older checkpoints alone; training
        may go on, and the next interval tries again.

        Args:
            step: optimizer steps done.
            force: save although it is not time to, and raise if it fails: for the last save of a run.

        Returns:
            Whether the checkpoint of `step` is on disk.

        Raises:
            CheckpointError: a forced save failed; partial files are removed, older checkpoints intact.
        """
        if not self.config.enable or not (force or self.should_save(step)):
            return False
        if self._on_disk == step:
            return True
        began = time.perf_counter()
        try:
            path = self._write(step)
        except CheckpointError as error:
            if force:
                raise
            log(
                logger,
                logging.ERROR,
                "checkpoint of step %d NOT saved: %s. Training goes on; %s",
                step,
                error,
                self._standing(),
            )
            return False
        self._on_disk = step
        log(logger, logging.INFO, "saved checkpoint %s in %.2f s", path, time.perf_counter() - began)
        return True

    def load(self, step: int | None = None) -> int | None:
        """Load a checkpoint into model, optimizers, states and random-number generators.

        Args:
            step: which one; None follows `Config.load_step` (-1: the newest).

        Returns:
            Its step; None if there is nothing to resume (or checkpoints are disabled).

        Raises:
            ConfigError: the step is not there, or the checkpoint is of another model or damaged.
            CheckpointError: it could not be read.
        """
        if not self.config.enable:
            log(logger, logging.INFO, "checkpoints are disabled: starting from step 0")
            return None
        info = on_rank_zero(f"choose a checkpoint in {self.folder}", lambda: self._choose(step))
        if info is None:
            return None
        self._read(info)
        self._on_disk = info.step
        return info.step

    def _tidy(self) -> None:
        if held_by_another(self.run_folder):
            logger.info("%s is in use by another process; what looks left over is not touched", self.run_folder)
        else:
            folders.tidy(self.folder)

    def _choose(self, step: int | None) -> CheckpointInfo | None:
        found = {info.step: info for info in list_checkpoints(self.folder)}
        wanted = self.config.load_step if step is None else step
        if wanted == -1:
            if not found:
                logger.info("no checkpoint in %s: starting from step 0", self.folder)
                return None
            info, reason = found[max(found)], f"the newest of {len(found)}"
        elif wanted in found:
            info, reason = found[wanted], "asked for by load_step"
        else:
            steps = ", ".join(map(str, found)) or "none"
            raise ConfigError(
                Fault(
                    "checkpoint.load_step",
                    f"there is no checkpoint of step {wanted} in {self.folder}",
                    allowed=f"steps found: {steps}",
                )
            )
        if damage := info.damage():
            raise ConfigError(
                Fault(
                    str(info.path),
                    f"damaged since it was saved: {'; '.join(damage[:4])}",
                    hint="resume from an older one with --checkpoint.load_step, or remove this folder",
                )
            )
        logger.info("loading checkpoint %s: %s", info.path, reason)
        if newer := [s for s in found if s > info.step]:
            logger.warning(
                "checkpoints of later steps stay in %s (%s); a restart without load_step would take the newest of them",
                self.folder,
                ", ".join(map(str, newer)),
            )
        return info

    def _write(self, step: int) -> Path:
        platform = get_platform()
        token = platform.broadcast_object(secrets.token_hex(4))
        partial = folders.partial_folder(self.folder, step, token)
        try:
            on_rank_zero(f"make {partial}", lambda: partial.mkdir(parents=True))
            contents = on_all_ranks("collect the state", lambda: self._contents(partial))
            on_all_ranks(f"write {partial}", lambda: write(contents, partial))
            return on_rank_zero(
                f"finish step-{step}", lambda: self._publish(partial, step, token, platform.world_size())
            )
        except Exception:  # every rank is here: what fails in a stage fails on all of them
            on_rank_zero(f"remove {partial}", lambda: _discard(partial))
            raise

    def _publish(self, partial: Path, step: int, token: str, world_size: int) -> Path:
        path = folders.publish(partial, step, token, world_size)
        try:
            folders.prune(self.folder, self.config.keep_latest_k, step, token)
        except OSError as error:
            # The new checkpoint is safe; an old one too many is no reason to call it failed.
            logger.error("checkpoint step-%d is saved, but older ones could not be deleted: %s", step, error)
        return path

    def _contents(self, partial: Path) -> dict[str, Any]:
        platform = get_platform()
        rank = platform.rank()
        if not partial.is_dir():
            raise FileNotFoundError(
                f"rank 0 made {partial}, but this rank does not see it: checkpoints need a folder that all hosts share"
            )
        contents = self._tensors()
        contents["rng"] = {f"rank{rank}": pack("rng", capture_rng(self._device_type))}
        if rank == 0:
            contents["states"] = {name: pack(name, state.state_dict()) for name, state in self._states.items()}
        return contents

    def _tensors(self) -> dict[str, Any]:
        tensors: dict[str, Any] = {"model": self._model.state_dict()}
        if self._optimizers is not None:
            tensors["optimizer"] = self._optimizers.state_dict()
        return tensors

    def _read(self, info: CheckpointInfo) -> None:
        reader = dcp.FileSystemReader(info.path)
        contents = matching_contents(reader, self._tensors, str(info.path))
        saved = reader.read_metadata().state_dict_metadata
        ranks = self._saved_ranks(info)
        contents["rng"] = {f"rank{rank}": b"" for rank in ranks}
        contents["states"] = dict.fromkeys(self._states, b"")
        on_all_ranks(f"load {info.path}", lambda: require_states(contents, saved, info.path))
        on_all_ranks(f"load {info.path}", lambda: read(contents, reader))
        on_all_ranks(f"restore {info.path}", lambda: self._restore(contents, info, ranks))

    def _restore(self, contents: dict[str, Any], info: CheckpointInfo, ranks: Sequence[int]) -> None:
        platform = get_platform()
        self._model.load_state_dict(contents["model"])
        if self._optimizers is not None:
            self._optimizers.load_state_dict(contents["optimizer"])
        for name, state in self._states.items():
            state.load_state_dict(unpack(contents["states"][name]))
        rng = [unpack(contents["rng"][f"rank{rank}"]) for rank in ranks]
        if info.world_size == platform.world_size():
            restore_rng(rng[0], info.step, self._device_type)
        elif rng:
            rederive_rng([state["seed"] for state in rng], info.step, platform.rank(), platform.world_size())
        else:
            log(
                logger,
                logging.WARNING,
                "%s is not from this package; random numbers start from the run's seed",
                info.path,
            )

    def _saved_ranks(self, info: CheckpointInfo) -> Sequence[int]:
        """The ranks whose random-number states this rank reads: its own, or all of them to derive new ones."""
        platform = get_platform()
        return [platform.rank()] if info.world_size == platform.world_size() else range(info.world_size or 0)

    def _standing(self) -> str:
        latest = self.latest()
        return "there is no older checkpoint" if latest is None else f"the newest checkpoint is still step-{latest}"


def _discard(partial: Path) -> None:
    try:
        folders.discard(partial)
    except OSError as error:
        logger.error("%s: could not be removed after the failed save (%s); the next start removes it", partial, error)
