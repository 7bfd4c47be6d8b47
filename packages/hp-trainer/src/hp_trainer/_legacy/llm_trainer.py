"""LLMTrainer: the older trainer's thirteen build steps and its callbacks, over HyperTrainer's parts.

In: a `HyperTrainerConfig` (`parse_args(HyperTrainerConfig, argv)`). Out: `train()` leaves a run folder with
checkpoints, metrics.jsonl, loss.png and resolved.yaml, and returns a `TrainResult`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from hp_components import (
    BaseDataLoader,
    BaseTokenizer,
    CorpusTokenizer,
    HuggingFaceTokenizer,
    LRSchedulersContainer,
    OptimizersContainer,
)
from hp_components.data import build_tokenizer
from hp_config import HyperTrainerConfig, dump_yaml, find_faults
from hp_protocols import ModelSpec, get_spec
from hp_protocols.errors import ConfigError, Fault
from hp_protocols.platform import get_platform
from hp_trainer import environment as env
from hp_trainer._legacy import bare_model, data
from hp_trainer._legacy.callbacks import Callback, default_callbacks
from hp_trainer._legacy.processes import backend_faults, local_rank
from hp_trainer._legacy.run_place import RunPlace, choose_place, hold_place
from hp_trainer._legacy.sections import in_older_words, make_sections
from hp_trainer._legacy.step import LegacyStep, LocalLoss
from hp_trainer.base_trainer import BaseTrainer, TrainResult
from hp_trainer.faults import activity
from hp_trainer.run_folder import RunFolder
from hp_trainer.train_state import TrainState
from hp_trainer.training_step import StepResult

__all__ = ["LLMTrainer"]

logger = logging.getLogger(__name__)

LARGEST_OWN_VOCABULARY = 32_768
"""Tokens of a tokenizer that is trained on the corpus, if the model has room for more."""


class LLMTrainer(BaseTrainer):
    """Trains a bare model by its string plans. `add_callback` adds the caller's own hooks."""

    def __init__(self, args: HyperTrainerConfig, callbacks: Sequence[Callback] = ()) -> None:
        self.args = args
        self.callbacks: list[Callback] = []
        self.added = list(callbacks)
        with _older_words():
            self.build()

    def build_steps(self) -> list[Callable[[], None]]:
        """The thirteen steps of the older trainer, and the hook behind them."""
        return [
            self.setup,
            self.build_model,
            self.freeze_modules,
            self.build_model_assets,
            self.build_data_transform,
            self.build_dataset,
            self.build_collate,
            self.build_dataloader,
            self.parallelise_model,
            self.build_optimizer,
            self.build_lr_scheduler,
            self.build_training_context,
            self.build_callbacks,
            self.start_callbacks,
        ]

    # ---- build steps ----------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Join the other ranks, translate the sections, choose the run folder and the seed."""
        train = self.args.train
        # Again, for arguments that were made in Python.
        faults = find_faults(self.args, int(os.environ.get("WORLD_SIZE", "1")))
        self.sections, refused = make_sections(self.args)
        faults += [fault for fault in refused if fault.where not in {known.where for known in faults}]
        faults += backend_faults(train.comm_backend, get_platform().device_type())
        if faults:
            raise ConfigError(faults)
        with local_rank(train.local_rank):
            self.environment = env.start_environment(
                self.sections.parallelism, self.sections.comm, self.sections.debug, backend=train.comm_backend
            )
        self._choose_folder()
        self.state = TrainState(seed=train.seed)
        self.first_step = 0
        self.environment.platform.manual_seed(train.seed)

    def _choose_folder(self) -> None:
        checkpoint, is_main = self.args.train.checkpoint, self.environment.is_main
        chosen = self.environment.agree(lambda: choose_place(checkpoint) if is_main else None)
        self.place: RunPlace = self.environment.broadcast(chosen)  # type: ignore[assignment]
        self.run_folder = RunFolder(Path(self.place.folder))
        self.on_main(self.run_folder.require_usable)
        if self.place.resumes:
            self._hold_folder()

    def _hold_folder(self) -> None:
        """Take the folder for this run, alone, before anything in it is read or written."""
        checkpoint, is_main = self.args.train.checkpoint, self.environment.is_main
        held = self.environment.agree(lambda: hold_place(checkpoint) if is_main else None)
        self.place = self.environment.broadcast(held[0] if held else None)  # type: ignore[assignment]
        self.run_folder = held[1] if held else RunFolder(Path(self.place.folder))
        if self.place.occupied:
            logger.warning(
                "%s holds a run; this one is written to %s (train.checkpoint.load_path=%s goes on with the other)",
                self.place.occupied,
                self.place.folder,
                self.place.occupied,
            )

    def build_model(self) -> None:
        """The bare module on `init_device`, its dimensions from the section and from `weights_path`."""
        model, train = self.args.model, self.args.train
        self.spec: ModelSpec = self.environment.agree(lambda: get_spec(model.name))
        if self.spec.build_model_fn is None:
            hint = f"hp train --module {model.name} trains it, or name qwen3_5"
            raise ConfigError(Fault("model.name", f"{model.name} has no build_model_fn (ModelSpec v1)", hint=hint))
        self._check_init_device(train.init_device)
        with torch.device(train.init_device):
            self.model: torch.nn.Module = self.environment.agree(lambda: build_bare_model(self.spec, model))
        dimensions: Any = self.model.config
        # Machines with different files at weights_path would each train a model of its own.
        shown = re.sub(r" at 0x[0-9a-f]+", "", repr(dimensions))
        self.environment.require_same("model", shown, shown)
        self.vocab_size: int = dimensions.vocab_size
        longest = getattr(dimensions, "max_position_embeddings", None)
        if longest is not None and self.args.data.max_seq_len > longest:
            problem = f"{self.args.data.max_seq_len} is more than the model's max_position_embeddings {longest}"
            raise ConfigError(Fault("data.max_seq_len", problem))
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def _check_init_device(self, name: str) -> None:
        if name not in ("meta", "cpu", self.environment.device.type):
            problem = f"{name!r}, but this run is on {self.environment.device.type}"
            raise ConfigError(Fault("train.init_device", problem, f"meta, cpu, {self.environment.device.type}"))

    def freeze_modules(self) -> None:
        """Parameters that are not trained, by parts of their names."""
        if self.args.model.freeze_modules:
            count = bare_model.freeze(self.model, self.args.model.freeze_modules)
            logger.info("frozen: %s of %s parameters", f"{count:,}", f"{self.parameters:,}")

    def build_model_assets(self) -> None:
        """The tokenizer's config: a folder, or one trained on the corpus; none where the data are token ids."""
        model = self.args.model
        self.tokenizer_config: BaseTokenizer.Config | None = None
        if self.args.data.type not in ("json_file", "hf_datasets"):
            return
        folder = model.tokenizer_path or model.weights_path
        self.tokenizer_config = (
            CorpusTokenizer.Config(vocab_size=min(self.vocab_size, LARGEST_OWN_VOCABULARY))
            if folder is None
            else HuggingFaceTokenizer.Config(tokenizer_path=folder)
        )

    def build_data_transform(self) -> None:
        """What becomes of a record: packed text, a conversation with labels on its answers, or a row as it is."""
        section = self.args.data
        self.data_config = self._data_config(section.train_path or "", training=True)
        evaluate = self.args.train.eval
        self.eval_config: BaseDataLoader.Config | None = None
        if evaluate.eval_steps:
            self.eval_config = self._data_config(evaluate.eval_dataset or "", training=False)

    def _data_config(self, path: str, *, training: bool) -> BaseDataLoader.Config:
        section, epochs = self.args.data, self.args.train.num_train_epochs if training else 1
        if section.type in ("json_file", "hf_datasets"):
            return data.text_config(section, epochs, path, training=training)
        return data.LegacyRows.Config(
            preset_path=path if section.type == "preset_pt" else None,
            random_rows=section.train_size,
            vocab_size=self.vocab_size,
            shuffle=section.shuffle and training,
            epochs=epochs,
            train_size=section.train_size if training else None,
            num_workers=section.num_workers,
            prefetch_factor=section.prefetch_factor,
            pin_memory=None if section.pin_memory else False,
        )

    def build_dataset(self) -> None:
        """Train or read the tokenizer; the text itself is tokenised once, on rank 0, when the dataloader is made."""
        self.tokenizer: BaseTokenizer | None = None
        if self.tokenizer_config is None:
            return
        config = self.tokenizer_config
        self.tokenizer = self.environment.main_first(lambda: build_tokenizer(config, self.data_config))
        if self.tokenizer.vocab_size > self.vocab_size:
            problem = f"has {self.tokenizer.vocab_size} ids, the model has {self.vocab_size} rows in its embedding"
            raise ConfigError(Fault("model.tokenizer_path", problem, hint=f"vocab_size: {self.tokenizer.vocab_size}"))

    def build_collate(self) -> None:
        """How labels become those of the next token. Packed text and conversations have them so already."""
        if self.args.data.type == "preset_pt":
            for config in (self.data_config, self.eval_config):
                if isinstance(config, data.LegacyRows.Config):
                    config.collate = data.shift_labels

    def build_dataloader(self) -> None:
        environment, train = self.environment, self.args.train
        self.dataloader = environment.main_first(
            lambda: self.data_config.build(
                tokenizer=self.tokenizer,
                seq_len=self.args.data.max_seq_len,
                local_batch_size=train.micro_batch_size,
                dp_rank=environment.dp_rank,
                dp_world_size=environment.dp_degree,
                seed=train.seed,
            )
        )
        # Ranks on machines with different files would each read an order of its own.
        environment.require_same("data", str(self.dataloader), self.dataloader.fingerprint)

    def parallelise_model(self) -> None:
        """Lay the model out, give it memory and values: the same for every layout and `init_device`."""
        assert self.spec.parallelize_fn is not None
        for key, degree in (("tp_plan", "tp"), ("cp_modules", "cp")):
            if getattr(self.args.model, key) and getattr(self.args.train.accelerator, degree) == 1:
                logger.warning("model.%s splits nothing: train.accelerator.%s is 1", key, degree)
        fill = self.model.init_parameter
        model = self.spec.parallelize_fn(
            self.model, parallel_dims=self.environment.parallel_dims, trainer_config=self.sections
        )
        if self.args.train.init_device == "meta":
            bare_model.make_empty(model, self.environment.device)
        else:
            model.to(self.environment.device)
        # Again: building on a device with memory has drawn numbers already.
        self.environment.platform.manual_seed(self.args.train.seed)
        bare_model.fill_parameters(model, fill)
        mixed = self.args.train.mixed_precision
        if mixed.output_dtype is not None:
            bare_model.cast_output(model, self.environment.platform.dtype_map[mixed.output_dtype])
        self.model = model.train()
        # Each data-parallel rank drops out different elements; resumed runs restore the state from the checkpoint.
        self.environment.platform.manual_seed(self.args.train.seed + 1 + self.environment.dp_rank)

    def build_optimizer(self) -> None:
        self.optimizer: OptimizersContainer = self.sections.optimizer.build(model_parts=[self.model])
        if self.spec.post_optimizer_build_fn is not None:
            self.spec.post_optimizer_build_fn(self.optimizer, [self.model], self.environment)

    def build_lr_scheduler(self) -> None:
        self.lr_scheduler: LRSchedulersContainer = self.sections.lr_scheduler.build(
            optimizers=self.optimizer, training_steps=self.total_steps
        )

    def build_training_context(self) -> None:
        train, section = self.args.train, self.args.train.optimizer
        self.training_step: LegacyStep = LegacyStep(
            environment=self.environment,
            model=self.model,
            loss_fn=self.sections.loss.build(),
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            max_norm=section.max_grad_norm,
            micro_batches=train.global_batch_size // (train.micro_batch_size * self.environment.dp_degree),
            rank_average=section.loss_aggregation == "rank_average",
            local_loss=LocalLoss(),
            after_substep=lambda: self.notify("on_substep_end"),
            before_update=lambda: self.notify("on_pre_optimizer_step"),
        )

    def build_callbacks(self) -> None:
        """Everything that reads or writes files of the run. A new folder is made only now, behind all that can fail."""
        if not self.place.resumes:
            self._hold_folder()
        self.callbacks = [*default_callbacks(self), *self.added]

    def start_callbacks(self) -> None:
        """Everything is built: `on_init_end`, in which a checkpoint is loaded too."""
        self.notify("on_init_end")

    # ---- callbacks -------------------------------------------------------------------------------------------

    def add_callback(self, callback: Callback) -> None:
        """Add hooks of one's own, called after those that are there; from now on, so without `on_init_end`."""
        self.callbacks.append(callback)

    def notify(self, hook: str, *values: object) -> None:
        """Call a hook of every callback, in their order."""
        for callback in self.callbacks:
            with activity.during(f"{type(callback).__name__}.{hook}"):
                getattr(callback, hook)(self, *values)

    # ---- training --------------------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        with _older_words():
            return super().train()

    @property
    def total_steps(self) -> int:
        return self.args.train.max_steps

    def begin(self) -> None:
        self.on_main(self.run_folder.open)  # again, where `train` is called again
        if self.environment.is_main:
            self.run_folder.write_resolved(dump_yaml(self.args), self.state.step)
            if self.tokenizer is not None:
                self.tokenizer.save(self.run_folder.path / "tokenizer")
        self.first_step, self.epoch = self.state.step, self._epoch()
        self.reason = ""
        self.notify("on_train_begin")
        self.notify("on_epoch_begin")

    @contextlib.contextmanager
    def around_steps(self) -> Iterator[None]:
        """Callbacks that have to be left whatever happens, such as the profiler."""
        with contextlib.ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback.around_steps(self))
            yield

    def before_fetch(self) -> None:
        if (epoch := self._epoch()) != self.epoch and not self._data_ended(epoch):
            self.notify("on_epoch_end")
            self.epoch = epoch
            self.notify("on_epoch_begin")

    def before_step(self) -> None:
        self.notify("on_step_begin")

    def after_step(self, result: StepResult) -> None:
        self.local_loss = self.training_step.local_loss.take()
        self.notify("on_step_end", result)

    def finish(self, reason: str) -> TrainResult:
        self.reason, self.saved = reason, False
        self.notify("on_epoch_end")
        self.notify("on_train_end")
        return TrainResult(self.state.step, reason, self.run_folder.path, self.saved)

    def release(self) -> None:
        # Each is closed even if one before it fails, and the failure is still raised.
        with contextlib.ExitStack() as stack:
            for callback in reversed(self.callbacks):
                stack.callback(callback.close, self)

    @property
    def ended_by_itself(self) -> bool:
        """Whether the last step was the run's last, and not one at which it was stopped."""
        return self.reason in ("finished", "data_exhausted")

    def _epoch(self) -> int:
        return self.dataloader.state_dict()["epoch"]

    def _data_ended(self, epoch: int) -> bool:
        epochs = getattr(self.data_config, "epochs", None)
        return epochs is not None and epoch >= epochs


@contextlib.contextmanager
def _older_words() -> Iterator[None]:
    """Faults of the shared parts, under the keys of the older file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(map(in_older_words, error.faults)) from error


def build_bare_model(spec: ModelSpec, section: Any) -> torch.nn.Module:
    """The bare module of a `model` section: its own keys, then `config_overrides`, which win."""
    assert spec.build_model_fn is not None
    names = (
        *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("vocab_size", "max_position_embeddings"),
    )
    given = {name: value for name in names if (value := getattr(section, name)) is not None}
    plans = {name: value for name in ("weights_path", "tp_plan", "cp_modules") if (value := getattr(section, name))}
    module: torch.nn.Module = spec.build_model_fn(**plans, **{**given, **(section.config_overrides or {})})
    return module
