"""Collectives that stand in the user's own step: plain `torch.distributed` calls and functional ones.

In: nothing. Out: the steps in which the graph's loss or gradients are not eager's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn

from hp_compile import GraphTrainer, PassConfig

MANY = 1_000_000  # elements: a buffer that is still on its way when the next operation wants it


def reduced(model: nn.Module, x: torch.Tensor, world: int) -> torch.Tensor:
    total = (x.detach().sum() + torch.ones(MANY)).clone()
    dist.all_reduce(total)
    return model(x).square().mean() * total.mean() / MANY


def started_and_waited_for(model: nn.Module, x: torch.Tensor, world: int) -> torch.Tensor:
    total = torch.full((MANY,), float(x.shape[0]))
    work = dist.all_reduce(total, async_op=True)
    y = model(x)
    work.wait()
    return y.square().sum() / total[-1]


def gathered(model: nn.Module, x: torch.Tensor, world: int) -> torch.Tensor:
    parts = [torch.empty(x.shape[0] * 50_000, x.shape[1]) for _ in range(world)]
    dist.all_gather(parts, x.repeat(50_000, 1))
    others = torch.empty(world * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(others, x)
    return (model(x) - parts[-1][: x.shape[0]].mean() + others.mean()).square().mean()


def contrastive(model: nn.Module, x: torch.Tensor, world: int) -> torch.Tensor:
    z = torch.cat(differentiable.all_gather(model(x)))
    return nn.functional.cross_entropy(z @ z.t(), torch.arange(z.shape[0]))


def scattered(model: nn.Module, x: torch.Tensor, world: int) -> torch.Tensor:
    mine = torch.empty(MANY)
    dist.reduce_scatter_tensor(mine, torch.arange(float(world * MANY)) * x.sum().detach())
    seen = torch.zeros(MANY) + dist.get_rank()
    dist.broadcast(seen, 0)
    return model(x).square().mean() * (mine.mean() / MANY + seen.mean())


STEPS: list[Callable[[nn.Module, torch.Tensor, int], torch.Tensor]] = [
    reduced,
    started_and_waited_for,
    gathered,
    contrastive,
    scattered,
]


def in_the_users_step(rank: int, world: int) -> list[str]:
    """Gradients are compared before any data-parallel reduction."""
    wrong = []
    for step in STEPS:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        eager = copy.deepcopy(model)

        def train_fn(model: nn.Module, x: torch.Tensor, _: None, step: Callable[..., torch.Tensor] = step):
            return step(model, x, world)

        trainer = GraphTrainer(model, train_fn, PassConfig(fsdp_enabled=False), device="cpu")
        for number in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))
            eager.zero_grad()
            expected = train_fn(eager, x, None)
            expected.backward()
            loss = trainer.train_step(x, None)
            pairs = [
                (loss, expected),
                *((p.grad, e.grad) for p, e in zip(model.parameters(), eager.parameters(), strict=True)),
            ]
            if not all(torch.equal(a, b) for a, b in pairs):
                wrong.append(f"{step.__name__} {number}: {loss} against {expected}")
            model.zero_grad()
    return wrong
