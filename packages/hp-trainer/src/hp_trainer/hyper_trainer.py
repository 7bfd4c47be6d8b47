"""HyperTrainer: a training run as a list of steps.

In: a `HyperTrainer.Config` (from a recipe, the command line or a run's resolved.yaml). Out: `train()` leaves a run
folder with checkpoints, metrics.jsonl, loss.png and resolved.yaml, and returns a `TrainResult`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hp_components import (
    BaseDataLoader,
    BaseLoss,
    BaseTokenizer,
    CheckpointManager,
    CorpusTokenizer,
    CrossEntropyLoss,
    LRSchedulersContainer,
    MetricsProcessor,
    OptimizersContainer,
    Profiler,
    TextDataLoader,
)
from hp_components.data import build_tokenizer
from hp_config import (
    ActivationCheckpointConfig,
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
    check_layout,
    dump_yaml,
)
from hp_protocols import Configurable, ModelSpec
from hp_protocols.errors import ConfigError, Fault
from hp_trainer import environment as env
from hp_trainer.base_trainer import BaseTrainer, TrainResult, why_skipped
from hp_trainer.cross_checks import cross_faults, document_mask_faults, machine_faults
from hp_trainer.faults import activity
from hp_trainer.graph_mode import GraphMode, start_graph_mode
from hp_trainer.model_building import build_model, build_state_dict_adapter, check_vocabulary
from hp_trainer.run_folder import RunFolder, default_run_folder
from hp_trainer.train_state import TrainState
from hp_trainer.training_step import StepResult, TrainingStep, count_micro_batches
from hp_trainer.validation import Validator

logger = logging.getLogger(__name__)


class HyperTrainer(BaseTrainer, Configurable):
    """Trains the model of a recipe. Building it does all that can fail early and writes nothing to the run folder."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model_spec: ModelSpec = field(metadata={"cli": False})
        """The model, its flavour and the functions that shard it; set by the recipe."""

        dump_folder: str | None = None
        """The run folder; by default a new one, outputs/<recipe>/<date-time>. An existing one is resumed."""

        recipe: str = field(default="", metadata={"cli": False})
        """`<module>.<recipe>` this config came from, for resolved.yaml and the default run folder."""

        tokenizer: BaseTokenizer.Config = field(default_factory=CorpusTokenizer.Config)
        dataloader: BaseDataLoader.Config = field(default_factory=TextDataLoader.Config)
        optimizer: OptimizersContainer.Config = field(default_factory=OptimizersContainer.Config)
        lr_scheduler: LRSchedulersContainer.Config = field(default_factory=LRSchedulersContainer.Config)
        loss: BaseLoss.Config = field(default_factory=CrossEntropyLoss.Config)
        training: TrainingConfig = field(default_factory=TrainingConfig)
        parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
        activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
        compile: CompileConfig = field(default_factory=CompileConfig)
        comm: CommConfig = field(default_factory=CommConfig)
        checkpoint: CheckpointManager.Config = field(default_factory=CheckpointManager.Config)
        metrics: MetricsProcessor.Config = field(default_factory=MetricsProcessor.Config)
        profiler: Profiler.Config = field(default_factory=Profiler.Config)
        validation: Validator.Config = field(default_factory=Validator.Config)
        debug: DebugConfig = field(default_factory=DebugConfig)

        def faults(self, path: str) -> list[Fault]:
            """Sections that cannot be had together; each section speaks for itself."""
            return cross_faults(self)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.build()

    def build_steps(self) -> list[Callable[[], None]]:
        """What building a run consists of, in order."""
        return [
            self.start_environment,
            self.check_layout,
            self.check_machine,
            self.choose_run_folder,
            self.hold_existing_run,
            self.choose_seed,
            self.build_tokenizer,
            self.build_dataloader,
            self.build_model,
            self.build_loss,
            self.build_optimizer,
            self.build_training_step,
            self.build_validator,
            self.build_metrics,
            self.build_profiler,
            self.build_checkpointer,
            self.load_checkpoint,
        ]

    # ---- build steps: nothing is written to the run folder before all of them are done -----------------------

    def start_environment(self) -> None:
        self.environment = env.start_environment(self.config.parallelism, self.config.comm, self.config.debug)

    def check_layout(self) -> None:
        if faults := [*check_layout(self.config, self.environment.world_size), *cross_faults(self.config)]:
            raise ConfigError(faults)

    def check_machine(self) -> None:
        def check() -> None:
            if faults := machine_faults(self.config):
                raise ConfigError(faults)

        self.environment.agree(check)

    def choose_run_folder(self) -> None:
        chosen = self.config.dump_folder or str(default_run_folder(self.config.recipe))
        self.run_folder = RunFolder(Path(self.environment.broadcast(chosen)))
        self.config.dump_folder = str(self.run_folder.path.absolute())

    def hold_existing_run(self) -> None:
        """A folder that holds a run already is taken now, before anything in it is read."""

        def hold() -> None:
            self.run_folder.require_usable()
            if self.run_folder.holds_a_run:
                self.run_folder.open()

        self.on_main(hold)

    def choose_seed(self) -> None:
        if self.config.debug.seed is None:
            drawn = self.run_folder.recorded_seed() if self.environment.is_main else None
            seed = self.environment.broadcast(env.draw_seed() if drawn is None else drawn)
            logger.info("debug.seed is not given: %s is %s", seed, "drawn" if drawn is None else "taken from the run")
            self.config.debug.seed = seed
        self.seed: int = self.config.debug.seed
        self.state = TrainState(seed=self.seed)
        self.environment.platform.manual_seed(self.seed)

    def build_tokenizer(self) -> None:
        config = self.config
        self.tokenizer: BaseTokenizer = self.environment.main_first(
            lambda: build_tokenizer(config.tokenizer, config.dataloader)
        )
        check_vocabulary(config, self.tokenizer.vocab_size)

    def build_dataloader(self) -> None:
        environment, training = self.environment, self.config.training
        self.dataloader: BaseDataLoader = environment.main_first(
            lambda: self.config.dataloader.build(
                tokenizer=self.tokenizer,
                seq_len=training.seq_len,
                local_batch_size=training.local_batch_size,
                dp_rank=environment.dp_rank,
                dp_world_size=environment.dp_degree,
                seed=self.seed,
            )
        )
        # Ranks on machines with different files would each read an order of its own.
        environment.require_same("dataloader", str(self.dataloader), self.dataloader.fingerprint)

    def build_model(self) -> None:
        self.model = build_model(self.config, self.environment, self.seed)
        # Each data-parallel rank drops out different elements; resumed runs restore the state from the checkpoint.
        self.environment.platform.manual_seed(self.seed + 1 + self.environment.dp_rank)

    def build_loss(self) -> None:
        self.loss_fn: BaseLoss = self.config.loss.build()
        self.loss_fn.check_model(self.model.module)

    def build_optimizer(self) -> None:
        self.graph: GraphMode | None = None
        if self.config.compile.mode == "graph":
            self.graph = start_graph_mode(self.model, self.config, self.environment, self.loss_fn)
        self.optimizer: OptimizersContainer = (
            self.graph.optimizer if self.graph else self.config.optimizer.build(model_parts=[self.model.module])
        )
        if self.config.model_spec.post_optimizer_build_fn is not None:
            self.config.model_spec.post_optimizer_build_fn(self.optimizer, [self.model.module], self.environment)
        self.lr_scheduler: LRSchedulersContainer = self.config.lr_scheduler.build(
            optimizers=self.optimizer, training_steps=self.config.training.steps
        )

    def build_training_step(self) -> None:
        training = self.config.training
        if faults := document_mask_faults(self.dataloader, self.model.module):
            raise ConfigError(faults)
        make = self.graph.training_step if self.graph else TrainingStep
        self.training_step: TrainingStep = make(
            environment=self.environment,
            model=self.model.module,
            loss_fn=self.loss_fn,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            max_norm=training.max_norm,
            micro_batches=count_micro_batches(training, self.environment.dp_degree),
        )

    def build_validator(self) -> None:
        self.validator: Validator | None = None
        if self.config.validation.enable:
            training = self.config.training
            self.validator = self.config.validation.build(
                environment=self.environment,
                training_step=self.training_step,
                tokenizer=self.tokenizer,
                seq_len=training.seq_len,
                local_batch_size=training.local_batch_size,
                seed=self.seed,
            )

    def build_metrics(self) -> None:
        self.metrics: MetricsProcessor = self.config.metrics.build(
            run_folder=self.run_folder.path,
            total_steps=self.config.training.steps,
            rank=self.environment.rank,
            flops_per_token=self.model.flops_per_token,
            world_size=self.environment.world_size,
            compute_dtype=self.config.training.mixed_precision_param,
            title=self.config.recipe.rpartition(".")[2],
            config_dict=self.config.to_dict(),
        )

    def build_profiler(self) -> None:
        self.profiler: Profiler = self.config.profiler.build(
            run_folder=self.run_folder.path, rank=self.environment.rank
        )

    def build_checkpointer(self) -> None:
        self.checkpointer: CheckpointManager = self.config.checkpoint.build(
            run_folder=self.run_folder.path,
            model_parts=[self.model.module],
            optimizers=self.graph.optimizer_state if self.graph else self.optimizer,
            states={
                "lr_scheduler": self.lr_scheduler,
                "dataloader": self.dataloader,
                "train_state": self.state,
                "metrics": self.metrics,
            },
            state_dict_adapter=build_state_dict_adapter(self.config, self.model),
            tokenizer=self.tokenizer,
        )

    def load_checkpoint(self) -> None:
        self.checkpointer.load()
        self.first_step = self.state.step

    # ---- training --------------------------------------------------------------------------------------------

    @property
    def total_steps(self) -> int:
        return self.config.training.steps

    def begin(self) -> None:
        """Take the folder for this run, alone, and record what the run is."""
        self.on_main(self.run_folder.open)
        if self.environment.is_main:
            self.run_folder.write_resolved(dump_yaml(self.config), self.state.step)
            self.tokenizer.save(self.run_folder.path / "tokenizer")
        # W&B may refuse to start, on the rank that reports.
        self.environment.agree(lambda: self.metrics.begin(self.state.step))
        if (skipped := self.dataloader.skipped).total:
            self.metrics.event("bad_lines_skipped", count=skipped.total, first=list(skipped.first))

    @contextlib.contextmanager
    def around_steps(self) -> Iterator[None]:
        """Garbage is collected on all ranks at the same steps; the profiler knows which step is the first."""
        self.garbage = env.GarbageSchedule(self.config.training.gc_freq)
        with self.garbage, self.profiler.active(self.state.step):
            yield

    def after_step(self, result: StepResult) -> None:
        """Record and, when it is time, validate and save."""
        step = self.state.step
        self.metrics.record(
            step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=result.tokens,
            data_wait_s=result.data_wait_seconds,
        )
        if step == self.first_step + 1:
            # Compilation and lazy start-up are over; a rank that is late from here on is late for another reason.
            self.environment.limit_waiting(self.config.comm, leave=self.checkpointer.process_group)
        if not result.updated:
            self.metrics.event("update_skipped", reason=why_skipped(result), ranks=list(result.astray))
            if self.skipped_in_a_row == 1:
                self.metrics.note(f"step {step}: the update is left out: {why_skipped(result)}")
        if self.validator is not None and self.validator.should_validate(step, self.config.training.steps):
            activity.now("validating")
            found = self.validator.validate()
            self.metrics.validation(nll=found.nll, perplexity=found.perplexity, tokens=found.tokens)
            self.metrics.note(f"validation after step {step}: {found}")
        self.checkpointer.poll()
        activity.now("saving a checkpoint")
        if step < self.config.training.steps and self.checkpointer.should_save(step):
            self.checkpointer.save(step)
        self.garbage.after_step(step)
        self.profiler.step()

    def finish(self, reason: str) -> TrainResult:
        """Save the end of the run and close its metrics."""
        at_end = reason in ("finished", "data_exhausted")
        activity.now("saving the last checkpoint")
        saved = self.checkpointer.save(self.state.step, force=True, last=at_end)
        activity.now("ending the run")
        if reason != "finished":
            self.metrics.event("stopped", reason=reason)
        self.metrics.close(finished=reason == "data_exhausted", summary=True)
        return TrainResult(self.state.step, reason, self.run_folder.path, saved)

    def release(self) -> None:
        # Also after an error: a save in the background is of a step before it, and worth waiting for.
        self.checkpointer.close()
        self.metrics.close()
