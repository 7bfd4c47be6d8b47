"""What the ranks do in test_wrapped. In: rank and world size. Out: values that the test compares."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from hp_compile import GraphTrainer, PassConfig, distributed_view


def build(wrap: bool) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(2)]
    return nn.Sequential(*(checkpoint_wrapper(block) if wrap else block for block in blocks))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def saved(rank: int, world: int) -> dict[str, tuple[int, ...]]:
    trainer = GraphTrainer(build(wrap=True), loss_of, PassConfig(), device="cpu")
    torch.manual_seed(rank)
    trainer.train_step(torch.randn(3, 4), torch.randn(3, 4))
    trainer.optimizer_step()
    state = trainer.state_dict()
    trainer.load_state_dict(state)
    for parameter in trainer.model.parameters():
        view = distributed_view(parameter, torch.ones_like(parameter))
        assert isinstance(view, DTensor)
        assert view.shape != parameter.shape
    assert set(state["optimizer"]["state"]) == set(state["model"])
    return {name: tuple(value.full_tensor().shape) for name, value in state["model"].items()}
