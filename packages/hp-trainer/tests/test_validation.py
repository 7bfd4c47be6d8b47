"""Validation weighs every token alike, whatever the ranks, and leaves training as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hp_components import BaseDataLoader, CrossEntropyLoss, LRSchedulersContainer, OptimizersContainer
from hp_config import CommConfig, DebugConfig, ParallelismConfig
from hp_protocols.distributed import apply_fsdp
from hp_protocols.testing import run_world
from hp_trainer.environment import Environment, start_environment
from hp_trainer.training_step import Batch, TrainingStep
from hp_trainer.validation import ValidationResult, Validator

VOCAB, ROWS, LENGTH, BATCHES = 17, 2, 6, 5


class Toy(torch.nn.Module):
    """Drops out even in eval mode, as a model may that draws noise; plain torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCAB, 8)
        self.drop = torch.nn.Dropout(0.5)
        self.out = torch.nn.Linear(8, VOCAB)

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        return self.out(self.drop(self.embed(ids_BS)))


def all_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for number in range(BATCHES):
        ids_BS = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
        labels_BS = ids_BS[:, 1:].clone()
        labels_BS[:, : 1 + number] = -100
        batches.append({"input": ids_BS[:, :-1], "labels": labels_BS})
    return batches


class UnevenLoader(BaseDataLoader):
    """A user's own loader that shares its batches badly: rank 0 has one, the last rank has the rest."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        epochs: int = 1

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, **others: Any) -> None:
        batches = all_batches()
        shares = [batches[:1], *[[] for _ in range(dp_world_size - 2)], batches[1:]]
        self.own = batches if dp_world_size == 1 else shares[dp_rank]
        self.next = 0

    fingerprint = "uneven"

    def __next__(self) -> Batch:
        if self.next == len(self.own):
            raise StopIteration
        self.next += 1
        return self.own[self.next - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]


def make(config: Validator.Config) -> tuple[Validator, TrainingStep, Environment]:
    environment = start_environment(ParallelismConfig(), CommConfig(), DebugConfig())
    model = Toy()
    if environment.world_size > 1:
        apply_fsdp(model, mesh=environment.parallel_dims.get_mesh("fsdp"), units=[model.out])
    optimizer = OptimizersContainer.Config().build(model_parts=[model])
    step = TrainingStep(
        environment=environment,
        model=model,
        loss_fn=CrossEntropyLoss.Config().build(),
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0).build(optimizers=optimizer, training_steps=9),
        max_norm=1.0,
        micro_batches=1,
    )
    validator = config.build(
        environment=environment,
        training_step=step,
        tokenizer=None,
        seq_len=LENGTH,
        local_batch_size=ROWS,
        seed=0,
    )
    return validator, step, environment


def measure(rank: int, world_size: int, steps: int = -1) -> tuple[ValidationResult, bool]:
    config = Validator.Config(enable=True, steps=steps, dataloader=UnevenLoader.Config())
    validator, step, environment = make(config)
    step.model.train()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second = validator.validate(), validator.validate()
    untouched = step.model.training and step.model.drop.training and torch.equal(torch.rand(3), expected)
    assert first == second, "a second validation begins at the beginning again"
    if world_size == 1:
        environment.platform.destroy_process_group()
    return first, bool(untouched)


def by_hand(batches: list[Batch]) -> tuple[float, int]:
    """Mean over all tokens at once, in plain torch."""
    model = Toy().eval()
    ids, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input", "labels"))
    with torch.no_grad():
        loss = F.cross_entropy(model(ids).flatten(0, 1).double(), labels.flatten())
    return loss.item(), int((labels != -100).sum())


def test_every_token_weighs_alike_and_uneven_ranks_do_not_hang() -> None:
    nll, tokens = by_hand(all_batches())
    one, untouched = measure(0, 1)
    assert untouched, "mode and random numbers of training are as before"
    assert abs(one.nll - nll) < 1e-6 * nll
    assert (one.tokens, one.batches) == (tokens, BATCHES)
    for result, untouched in run_world(measure, 3, init_process_group=False):
        assert untouched
        assert (result.tokens, result.batches) == (tokens, BATCHES)
        assert abs(result.nll - one.nll) < 1e-6 * nll


def test_a_number_of_steps_limits_each_rank() -> None:
    nll, tokens = by_hand(all_batches()[:2])
    result, _ = measure(0, 1, 2)
    assert result.tokens == tokens
    assert abs(result.nll - nll) < 1e-6 * nll


def test_what_could_not_be_measured_is_refused() -> None:
    def problems(**changes: Any) -> list[str]:
        return [fault.where for fault in Validator.Config(**changes).faults("validation")]

    assert problems() == []
    assert problems(enable=True) == ["validation.dataloader.dataset_path"]
    loader = UnevenLoader.Config(epochs=2)
    assert problems(enable=True, dataloader=loader, freq=0, steps=0) == ["validation.freq", "validation.steps"]
    assert problems(enable=True, dataloader=loader) == ["validation.dataloader.epochs"]
