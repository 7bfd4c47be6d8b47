"""From a model's config to a sharded, initialised module: meta device, parallelise, allocate, initialise.

In: the trainer's config, the environment, a seed. Out: a `BuiltModel`. Parameters are the same for every layout.
Under `compile.mode = graph` it is still on the meta device, since the graph shards it first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hp_protocols import BaseModel, BaseStateDictAdapter, ModelSpec
from hp_protocols.errors import ConfigError, Fault
from hp_trainer.environment import Environment

if TYPE_CHECKING:
    from hp_trainer.hyper_trainer import HyperTrainer


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """The module to train, the number of its parameters, its floating-point operations per token (forward and
    backward), the config that it was built from, and what fills its parameters and buffers once they have memory."""

    module: torch.nn.Module
    parameters: int
    flops_per_token: int
    config: BaseModel.Config
    initialise: Callable[[], None]


def check_vocabulary(config: HyperTrainer.Config, tokenizer_vocab_size: int) -> None:
    """Every id of the tokenizer needs a row in the model's embedding.

    Raises:
        ConfigError: the tokenizer has more ids than the model.
    """
    rows = getattr(config.model_spec.model, "vocab_size", None)
    if rows is not None and tokenizer_vocab_size > rows:
        raise ConfigError(
            Fault(
                "tokenizer",
                f"has {tokenizer_vocab_size} ids, the model {config.model_spec.name}/{config.model_spec.flavor} "
                f"has {rows} rows in its embedding",
                allowed=f"at most {rows} ids",
                hint="use another flavour of the model or a smaller tokenizer (--tokenizer.vocab_size)",
            )
        )


def model_config_of(spec: ModelSpec, processes: int) -> BaseModel.Config:
    """A copy of the spec's model config, for this trainer to fill in; the recorded one stays as it was given.

    Raises:
        ConfigError: the spec is not one that this many processes can train.
    """
    if spec.model is None:
        problem = f"{spec.name} has no model config (ModelSpec v1); HyperTrainer builds v2 models only"
        raise ConfigError(Fault("model_spec", problem))
    if spec.parallelize_fn is None and processes > 1:
        problem = f"{spec.name} has no parallelize_fn, so it can train in one process only"
        raise ConfigError(Fault("model_spec", problem, hint="train in one process, or give its ModelSpec one"))
    return copy.deepcopy(spec.model)


def build_model(config: HyperTrainer.Config, environment: Environment, seed: int) -> BuiltModel:
    """Build the model of `config.model_spec` on this rank.

    Raises:
        RuntimeError: a submodule does not follow the Module protocol.
        ConfigError: the model cannot be built or sharded with these options.
    """
    spec = config.model_spec
    model_config = model_config_of(spec, environment.world_size)
    if faults := model_config.run_faults(trainer_config=config):
        raise ConfigError(faults)
    model_config.update_from_config(trainer_config=config)
    model = model_config.build_on_meta(config.training.dtype)
    model.verify_module_protocol()
    parameters, flops = model_config.get_nparams_and_flops(model, config.training.seq_len)
    module: torch.nn.Module = model
    if spec.parallelize_fn is not None:
        module = spec.parallelize_fn(model, parallel_dims=environment.parallel_dims, trainer_config=config)

    def initialise() -> None:
        with torch.no_grad():
            model.init_states(buffer_device=environment.device, seed=seed)

    module.train()
    if config.compile.mode != "graph":
        # Offloaded shards live in host memory; FSDP moves them to the device when it gathers.
        home = torch.device("cpu") if config.training.enable_cpu_offload else environment.device
        module.to_empty(device=home)
        initialise()
    return BuiltModel(module, parameters, flops, model_config, initialise)


def build_state_dict_adapter(config: HyperTrainer.Config, model: BuiltModel) -> BaseStateDictAdapter | None:
    """The translator from and to Hugging Face's names, if the model has one and this run needs it.

    Raises:
        ConfigError: the folder of published weights cannot be used.
    """
    checkpoint, spec = config.checkpoint, config.model_spec
    if spec.state_dict_adapter is None or not (checkpoint.initial_load_in_hf or checkpoint.last_save_in_hf):
        return None
    folder = checkpoint.initial_load_path if checkpoint.initial_load_in_hf else None
    # A resumed run no longer needs the folder; a new one hears from the checkpointer that it is not there.
    try:
        return spec.state_dict_adapter(model.config, folder if folder and Path(folder).is_dir() else None)
    except (OSError, ValueError) as error:
        raise ConfigError(Fault("checkpoint.initial_load_path", str(error))) from error
