"""What can be set about checkpoints, with torchtitan's names and meanings. Needs no torch.

In: values. Out: `CheckpointOptions`, the fields of `CheckpointManager.Config`, and every fault among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hp_protocols.configurable import Configurable
from hp_protocols.errors import Fault

__all__ = ["CheckpointOptions"]

_LEAST = {"interval": 1, "keep_latest_k": 0, "load_step": -1}


@dataclass(kw_only=True, slots=True)
class CheckpointOptions(Configurable.Config):
    """When to save and what, and where to start from."""

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
    """How a save overlaps training: not at all; after a copy in host memory; after a copy that an accelerator makes in
    page-locked memory while the host goes on. Both keep memory for one copy of what each rank writes."""

    load_only: bool = False
    """Load, but save nothing."""

    enable_first_step_checkpoint: bool = False
    """Save after step 1 as well, to see early whether saving works."""

    exclude_from_loading: tuple[str, ...] = ()
    """Parts to leave as they are on load: model, optimizer, rng, or a state (lr_scheduler, dataloader, …)."""

    initial_load_path: str | None = None
    """Checkpoint (…/step-N) or Hugging Face folder to start from while this run has no checkpoint of its own."""

    initial_load_model_only: bool = True
    """Take only the weights from initial_load_path; otherwise optimizer, schedule, data and step as well."""

    initial_load_in_hf: bool = False
    """initial_load_path is a folder in Hugging Face format (safetensors)."""

    last_save_model_only: bool = False
    """Save only the weights at the end of training. The run can then not be resumed from its last step."""

    last_save_in_hf: bool = False
    """Also write the weights in Hugging Face format at the end of training, into step-N-hf beside the checkpoints; with
    last_save_model_only in place of the last checkpoint."""

    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in a last save that holds only weights, and in Hugging Face format."""

    def faults(self, path: str) -> list[Fault]:
        """Values that no run could have."""
        faults = []
        for name, least in _LEAST.items():
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
        if self.async_mode not in ("disabled", "async", "async_with_pinned_mem"):
            faults.append(
                Fault(
                    f"{path}.async_mode",
                    f"{self.async_mode!r} is unknown",
                    allowed="disabled, async, async_with_pinned_mem",
                )
            )
        return faults + self._faults_of_sources(path)

    def _faults_of_sources(self, path: str) -> list[Fault]:
        faults = []
        if self.initial_load_in_hf and self.initial_load_path is None:
            faults.append(
                Fault(
                    f"{path}.initial_load_in_hf",
                    "says nothing without a folder to load from",
                    hint=f"give --{path}.initial_load_path=FOLDER, with model.safetensors in it",
                )
            )
        if self.initial_load_in_hf and not self.initial_load_model_only:
            faults.append(
                Fault(
                    f"{path}.initial_load_model_only",
                    "false, but a Hugging Face folder holds nothing but the weights",
                    hint="leave it at its default with initial_load_in_hf",
                )
            )
        if self.export_dtype != "float32" and not (self.last_save_model_only or self.last_save_in_hf):
            faults.append(
                Fault(
                    f"{path}.export_dtype",
                    f"{self.export_dtype} says nothing without last_save_model_only or last_save_in_hf",
                    hint="a checkpoint to resume from keeps the types of training",
                )
            )
        if self.load_only and (self.last_save_model_only or self.last_save_in_hf):
            faults.append(Fault(f"{path}.load_only", "given together with a last save, which it would leave out"))
        return faults
