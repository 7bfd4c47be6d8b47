"""Where a run starts from: its own checkpoints first, then what it was told to start from, else from nothing.

In: the options and the folders. Out: a `Source`, with the reason in the log; every choice is made by looking only,
before anything is loaded. Needs no torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from hp_components.checkpoint.folder import METADATA, CheckpointInfo, info_of, list_checkpoints
from hp_components.checkpoint.options import CheckpointOptions
from hp_protocols.errors import ConfigError, Fault

__all__ = ["Source", "choose"]

logger = logging.getLogger(__name__)

INITIAL = "checkpoint.initial_load_path"


@dataclass(frozen=True, slots=True)
class Source:
    """What to load.

    Attributes:
        path: the folder.
        info: what is known about it; None for a folder in Hugging Face format.
        resumes: whether it is this run's own checkpoint.
        model_only: whether only the weights are to be loaded.
    """

    path: Path
    info: CheckpointInfo | None
    resumes: bool
    model_only: bool

    @property
    def in_hf(self) -> bool:
        """Whether it is in Hugging Face format."""
        return self.info is None


def choose(options: CheckpointOptions, folder: Path, step: int | None) -> Source | None:
    """The source to load from; None to start from nothing.

    Args:
        folder: this run's checkpoints.
        step: this one of them; None follows `options.load_step`.

    Raises:
        ConfigError: what was asked for is not there, is damaged, or is of another kind than was said.
    """
    found = {info.step: info for info in list_checkpoints(folder)}
    wanted = options.load_step if step is None else step
    if wanted == -1 and not found:
        if options.initial_load_path is None:
            logger.info("no checkpoint in %s: starting from step 0", folder)
            return None
        return _initial(options, Path(options.initial_load_path), folder)
    if options.initial_load_path is not None:
        logger.warning("%s is not used: this run has checkpoints of its own in %s", INITIAL, folder)
    return _resume(found, wanted, folder)


def _resume(found: dict[int, CheckpointInfo], wanted: int, folder: Path) -> Source:
    info, reason = _pick(found, wanted, folder)
    _require_undamaged(info)
    logger.info("loading checkpoint %s: %s", info.path, reason)
    if newer := [step for step in found if step > info.step and not found[step].model_only]:
        logger.warning(
            "checkpoints of later steps stay in %s (%s); a restart without load_step would take the newest of them",
            folder,
            ", ".join(map(str, newer)),
        )
    return Source(info.path, info, resumes=True, model_only=False)


def _pick(found: dict[int, CheckpointInfo], wanted: int, folder: Path) -> tuple[CheckpointInfo, str]:
    """This run's checkpoint to resume from, and why that one."""
    whole = {step: info for step, info in found.items() if not info.model_only}
    steps = ", ".join(map(str, whole)) or "none"
    if wanted == -1 and whole:
        info = whole[max(whole)]
        if last := [str(step) for step in found if step > info.step]:
            logger.warning(
                "%s: step %s holds only the weights (last_save_model_only), so the run goes on from step %d",
                folder,
                ", ".join(last),
                info.step,
            )
        return info, f"the newest of {len(whole)}"
    if wanted in whole:
        return whole[wanted], "asked for by load_step"
    if wanted == -1 or wanted in found:
        step = max(found) if wanted == -1 else wanted
        problem, hint = (
            f"the checkpoint of step {step} in {folder} holds only the weights, so no run can go on from it",
            f"start a new run from it: --{INITIAL}={folder / f'step-{step}'} and another --dump_folder",
        )
    else:
        problem, hint = f"there is no checkpoint of step {wanted} in {folder}", None
    raise ConfigError(Fault("checkpoint.load_step", problem, allowed=f"steps found: {steps}", hint=hint))


def _initial(options: CheckpointOptions, path: Path, folder: Path) -> Source:
    """What `initial_load_path` names, which must be of the kind that was said."""
    if not path.is_dir():
        raise ConfigError(Fault(INITIAL, f"there is no folder {path}"))
    what = "the weights" if options.initial_load_model_only else "everything"
    reason = f"{INITIAL}, since there is no checkpoint in {folder}"
    if options.initial_load_in_hf:
        if (path / METADATA).exists():
            raise ConfigError(
                Fault("checkpoint.initial_load_in_hf", f"{path} is a checkpoint of ours", hint="leave it away")
            )
        logger.info("loading the weights of the Hugging Face folder %s: %s", path, reason)
        return Source(path, None, resumes=False, model_only=True)
    if not (path / METADATA).is_file():
        raise ConfigError(_no_checkpoint(path))
    info = info_of(path)
    _require_undamaged(info)
    if info.model_only and not options.initial_load_model_only:
        raise ConfigError(
            Fault("checkpoint.initial_load_model_only", f"false, but {path} holds only the weights", allowed="true")
        )
    logger.info("loading %s of checkpoint %s: %s", what, path, reason)
    return Source(path, info, resumes=False, model_only=options.initial_load_model_only)


def _no_checkpoint(path: Path) -> Fault:
    """What could have been meant by a folder that is no checkpoint."""
    for inner in (path, path / "checkpoint"):
        if found := list_checkpoints(inner):
            hint = f"name one of its checkpoints, for example {found[-1].path}"
            return Fault(INITIAL, f"{path} is no checkpoint, but a folder with some", hint=hint)
    if any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        hint = "say that it is in Hugging Face format: --checkpoint.initial_load_in_hf"
        return Fault(INITIAL, f"{path} is no checkpoint of ours", hint=hint)
    return Fault(
        INITIAL, f"{path} is no whole checkpoint: it has no {METADATA}", allowed="a folder …/checkpoint/step-N"
    )


def _require_undamaged(info: CheckpointInfo) -> None:
    if damage := info.damage():
        hint = "use an older one (--checkpoint.load_step in the run itself), or remove this folder"
        raise ConfigError(Fault(str(info.path), f"damaged since it was saved: {'; '.join(damage[:4])}", hint=hint))
