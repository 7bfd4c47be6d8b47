"""A training step against a hand-written torch loop: the same bits, and the same numbers in several ranks (M51)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from hp_components import CrossEntropyLoss, LRSchedulersContainer, OptimizersContainer
from hp_config import CommConfig, DebugConfig, ParallelismConfig
from hp_protocols.distributed import apply_fsdp
from hp_protocols.testing import run_world
from hp_trainer.environment import start_environment
from hp_trainer.training_step import Batch, StepResult, TrainingStep

VOCAB, ROWS, LENGTH, STEPS = 17, 4, 6, 5


class Toy(torch.nn.Module):
    """An embedding and two layers; plain torch, so that nothing of ours is its own reference."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCAB, 8)
        self.hidden = torch.nn.Linear(8, 8)
        self.out = torch.nn.Linear(8, VOCAB)

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(self.embed(ids_BS))))


def make_batches(count: int) -> list[Batch]:
    """Rows with very unequal numbers of valid labels."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        ids_BS = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
        labels_BS = ids_BS[:, 1:].clone()
        labels_BS[0, 1:] = -100
        labels_BS[1] = -100
        batches.append({"input": ids_BS[:, :-1], "labels": labels_BS})
    return batches


def make_step(
    model: torch.nn.Module, micro_batches: int, max_norm: float = 0.05, in_backward: bool = False
) -> TrainingStep:
    environment = start_environment(ParallelismConfig(), CommConfig(), DebugConfig())
    if environment.world_size > 1:
        apply_fsdp(model, mesh=environment.parallel_dims.get_mesh("fsdp"), units=[model.hidden])
    optimizer = OptimizersContainer.Config(lr=0.1, weight_decay=0.0, in_backward=in_backward).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2, decay_type="constant")
    return TrainingStep(
        environment=environment,
        model=model,
        loss_fn=CrossEntropyLoss.Config().build(),
        optimizer=optimizer,
        lr_scheduler=schedule.build(optimizers=optimizer, training_steps=STEPS),
        max_norm=max_norm,
        micro_batches=micro_batches,
    )


def run_step(step: TrainingStep, batches: Iterator[Batch]) -> StepResult:
    fetched = step.fetch(batches)
    return step.run(fetched, step.agree(fetched, stop_wanted=False).valid_tokens)


@pytest.fixture
def one_process() -> Iterator[None]:
    yield
    torch.distributed.destroy_process_group()


def by_hand(micro_batches: int, max_norm: float = 0.05) -> tuple[list[tuple[float, float]], list[torch.Tensor]]:
    """The same training, written out in torch."""
    model = Toy()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, foreach=False, fused=False
    )
    batches = iter(make_batches(STEPS * micro_batches))
    seen = []
    for number in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, (number + 1) / 2)
        group = [next(batches) for _ in range(micro_batches)]
        valid = sum(int((batch["labels"] != -100).sum()) for batch in group)
        total = torch.zeros(())
        for batch in group:
            logits = model(batch["input"]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / valid
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((total.item(), norm.item()))
    return seen, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_are_bitwise_those_of_a_plain_torch_loop(micro_batches: int, one_process: None) -> None:
    model = Toy()
    step, batches = make_step(model, micro_batches), iter(make_batches(STEPS * micro_batches))
    results = [run_step(step, batches) for _ in range(STEPS)]
    expected, parameters = by_hand(micro_batches)
    assert [(result.loss, result.grad_norm) for result in results] == expected
    for ours, theirs in zip(model.parameters(), parameters, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_in_backward_are_bitwise_those_of_a_plain_torch_loop_without_clipping(
    micro_batches: int, one_process: None
) -> None:
    model = Toy()
    step = make_step(model, micro_batches, math.inf, in_backward=True)
    batches = iter(make_batches(STEPS * micro_batches))
    results = [run_step(step, batches) for _ in range(STEPS)]
    expected, parameters = by_hand(micro_batches, math.inf)
    assert [(result.loss, result.grad_norm) for result in results] == [(loss, None) for loss, _ in expected]
    for ours, theirs in zip(model.parameters(), parameters, strict=True):
        assert torch.equal(ours, theirs)


def test_steps_in_backward_end_the_run_at_a_loss_that_is_not_finite(one_process: None) -> None:
    model = Toy()
    step = make_step(model, 1, math.inf, in_backward=True)
    with torch.no_grad():
        model.out.bias[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"the loss is nan, and with optimizer\.in_backward"):
        run_step(step, iter(make_batches(1)))


def test_a_step_without_finite_gradients_changes_no_weight(one_process: None) -> None:
    model = Toy()
    step = make_step(model, 1)
    with torch.no_grad():
        model.out.bias[0] = math.nan
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = run_step(step, iter(make_batches(1)))
    assert not result.updated
    assert math.isnan(result.loss)
    for ours, theirs in zip(model.parameters(), before, strict=True):
        assert (
            torch.equal(
                ours,
                theirs,
            )
            or torch.isnan(theirs).any()
        )
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_batch_without_valid_tokens_gives_loss_0_and_no_nan(one_process: None) -> None:
    model = Toy()
    step = make_step(model, 1)
    (batch,) = make_batches(1)
    batch["labels"].fill_(-100)
    result = run_step(step, iter([batch]))
    assert (result.loss, result.grad_norm, result.updated) == (0.0, 0.0, True)


def test_the_end_of_the_data_is_told_from_a_batch(one_process: None) -> None:
    step = make_step(Toy(), 2)
    batches = iter(make_batches(3))
    assert len(step.fetch(batches).micro_batches) == 2
    assert len(step.fetch(batches).micro_batches) == 1
    assert step.fetch(batches) is None


def _train_rank(rank: int, world_size: int) -> tuple[list[tuple[float, float]], list[torch.Tensor]]:
    model = Toy()
    step = make_step(model, 1)
    rows = ROWS // world_size
    mine = [
        {name: value[rank * rows : (rank + 1) * rows] for name, value in batch.items()} for batch in make_batches(STEPS)
    ]
    batches = iter(mine)
    results = [run_step(step, batches) for _ in range(STEPS)]
    return (
        [(result.loss, result.grad_norm) for result in results],
        [parameter.full_tensor().detach() for parameter in model.parameters()],
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_with_unequal_numbers_of_tokens_train_what_one_process_trains(world_size: int) -> None:
    expected, parameters = by_hand(1)
    for numbers, theirs in run_world(_train_rank, world_size, init_process_group=False):
        # Sums over ranks are rounded in another order than in one process.
        for ours, reference in zip(numbers, expected, strict=True):
            assert ours == pytest.approx(reference, rel=1e-5)
        for ours, reference in zip(theirs, parameters, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)
