"""Saves a run so that a kill, a full disk or a second start never costs an older checkpoint, and resumes it.

In: the run folder, the model parts, optimizers and every other state. Out: `<run>/checkpoint/step-N`, each one
root of torch.distributed.checkpoint, loadable under any layout and number of processes (M35).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from hp_components._extras import missing_extra_fault
from hp_components._rank_zero import log
from hp_components.checkpoint import folder as folders
from hp_components.checkpoint.agreement import on_rank_zero
from hp_components.checkpoint.background import Background
from hp_components.checkpoint.errors import CheckpointError
from hp_components.checkpoint.export import Exporter, SavesItself
from hp_components.checkpoint.folder import list_checkpoints
from hp_components.checkpoint.group import make_group
from hp_components.checkpoint.loading import Loader
from hp_components.checkpoint.lock import held_by_another
from hp_components.checkpoint.options import CheckpointOptions
from hp_components.checkpoint.run_state import RunState
from hp_components.checkpoint.saving import Saver, Upload
from hp_components.checkpoint.sources import choose
from hp_components.checkpoint.staging import Stage
from hp_protocols.configurable import Configurable
from hp_protocols.errors import ConfigError, Fault, nearest
from hp_protocols.platform import get_platform
from hp_protocols.state_dict_adapter import BaseStateDictAdapter

__all__ = ["CheckpointManager"]

logger = logging.getLogger(__name__)


class CheckpointManager(Configurable):
    """Saves every `interval` steps and keeps the latest few; loads the newest, or the one that is asked for.

    A checkpoint grows in a hidden folder and gets its name by one rename after everything is on disk. `save`, `load`
    and building it are collective: every rank calls them, and every rank sees the same outcome. The caller holds the
    folder's `RunLock`. Random-number states are saved per rank in addition to what is passed in.

    With an `async_mode`, a save holds training up only until the state is copied; one is on its way at a time. It is
    of the step at which `save` was called, whatever training does meanwhile.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointOptions):
        pass

    def __init__(
        self,
        config: Config,
        *,
        run_folder: str | os.PathLike[str],
        model_parts: Sequence[nn.Module],
        optimizers: Stateful | None = None,
        states: Mapping[str, Stateful] | None = None,
        device_type: str | None = None,
        state_dict_adapter: BaseStateDictAdapter | None = None,
        tokenizer: SavesItself | None = None,
    ) -> None:
        """
        Args:
            config: see `CheckpointOptions`.
            run_folder: the run's folder; nothing is made in it before the first save.
            model_parts: the model, or its pipeline stages on this rank.
            optimizers: the state of the optimizers, keyed by parameter name.
            states: everything else by name (schedule, dataloader, step and tokens, metrics). Each is the same on
                every rank; rank 0's is saved, and every rank loads it. Loaded in this order, after the optimizers.
            device_type: whose random numbers to save besides the cpu's; None means the platform's device.
            state_dict_adapter: from and to Hugging Face's names, for `initial_load_in_hf` and `last_save_in_hf`.
            tokenizer: saved beside exported weights; anything with `save(folder)`.

        Raises:
            ConfigError: options that no run could have, or not this one; all of them.
        """
        self.config = config
        self.run_folder = Path(run_folder)
        self.folder = self.run_folder / config.folder
        self._state = RunState(model_parts, optimizers, states or {}, device_type)
        pinned = config.async_mode == "async_with_pinned_mem"
        if faults := config.faults("checkpoint") + self._faults(state_dict_adapter, pinned, device_type):
            raise ConfigError(faults)
        self._on_disk: int | None = None  # the step this process saved or resumed from last
        self._in_flight: Background[Path] | None = None
        self._in_flight_step = 0
        self._held_up = 0.0
        self.process_group: dist.ProcessGroup | None = None
        if not config.enable:
            return
        self.process_group = make_group()
        self._saver = Saver(self.folder, self._state, config.keep_latest_k, self.process_group)
        self._stage = None if config.async_mode == "disabled" else Stage(pinned=pinned)
        self._loader = Loader(self._state, config.exclude_from_loading, state_dict_adapter, self.process_group)
        self._exporter = Exporter(self.folder, self._state.model, state_dict_adapter, tokenizer, self.process_group)
        on_rank_zero(f"tidy up {self.folder}", self._tidy, self.process_group)

    def should_save(self, step: int) -> bool:
        """Whether `step` is one after which to save."""
        config = self.config
        if not config.enable or config.load_only or step < 1:
            return False
        return step % config.interval == 0 or (step == 1 and config.enable_first_step_checkpoint)

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint; None if there is none."""
        found = list_checkpoints(self.folder)
        return found[-1].step if found else None

    def save(self, step: int, *, force: bool = False, last: bool = False) -> bool:
        """Save the state after `step`, if it is time to.

        A failed save (a full disk, a lost mount) is logged as an error and leaves older checkpoints alone; training
        may go on, and the next interval tries again. In the background it is told by the next `poll`, `save` or
        `close`.

        Args:
            step: optimizer steps done.
            force: save although it is not time to, wait until it is on disk, and raise if it fails: for the last
                save of a run.
            last: the end of training: the options `last_save_…` apply. Implies `force`.

        Returns:
            Whether the checkpoint of `step` is on disk, or on its way in the background.

        Raises:
            CheckpointError: a forced save failed; partial files are removed, older checkpoints intact.
        """
        force = force or last
        if not self.config.enable or self.config.load_only or not (force or self.should_save(step)):
            return False
        self._finish_in_flight(before=f"saving step {step}")
        if last and self.config.last_save_in_hf:
            self._exporter.export(step, self.config.export_dtype)
            if self.config.last_save_model_only:
                return True
        if self._on_disk == step:
            return True
        weights_only = last and self.config.last_save_model_only
        try:
            self._save(step, background=self._stage is not None and not force, weights_only=weights_only)
        except CheckpointError as error:
            if force:
                raise
            self._tell_failure(step, error)
            return False
        return True

    def poll(self) -> None:
        """Tell how the save in the background has ended, if it has. Costs nothing; not collective."""
        if self._in_flight is not None and self._in_flight.done:
            self._settle()

    def load(self, step: int | None = None) -> int | None:
        """Load a checkpoint into model, optimizers, states and random-number generators.

        This run's own checkpoints come first; without any, `initial_load_path`. The log says which, why, and what
        was not loaded.

        Args:
            step: which one of this run's; None follows `Config.load_step` (-1: the newest).

        Returns:
            The step of the state that was loaded; None if there is none: nothing was loaded, or only weights.

        Raises:
            ConfigError: what was asked for is not there, or the checkpoint is of another model or damaged.
            CheckpointError: it could not be read.
        """
        if not self.config.enable:
            log(logger, logging.INFO, "checkpoints are disabled: starting from step 0")
            return None
        self._finish_in_flight(before="loading")
        source = on_rank_zero(
            f"choose a checkpoint in {self.folder}", lambda: choose(self.config, self.folder, step), self.process_group
        )
        if source is None:
            return None
        self._loader.load(source)
        if source.model_only or source.info is None:
            return None
        if source.resumes:
            self._on_disk = source.info.step
        return source.info.step

    def close(self) -> None:
        """Wait for the save on its way and for deletions, and tell how they ended. Not collective."""
        if self.config.enable:
            self._finish_in_flight(before="closing")
            self._saver.close()
            if self._stage is not None:
                self._stage.close()

    def _save(self, step: int, *, background: bool, weights_only: bool) -> None:
        began = time.perf_counter()
        dtype = get_platform().dtype_map[self.config.export_dtype] if weights_only else None
        upload: Upload = self._saver.prepare(step, self._stage if background else None, dtype)
        if background:
            self._in_flight = Background(lambda: self._saver.upload(upload), f"hp-checkpoint-step-{step}")
            self._in_flight_step, self._held_up = step, time.perf_counter() - began
            return
        path = self._saver.upload(upload)
        self._on_disk = step
        log(logger, logging.INFO, "saved checkpoint %s in %.2f s", path, time.perf_counter() - began)

    def _finish_in_flight(self, before: str) -> None:
        """Wait for the save on its way, if there is one."""
        if self._in_flight is None:
            return
        began = time.perf_counter()
        was_done = self._in_flight.done
        self._settle()
        if not was_done:
            seconds = time.perf_counter() - began
            level = logging.INFO if seconds < 1 else logging.WARNING
            log(logger, level, "waited %.2f s for the save of step %d before %s", seconds, self._in_flight_step, before)

    def _settle(self) -> None:
        upload, step = self._in_flight, self._in_flight_step
        self._in_flight = None
        assert upload is not None
        try:
            path = upload.result()
        except CheckpointError as error:
            self._tell_failure(step, error)
        except Exception as error:  # the ranks could not even agree; this one says what it knows
            logger.error("checkpoint of step %d NOT saved: %s: %s", step, type(error).__name__, error)
        else:
            self._on_disk = step
            log(
                logger,
                logging.INFO,
                "saved checkpoint %s in %.2f s beside training, which it held up for %.2f s",
                path,
                upload.seconds,
                self._held_up,
            )

    def _tell_failure(self, step: int, error: CheckpointError) -> None:
        latest = self.latest()
        standing = "there is no older checkpoint" if latest is None else f"the newest checkpoint is still step-{latest}"
        log(logger, logging.ERROR, "checkpoint of step %d NOT saved: %s. Training goes on; %s", step, error, standing)

    def _tidy(self) -> None:
        if held_by_another(self.run_folder):
            logger.info("%s is in use by another process; what looks left over is not touched", self.run_folder)
        else:
            folders.tidy(self.folder)

    def _faults(self, adapter: BaseStateDictAdapter | None, pinned: bool, device_type: str | None) -> list[Fault]:
        """What cannot be done with this run's parts on this machine."""
        config, faults = self.config, []
        if pinned and get_platform().device_type(device_type) == "cpu":
            faults.append(
                Fault(
                    "checkpoint.async_mode",
                    "async_with_pinned_mem is for accelerators: page-locked memory is where they copy to, and this "
                    "run is on the cpu",
                    allowed="disabled, async",
                )
            )
        for name in config.exclude_from_loading:
            if name not in self._state.names:
                near = nearest(name, self._state.names)
                faults.append(
                    Fault(
                        "checkpoint.exclude_from_loading",
                        f"this run has no part {name!r}",
                        allowed=", ".join(self._state.names),
                        hint=f"did you mean {near!r}?" if near else None,
                    )
                )
        for option in ("initial_load_in_hf", "last_save_in_hf"):
            if getattr(config, option):
                faults += _hf_faults(f"checkpoint.{option}", adapter, writes=option == "last_save_in_hf")
        return faults


def _hf_faults(where: str, adapter: BaseStateDictAdapter | None, *, writes: bool) -> list[Fault]:
    """What Hugging Face format needs, seen before training and not at its end."""
    if adapter is None:
        problem = "this model has no state-dict adapter, which translates its names to Hugging Face's"
        return [Fault(where, problem, hint="set state_dict_adapter in its ModelSpec")]
    if (missing := missing_extra_fault(where, "safetensors", "hf")) is not None:
        return [missing]
    if writes:
        try:
            adapter.hf_config()
        except (NotImplementedError, OSError) as error:
            return [Fault(where, str(error))]
    return []
