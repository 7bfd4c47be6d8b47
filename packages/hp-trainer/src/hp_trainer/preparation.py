"""What is done once before the ranks start: read and check the configuration, fill the caches.

In: arguments of `hp train`. Out: a checked config whose run folder is chosen; tokenizer and tokens in the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_config import ConfigManager, HyperTrainerConfig
from hp_protocols.errors import ConfigError
from hp_trainer.cross_checks import machine_faults
from hp_trainer.run_folder import RESOLVED, default_run_folder

if TYPE_CHECKING:
    from hp_trainer._legacy import LLMTrainer
    from hp_trainer.hyper_trainer import HyperTrainer


def load_config(arguments: list[str], world_size: int) -> HyperTrainer.Config | HyperTrainerConfig:
    """The checked config of these arguments. A run's own resolved.yaml means that run, wherever its folder is now.

    Raises:
        ConfigError: every mistake in them, in the layout for this many processes, or what this machine lacks for it.
    """
    manager = ConfigManager()
    config = manager.parse_args(arguments, world_size=world_size)
    if isinstance(config, HyperTrainerConfig):
        return config
    if faults := machine_faults(config):
        raise ConfigError(faults)
    asked_for = any(word.replace("-", "_").startswith("__dump_folder") for word in arguments)
    if manager.file is not None and manager.file.name == RESOLVED and not asked_for:
        config.dump_folder = str(manager.file.parent)
    return config


def build_trainer(config: HyperTrainer.Config | HyperTrainerConfig) -> HyperTrainer | LLMTrainer:
    """The trainer that a configuration is for.

    Raises:
        ConfigError: every mistake that is found before training.
    """
    if isinstance(config, HyperTrainerConfig):
        from hp_trainer._legacy import LLMTrainer

        return LLMTrainer(config)
    return config.build()


def prepare(config: HyperTrainer.Config) -> None:
    """Choose the run folder, train or load the tokenizer and tokenize the text, so that the ranks find all of it.

    Raises:
        ConfigError: the data or the tokenizer cannot be used.
    """
    from hp_components.data import prepare as prepare_data
    from hp_trainer.model_building import check_vocabulary

    if config.dump_folder is None:
        config.dump_folder = str(default_run_folder(config.recipe))
    tokenizer = prepare_data(config.tokenizer, config.dataloader)
    check_vocabulary(config, tokenizer.vocab_size)
