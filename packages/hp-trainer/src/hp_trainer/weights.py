"""Weights between runs and Hugging Face folders, in one process.

In: a run folder, or a Hugging Face folder and a recipe's config. Out: the path of what was written.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hp_components import CheckpointManager
from hp_components.checkpoint import load_model
from hp_components.checkpoint.contents import ModelParts
from hp_components.checkpoint.export import Exporter
from hp_protocols.errors import ConfigError, Fault
from hp_trainer.sampling import built_alone, open_run

if TYPE_CHECKING:
    from hp_protocols import BaseModel, ModelSpec
    from hp_protocols.state_dict_adapter import BaseStateDictAdapter
    from hp_trainer.hyper_trainer import HyperTrainer

__all__ = ["export_run", "import_folder"]


def export_run(run_folder: Path, into: Path | None = None, *, step: int | None = None, dtype: str = "float32") -> Path:
    """Write a run's weights, config.json and tokenizer as `step-N-hf`, which transformers loads.

    Args:
        into: the folder to write it in; None means beside the run's checkpoints.
        step: of the checkpoint; None means the newest.
        dtype: of the weights: float32, bfloat16 or float16.

    Raises:
        ConfigError: this is no run, it has no such checkpoint, or its model has no state-dict adapter.
        CheckpointError: it could not be written; nothing is left over.
    """
    with open_run(run_folder, step) as run:
        adapter = _adapter(run.config.model_spec, run.model.config)
        load_model(run.model.module, run.checkpoint.path)
        folder = into or run_folder / run.config.checkpoint.folder
        exporter = Exporter(folder, ModelParts([run.model.module]), adapter, run.tokenizer, None)
        return exporter.export(run.checkpoint.step, dtype)


def import_folder(folder: Path, config: HyperTrainer.Config, into: Path) -> Path:
    """Write the weights of a Hugging Face folder as a checkpoint of `config`'s model, `into/checkpoint/step-0`.

    A run starts from it with `--checkpoint.initial_load_path`, in any layout.

    Raises:
        ConfigError: the folder is not usable, or not of this model; every name that does not fit is told.
        CheckpointError: it could not be written; nothing is left over.
    """
    config = copy.deepcopy(config)
    with built_alone(config) as (model, _):
        adapter = _adapter(config.model_spec, model.config)
        options = CheckpointManager.Config(
            initial_load_path=str(folder),
            initial_load_in_hf=True,
            last_save_model_only=True,
            export_dtype=config.training.dtype,
        )
        manager: CheckpointManager = options.build(
            run_folder=into, model_parts=[model.module], state_dict_adapter=adapter
        )
        if (latest := manager.latest()) is not None:
            problem = f"holds checkpoints already (step-{latest})"
            raise ConfigError(Fault("--to", f"{into} {problem}", hint="choose a folder that does not exist"))
        manager.load()
        manager.save(0, last=True)
        manager.close()
    return into / options.folder / "step-0"


def _adapter(spec: ModelSpec, config: BaseModel.Config | Any) -> BaseStateDictAdapter:
    if spec.state_dict_adapter is None:
        problem = f"{spec.name} has no state-dict adapter, which translates its names to Hugging Face's"
        raise ConfigError(Fault("model_spec", problem, hint="set state_dict_adapter in its ModelSpec"))
    return spec.state_dict_adapter(config)
