"""Validation: the mean loss per token over a held-out text, the same number for any number of ranks.

In: the model as it is being trained, and a dataloader of one epoch. Out: a `ValidationResult`; the model's mode, the
random numbers and the training data are as they were.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from hp_components import BaseDataLoader, BaseLoss, BaseTokenizer, TextDataLoader
from hp_protocols import Configurable
from hp_protocols.errors import Fault
from hp_trainer.environment import Environment
from hp_trainer.training_step import Batch, TrainingStep

__all__ = ["ValidationResult", "Validator"]


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """`nll` is the mean negative log-likelihood per valid token over all ranks; NaN if there was no token.

    `batches` counts those with data, over all data-parallel (and context-parallel) ranks.
    """

    nll: float
    tokens: int
    batches: int

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return math.inf if self.nll > math.log(sys.float_info.max) else math.exp(self.nll)

    def __str__(self) -> str:
        return f"{self.nll:.4f} per token, perplexity {self.perplexity:.4g} ({self.tokens:,} tokens)"


class Validator(Configurable):
    """Runs the model over the whole validation set, or its first batches, without changing anything."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        enable: bool = False
        """Measure the loss on held-out text while training."""

        freq: int = 100
        """Every so many steps, and after the last one."""

        steps: int = -1
        """Batches per rank at most; -1: the whole set."""

        dataloader: BaseDataLoader.Config = field(
            default_factory=lambda: TextDataLoader.Config(shuffle=False, epochs=1)
        )
        """The held-out text; read once, from its beginning, at every validation."""

        def faults(self, path: str) -> list[Fault]:
            """Values with which nothing sensible could be measured."""
            if not self.enable:
                return []
            faults = []
            if self.freq < 1:
                faults.append(Fault(f"{path}.freq", f"{self.freq} is too small", allowed="1 or more"))
            if self.steps < 1 and self.steps != -1:
                faults.append(Fault(f"{path}.steps", f"{self.steps} is no number of batches", allowed="-1, 1 or more"))
            where, epochs = f"{path}.dataloader", getattr(self.dataloader, "epochs", 1)
            if epochs != 1 and self.steps == -1:
                faults.append(Fault(f"{where}.epochs", f"{epochs} would not be the set once", allowed="1"))
            if isinstance(self.dataloader, TextDataLoader.Config) and self.dataloader.dataset_path is None:
                hint = "a file or folder that training does not read"
                faults.append(Fault(f"{where}.dataset_path", "is missing: the default is the training text", hint=hint))
            return faults

    def __init__(
        self,
        config: Config,
        *,
        environment: Environment,
        training_step: TrainingStep,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        seed: int,
    ) -> None:
        self.config = config
        self._environment = environment
        self._step = training_step
        self._shape = (local_batch_size, seq_len)
        self._dataloader: BaseDataLoader = environment.main_first(
            lambda: config.dataloader.build(
                tokenizer=tokenizer,
                seq_len=seq_len,
                local_batch_size=local_batch_size,
                dp_rank=environment.dp_rank,
                dp_world_size=environment.dp_degree,
                seed=seed,
            )
        )
        environment.require_same("validation.dataloader", str(self._dataloader), self._dataloader.fingerprint)
        self._beginning = self._dataloader.state_dict()

    def should_validate(self, step: int, last_step: int) -> bool:
        """Whether to validate after `step`."""
        return step % self.config.freq == 0 or step == last_step

    def validate(self) -> ValidationResult:
        """Measure now. Every rank takes part, and every rank gets the same result."""
        model, environment = self._step.model, self._environment
        self._dataloader.load_state_dict(self._beginning)
        was_training = model.training
        model.eval()
        try:
            # Layers that draw random numbers even now must not shift those of training.
            with environment.platform.fork_rng(), torch.no_grad():
                return self._measure(self._batches())
        finally:
            model.train(was_training)

    def _measure(self, batches: Iterator[Batch | None]) -> ValidationResult:
        loss_fn: BaseLoss = self._step.loss_fn
        losses: list[float] = []
        tokens = count = 0
        for batch in batches:
            has_data = batch is not None
            if not self._any_rank(has_data):
                break
            # A rank without data takes part with nothing to count: the others' collectives wait for it.
            batch = self._step.place(batch if batch is not None else self._filler())
            count += has_data
            losses.append(self._step.loss_sum(batch).item())
            tokens += int(loss_fn.count_tokens(batch["labels"]))
        # Summed without rounding, on the host: the order of ranks and batches does not show.
        everyone = self._environment.platform.all_gather_object((losses, tokens, count))
        alike = self._environment.ranks_per_batch
        loss = math.fsum(value for values, _, _ in everyone for value in values) / alike
        tokens = sum(number for _, number, _ in everyone) // alike
        return ValidationResult(loss / tokens if tokens else math.nan, tokens, sum(c for _, _, c in everyone) // alike)

    def _batches(self) -> Iterator[Batch | None]:
        """This rank's batches, then None without end."""
        limit = None if self.config.steps == -1 else self.config.steps
        return itertools.chain(itertools.islice(self._dataloader, limit), itertools.repeat(None))

    def _any_rank(self, has_data: bool) -> bool:
        flag = torch.tensor(int(has_data), device=self._environment.device)
        return self._environment.sum_over_world(flag).item() > 0

    def _filler(self) -> Batch:
        tokens_BS = torch.zeros(self._shape, dtype=torch.int64)
        return {"input": tokens_BS, "labels": torch.full_like(tokens_BS, self._step.loss_fn.ignore_index)}
