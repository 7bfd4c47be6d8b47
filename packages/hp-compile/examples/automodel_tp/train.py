"""Tensor parallelism and FSDP together: TP by torch's own plans, FSDP by Graph Mode, one mesh for both.

    torchrun --nproc-per-node 4 train.py              TP 2 × FSDP 2
    torchrun --nproc-per-node 8 train.py --tp 4       TP 4 × FSDP 2

A framework that builds its own device mesh hands it to `GraphTrainer` as a mesh context: any object with
`device_mesh` (a dim named "dp"), or with `fsdp_non_moe_mesh`. Its groups are used, and nothing else is built.
Prints what was compiled, falling losses, and whether eager FSDP2 over the same model gives the same, bit for bit.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hp_compile import FSDPModuleConfig, GraphTrainer, PassConfig, PassPlan

VOCAB, LENGTH, ROWS, WIDTH, HEADS, LAYERS, LR = 64, 16, 8, 32, 4, 2, 3e-3


@dataclass(frozen=True)
class MeshContext:
    """What an automodel-like framework has anyway. Graph Mode reads `device_mesh` and needs no base class."""

    device_mesh: DeviceMesh


# ---- a model, made tensor parallel the way torch does it ------------------------------------------------------


class Layer(nn.Module):
    """Causal attention and an MLP. Under TP each rank has some of the heads and some of the hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        h_BSD = self.norm1(x_BSD)
        rows, length, _ = x_BSD.shape
        q, k, v = (
            part(h_BSD).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x_BSD.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        x_BSD = x_BSD + self.o(mixed.transpose(1, 2).flatten(2))
        return x_BSD + self.down(F.gelu(self.up(self.norm2(x_BSD))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.embed(ids_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(x_BSD)


TP_PLAN = {
    **dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel),
    **dict.fromkeys(("o", "down"), RowwiseParallel),
}


def build(tp_mesh: DeviceMesh) -> Decoder:
    """Parameters that TP cuts become DTensors on `tp_mesh`; the graph is captured over their local parts."""
    torch.manual_seed(0)
    model = Decoder()
    for layer in model.layers:
        parallelize_module(layer, tp_mesh, {name: style() for name, style in TP_PLAN.items()})
    return model


def train_fn(model: nn.Module, ids_BS: torch.Tensor, next_BS: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids_BS).flatten(0, 1), next_BS.flatten())


def batch(step: int, dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counting modulo VOCAB in strides of 1 to 3. The ranks of one TP group read the same rows."""
    draw = torch.Generator().manual_seed(1000 * step + dp_rank)
    start_B1 = torch.randint(VOCAB, (ROWS, 1), generator=draw)
    stride_B1 = torch.randint(1, 4, (ROWS, 1), generator=draw)
    ids = (start_B1 + stride_B1 * torch.arange(LENGTH + 1)) % VOCAB
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# ---- Graph Mode, and the same by hand -------------------------------------------------------------------------


def train_graph(context: MeshContext, steps: int, show: bool) -> list[torch.Tensor]:
    """FSDP over the context's "dp" axis, on top of the TP that is in the model. Returns this rank's losses."""
    dp, tp = context.device_mesh["dp"], context.device_mesh["tp"]
    units = dict.fromkeys(("embed", "head"), FSDPModuleConfig())
    plan = PassPlan(units, {"layers.*": FSDPModuleConfig()})
    config = PassConfig(tp_size=tp.size())  # fsdp_degree is read from the mesh
    trainer = GraphTrainer(build(tp), train_fn, config, plan, {"lr": LR}, device="cpu", mesh_context=context)
    losses = []
    for step in range(steps):
        losses.append(trainer.train_step(*batch(step, dp.get_local_rank())))
        trainer.optimizer_step()
        if step == 0 and show:
            print(trainer.explain())
            print(f"layers.0.q.weight: {placement(trainer.state_dict()['model']['layers.0.q.weight'])}")
        mean = losses[-1].clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=dp.get_group())
        if show:
            print(f"step {step + 1:3d}  loss {mean.item():.9g}")
    return losses


def placement(weight: torch.Tensor) -> str:
    dims = ", ".join(
        f"{name} {how}" for name, how in zip(weight.device_mesh.mesh_dim_names, weight.placements, strict=True)
    )
    return f"{tuple(weight.shape)} as {tuple(weight.to_local().shape)} on this rank ({dims})"


def train_eager(mesh: DeviceMesh, steps: int) -> list[torch.Tensor]:
    """FSDP2 around the same units of the same tensor-parallel model."""
    model = build(mesh["tp"])
    for module in (*model.layers, model.embed, model.head):
        fully_shard(module, mesh=mesh["dp"])
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, foreach=False)
    losses = []
    for step in range(steps):
        loss = train_fn(model, *batch(step, mesh["dp"].get_local_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel degree; the rest of the world is FSDP")
    options = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("this example needs several ranks: torchrun --nproc-per-node 4 train.py")
    world = int(os.environ["WORLD_SIZE"])
    if world % options.tp or HEADS % options.tp:
        parser.error(f"--tp {options.tp} does not divide the {world} ranks or the {HEADS} heads")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world // options.tp, options.tp), mesh_dim_names=("dp", "tp"))
    show = dist.get_rank() == 0
    logging.basicConfig(level=logging.INFO if show else logging.WARNING, format="%(message)s")
    if show:
        print(f"TP {options.tp} × FSDP {world // options.tp} over gloo, through a mesh context")
    graph = train_graph(MeshContext(mesh), options.steps, show)
    eager = train_eager(mesh, options.steps)
    same = torch.tensor(int(torch.equal(torch.stack(graph), torch.stack(eager))))
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    dist.barrier()
    dist.destroy_process_group()
    if show:
        against, verdict = "eager FSDP2 over the same TP model", "yes" if same else "NO"
        print(f"check: {options.steps} losses on {world} rank(s), bit for bit those of {against}: {verdict}")
    return bool(same)


if __name__ == "__main__":
    code = 0 if main() else 1
    sys.stdout.flush()
    # gloo's thread lets go of the last tensor a moment after its collective, and aborts if Python is ending by then.
    os._exit(code)
