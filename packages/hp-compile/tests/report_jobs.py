"""What a trainer tells of its collectives, against counts made by hand.

In: nothing. Out: the launches of a step per kind and unit, and the table.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import graph_zoo as zoo
import torch
from torch import nn

from hp_compile import GraphTrainer, PassConfig


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1024), nn.Linear(1024, 1024)])
        self.head = nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def told(rank: int, world: int) -> dict[Any, tuple[Counter[Any], str]]:
    """By `bucket_mb`: how many launches of each kind, region and unit, and the table of `explain`."""
    found = {}
    for bucket_mb in (None, 0):
        torch.manual_seed(0)
        trainer = GraphTrainer(Two(), zoo.square_loss, PassConfig(bucket_mb=bucket_mb), device="cpu")
        trainer.compile(torch.ones(2, 1024), None)
        nodes = trainer.graph_module.graph.nodes
        tags = [tag for node in nodes if (tag := node.meta.get("hp_comm")) is not None and tag.stage == "launch"]
        found[bucket_mb] = Counter((tag.kind, tag.region, tag.unit) for tag in tags), trainer.explain()
    return found
