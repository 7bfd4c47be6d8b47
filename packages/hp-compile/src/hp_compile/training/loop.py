"""The training loop: batches to optimizer steps, the same number on every rank.

In: a loader, and what a trainer does with a batch. Out: the mean loss of each optimizer step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hp_compile.training.agreement import HIT, Agreement, schedule_hash

log = logging.getLogger("hp_compile")

LogFn = Callable[[int, dict[str, Any]], None]
_END = schedule_hash("the end of the data")


def check_counts(max_steps: Any, log_interval: Any, accumulation_steps: Any) -> None:
    """Raises ValueError for what is no count, by name."""
    for name, value in (("max_steps", max_steps), ("log_interval", log_interval)):
        if value is not None and not _is_count(value):
            raise ValueError(f"{name}={value!r} is not allowed; allowed: None or an integer of at least 1")
    if not _is_count(accumulation_steps):
        raise ValueError(f"accumulation_steps={accumulation_steps!r} is not allowed; allowed: an integer of at least 1")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def run_loop(
    train_step: Callable[[Any, Any], torch.Tensor],
    optimizer_step: Callable[[], torch.Tensor | None],
    batches: Iterable[tuple[Any, Any]],
    max_steps: int | None,
    log_interval: int | None,
    log_fn: LogFn | None,
    accumulation_steps: int,
) -> list[float]:
    """What `GraphTrainer.train` promises."""
    every = log_interval or (1 if log_fn is not None else 0)
    losses: list[float] = []
    pending: list[torch.Tensor] = []
    for batch in batches:
        pending.append(train_step(batch[0], batch[1]))
        if len(pending) < accumulation_steps:
            continue
        norm = optimizer_step()
        losses.append(float(torch.stack(pending).mean()))
        pending.clear()
        step = len(losses)
        if every and step % every == 0:
            metrics = {"loss": losses[-1], "grad_norm": None if norm is None else float(norm)}
            if log_fn is not None:
                log_fn(step, metrics)
            else:
                log.info("step %d: loss %.6f", step, losses[-1])
        if max_steps is not None and step >= max_steps:
            break
    if pending:
        raise ValueError(
            f"the dataloader ended after {len(pending)} of {accumulation_steps} batches of a step; their gradients "
            "are held: give full groups, or call optimizer_step() yourself"
        )
    return losses


def shared_batches(dataloader: Iterable[Any], agreement: Agreement, resolve: Callable[[], None]) -> Iterator[Any]:
    """The loader's pairs; where it ends or fails, the ranks that have another batch are told instead of a step.

    Raises:
        RuntimeError: this rank's data ended, and another rank's did not.
    """
    batches, count = iter(dataloader), 0
    while True:
        try:
            batch = next(batches)
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise ValueError(f"the dataloader gave a {type(batch).__name__}; a batch is a pair (input, label)")
        except StopIteration:
            break
        except Exception as error:
            agreement.agree("reading a batch", _raising(error))
            raise
        yield batch
        count += 1
    if not count:
        resolve()
    # The others are about to compare the graphs they have for their inputs; no graph is called `_END`.
    _, verdict = agreement.compare("reading a batch", lambda: None, lambda _: (HIT, _END))
    if not verdict.same_schedule:
        # Having seen that they differ, they all come to the next stage.
        ended = RuntimeError(
            f"the dataloader of rank {dist.get_rank()} ended after {count} batches, and other ranks have more; give "
            "every rank as many (drop the rest, or pass max_steps)"
        )
        agreement.agree("reading a batch", _raising(ended))


def _raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail
