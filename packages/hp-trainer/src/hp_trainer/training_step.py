"""One optimizer step: micro-batches, loss over the global number of tokens, clipping, update (M51).

In: batches of a rank. Out: a `StepResult` with numbers that are the same on every rank.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hp_components import BaseLoss, LRSchedulersContainer, OptimizersContainer
from hp_config import TrainingConfig
from hp_protocols.distributed import clip_grad_norm_, lay_out_gradients
from hp_trainer.environment import Environment
from hp_trainer.faults import activity

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did, over all ranks. `loss` is per valid token; `tokens` counts the tokens of the batch.
    `grad_norm` is None where gradients are used up within backward; `astray` are the ranks whose own loss is not
    finite, looked for only where the update was left out."""

    loss: float
    grad_norm: float | None
    lr: float
    tokens: int
    data_wait_seconds: float
    updated: bool
    astray: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fetched:
    """The micro-batches of one step and the seconds that were waited for them."""

    micro_batches: list[Batch]
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know alike before a step. `micro_batches`: how many each does; 0 when some rank has none left,
    as `without_data` of them do."""

    valid_tokens: int
    stop_wanted: bool
    micro_batches: int
    without_data: int


def count_micro_batches(training: TrainingConfig, dp_degree: int) -> int:
    """Micro-batches of each rank in a step; a global batch of -1 means one."""
    if training.global_batch_size == -1:
        return 1
    return training.global_batch_size // (training.local_batch_size * dp_degree)


def document_arguments(batch: Batch) -> dict[str, torch.Tensor]:
    """What the model is told of the documents in a batch: nothing, unless the dataloader gives their boundaries."""
    if "cu_seqlens" not in batch:
        return {}
    return {"position_ids": batch["positions"], "cu_seqlens": batch["cu_seqlens"]}


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Everything a step needs; calling `run` performs one."""

    environment: Environment
    model: torch.nn.Module
    loss_fn: BaseLoss
    optimizer: OptimizersContainer
    lr_scheduler: LRSchedulersContainer
    max_norm: float
    micro_batches: int

    def fetch(self, batches: Iterator[Batch]) -> Fetched | None:
        """The micro-batches of one step on this rank's device; None when the data has ended."""
        started = time.perf_counter()
        fetched: list[Batch] = []
        for batch in itertools.islice(batches, self.micro_batches):
            fetched.append(self.place(batch))
        return Fetched(fetched, time.perf_counter() - started) if fetched else None

    def place(self, batch: Batch) -> Batch:
        """A batch on this rank's device.

        Where ranks share each row, with the labels of this rank's stretch; the model takes whole rows and cuts them.
        """
        device = self.environment.device
        # Boundaries of documents are read on the host. Pinned memory is copied while the device computes.
        batch = {
            name: value if name == "cu_seqlens" else value.to(device, non_blocking=True)
            for name, value in batch.items()
        }
        axis = self.environment.sequence_axis
        return batch if axis is None else {**batch, "labels": axis.cut(batch["labels"], 1)}

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """The loss summed over the valid tokens of a batch that was placed: 0-d, as the model computes it."""
        return self.loss_fn.run_model(self.model, batch["labels"], batch["input"], **document_arguments(batch))

    def agree(self, fetched: Fetched | None, *, stop_wanted: bool) -> Agreement:
        """One exchange before each step: valid tokens over all ranks and micro-batches, whether to stop after it, and
        how much data each rank has for it."""
        environment = self.environment
        labels = [] if fetched is None else [batch["labels"] for batch in fetched.micro_batches]
        valid = sum(self.loss_fn.count_tokens(label) for label in labels)
        # How many ranks have 0, 1, 2 … micro-batches: a maximum, in the one sum that is made anyway.
        having = torch.zeros(self.micro_batches + 1, dtype=torch.int64)
        having[len(labels)] = 1
        own = torch.cat([torch.stack([torch.as_tensor(valid).cpu(), torch.tensor(int(stop_wanted))]), having])
        valid, stops, without_data, *others = environment.sum_over_world(own.to(environment.device)).tolist()
        most = max((number for number, ranks in enumerate(others, start=1) if ranks), default=0)
        # Ranks that share the weights of a layer count the same tokens.
        shared = valid // environment.ranks_per_batch
        return Agreement(shared, stops > 0, 0 if without_data else most, without_data)

    def even_out(self, fetched: Fetched, micro_batches: int) -> Fetched:
        """As many micro-batches as the other ranks have: where data end unevenly, with some that count no token."""
        own = fetched.micro_batches
        missing = micro_batches - len(own)
        if missing <= 0:
            return fetched
        filler = {**own[-1], "labels": torch.full_like(own[-1]["labels"], self.loss_fn.ignore_index)}
        return Fetched(own + [filler] * missing, fetched.wait_seconds)

    def run(self, fetched: Fetched, valid_tokens: int) -> StepResult:
        """Forward, backward, clip and update. `valid_tokens` is the count over all ranks and micro-batches.

        Raises:
            FloatingPointError: the loss is not finite, and optimizer steps in backward have taken it in already.
        """
        environment = self.environment
        lr = self.lr_scheduler.get_last_lr()[0]
        loss_sum = torch.zeros((), device=environment.device)
        # A tensor: by a number a device multiplies with the rounded reciprocal, and Graph Mode takes tensors.
        divisor = torch.tensor(max(valid_tokens, 1), device=environment.device)
        parts: list[torch.Tensor] = []
        last = len(fetched.micro_batches) - 1
        for index, batch in enumerate(fetched.micro_batches):
            self.optimizer.begin_backward(last=index == last)
            parts.append(self.backward(batch, divisor))
            loss_sum += parts[-1]
        activity.now("clipping gradients")
        grad_norm = self.clip()
        loss = environment.sum_over_data(loss_sum).item()
        norm = None if grad_norm is None else grad_norm.item()
        # Both numbers are the same on every rank, so all ranks decide alike without asking each other.
        updated = math.isfinite(loss) and (norm is None or math.isfinite(norm))
        if not updated and norm is None:
            raise FloatingPointError(
                f"the loss is {loss}, and with optimizer.in_backward the weights are updated already; the run ends "
                "here: go on from its last checkpoint, with a lower rate or without in_backward"
            )
        activity.now("updating weights")
        if updated:
            self.optimizer.step()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        tokens = sum(batch["input"].numel() for batch in fetched.micro_batches) * environment.dp_degree
        astray = () if updated else self.astray_ranks(parts)
        return StepResult(loss, norm, lr, tokens, fetched.wait_seconds, updated, astray)

    def astray_ranks(self, losses: list[torch.Tensor]) -> tuple[int, ...]:
        """The ranks that have a loss which is not finite among those of their micro-batches. Collective."""
        finite = all(bool(loss.isfinite()) for loss in losses)
        everyone = self.environment.platform.all_gather_object(finite)
        return tuple(rank for rank, fine in enumerate(everyone) if not fine)

    def clip(self) -> torch.Tensor | None:
        """Clip by the global norm, which is returned; None where the optimizer has used the gradients up."""
        if self.optimizer.steps_in_backward:
            return None
        return clip_grad_norm_(self.model.parameters(), self.max_norm)

    def backward(self, batch: Batch, divisor: torch.Tensor) -> torch.Tensor:
        """Gradients of one micro-batch, added to those of the earlier ones; its share of the loss, detached."""
        loss = self.loss_sum(batch) / divisor
        loss.backward()
        if self.micro_batches > 1:
            # Gradients of whole weights are added, whatever the layout; partial sums over ranks would round otherwise.
            lay_out_gradients(self.model.parameters())
        return loss.detach()
