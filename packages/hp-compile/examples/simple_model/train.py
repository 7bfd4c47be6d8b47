"""Train a byte-level model on this very file: captured as one graph, and sharded if there are several ranks.

    python train.py                                   1 process: the graph alone
    torchrun --nproc-per-node 8 train.py              8 ranks over gloo: FSDP, units from plan.yaml

Prints what was compiled, falling losses, and whether plain eager torch gives the same losses, bit for bit.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from hp_compile import GraphTrainer, PassConfig, create_sharding_plan_from_yaml

HERE = Path(__file__).parent
TEXT = Path(__file__).read_bytes()
CONTEXT, ROWS, WIDTH, BLOCKS, LR = 8, 64, 96, 4, 3e-3


# ---- the user's part: a model and a train_fn, nothing parallel about them -------------------------------------


class Block(nn.Module):
    """x + MLP(norm(x))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return x_BD + self.down(F.gelu(self.up(self.norm(x_BD))))


class NextByte(nn.Module):
    """Reads the last CONTEXT bytes, predicts the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH // CONTEXT)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, bytes_BC: torch.Tensor) -> torch.Tensor:
        x_BD = self.embed(bytes_BC).flatten(1)
        for block in self.blocks:
            x_BD = block(x_BD)
        return self.head(x_BD)


def train_fn(model: nn.Module, bytes_BC: torch.Tensor, next_B: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(bytes_BC), next_B)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ROWS places of this file, drawn anew for each step and rank."""
    text = torch.tensor(list(TEXT))
    draw = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(text) - CONTEXT, (ROWS,), generator=draw)
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return windows[:, :-1].contiguous(), windows[:, -1].contiguous()


def build() -> NextByte:
    torch.manual_seed(0)
    return NextByte()


# ---- trained with Graph Mode ----------------------------------------------------------------------------------


def train_graph(steps: int, rank: int, show: bool) -> list[torch.Tensor]:
    """One graph per step; FSDP where there is more than one rank. Returns this rank's losses."""
    plan = create_sharding_plan_from_yaml(HERE / "plan.yaml")
    trainer = GraphTrainer(build(), train_fn, PassConfig(), plan, optimizer_config={"lr": LR}, device="cpu")
    losses = []
    for step in range(steps):
        losses.append(trainer.train_step(*batch(step, rank)))
        trainer.optimizer_step()
        if step == 0 and show:
            print(trainer.explain())
        report(step, losses[-1], show)
    return losses


def report(step: int, loss: torch.Tensor, show: bool) -> None:
    mean = loss.clone()
    if dist.is_initialized():
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    if show:
        print(f"step {step + 1:3d}  loss {mean.item():.9g}")


# ---- the same by hand, to check it ----------------------------------------------------------------------------


def train_eager(steps: int, rank: int) -> list[torch.Tensor]:
    """Plain autograd; on several ranks FSDP2 around the units of plan.yaml, and an all-reduce for the rest."""
    model = build()
    if dist.is_initialized():
        for module in (*model.blocks, model.head):
            fully_shard(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, foreach=False)
    losses = []
    for step in range(steps):
        loss = train_fn(model, *batch(step, rank))
        loss.backward()
        if dist.is_initialized():
            dist.all_reduce(model.embed.weight.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def equal_on_all_ranks(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    same = torch.tensor(int(torch.equal(torch.stack(mine), torch.stack(theirs))))
    if dist.is_initialized():
        dist.all_reduce(same, op=dist.ReduceOp.MIN)
    return bool(same)


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    several = "WORLD_SIZE" in os.environ  # set by torchrun
    if several:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if several else 0
    ranks = dist.get_world_size() if several else 1
    show = rank == 0
    logging.basicConfig(level=logging.INFO if show else logging.WARNING, format="%(message)s")
    if show:
        print(f"{ranks} rank{'s over gloo: FSDP, units from plan.yaml' if ranks > 1 else ': the graph alone'}")
    graph, eager = train_graph(steps, rank, show), train_eager(steps, rank)
    same = equal_on_all_ranks(graph, eager)
    if several:
        dist.barrier()
        dist.destroy_process_group()
    if show:
        against = "eager FSDP2" if ranks > 1 else "plain eager torch"
        print(f"check: {steps} losses on {ranks} rank(s), bit for bit those of {against}: {'yes' if same else 'NO'}")
    return same


if __name__ == "__main__":
    code = 0 if main() else 1
    sys.stdout.flush()
    # gloo's thread lets go of the last tensor a moment after its collective, and aborts if Python is ending by then.
    os._exit(code)
