"""What a trainer did of what its run asks for, seen in what it built: the numbers are the same with and without.

In: a trainer that has trained. Out: plain data, on each rank; and, from those of all ranks, what contradicts the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from align8.material import LAYER_TYPES
from align8.matrix import Run
from hp_compile import distributed_view
from hp_protocols.distributed import SequenceAxis, canonical_fqn
from hp_protocols.types import MeshAxisName
from hp_trainer import HyperTrainer, LLMTrainer
from hp_trainer.graph_mode import GraphTrainingStep

__all__ = ["asked_for", "contradiction", "evidence_of"]

SEQUENCE = 1
"""Tensor dim of activations [batch, sequence, channels]."""
aten = torch.ops.aten
MATRIX_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)


def evidence_of(trainer: HyperTrainer | LLMTrainer) -> dict[str, Any]:
    """What can be seen on this rank; beside what `asked_for` has, the matrix products of the graph."""
    module = trainer.model.module if isinstance(trainer, HyperTrainer) else trainer.model
    graph = isinstance(trainer.training_step, GraphTrainingStep)
    return {
        # A wrapper for recomputation is a module of which the canonical name knows nothing.
        "recomputed_blocks": sum(canonical_fqn(name) == holder(name) for name, _ in module.named_modules() if name),
        "sequence_parallel": isinstance(trainer, HyperTrainer) and declares_sequence_parallel(trainer),
        "graph": graph,
        "micro_batches": trainer.training_step.micro_batches,
        "degrees": degrees(trainer, module),
        "matrix_products": matrix_products(trainer) if graph else None,
    }


def holder(name: str) -> str:
    """The canonical name of the module that holds the one of this name."""
    return canonical_fqn(name.rpartition(".")[0])


def declares_sequence_parallel(trainer: HyperTrainer) -> bool:
    """Whether the model that was built takes activations that are cut along the sequence into its last norm."""
    config: Any = trainer.model.config
    declared = config.norm.sharding_config
    placed = (declared.in_src_shardings or {}).get("x", {}) if declared is not None else {}
    return placed.get(MeshAxisName.TP) == Shard(SEQUENCE)


def degrees(trainer: HyperTrainer | LLMTrainer, module: torch.nn.Module) -> dict[str, int]:
    """Ranks on each mesh axis over which parameters or sequences really are laid out; axes of one rank are left out."""
    found: dict[str, int] = {}
    graph = trainer.graph if isinstance(trainer, HyperTrainer) else None
    if graph is not None:
        # In a graph replicas are plain tensors; the config has the degrees that the graph was partitioned by.
        resolved = graph.trainer.pass_config
        found |= {"dp_replicate": resolved.dp_replicate_degree or 1, "fsdp": resolved.fsdp_degree or 1}
    for parameter in module.parameters():
        value = distributed_view(parameter) if graph is not None else parameter
        if isinstance(value, DTensor):
            mesh = value.device_mesh
            found |= {axis: mesh.size(dim) for dim, axis in enumerate(mesh.mesh_dim_names or ())}
    for part in module.modules():
        axes = (held for held in vars(part).values() if isinstance(held, SequenceAxis))
        found |= {axis: held.size for held in axes for axis in held.mesh.mesh_dim_names or ()}
    return {axis: size for axis, size in sorted(found.items()) if size > 1}


def matrix_products(trainer: HyperTrainer | LLMTrainer) -> int:
    """Of a step's graph; recomputation adds to them."""
    assert isinstance(trainer, HyperTrainer)
    assert trainer.graph is not None
    nodes = trainer.graph.trainer.graph_module.graph.nodes
    return sum(node.op == "call_function" and node.target in MATRIX_PRODUCTS for node in nodes)


def asked_for(run: Run) -> dict[str, Any]:
    """The evidence that there has to be on every rank."""
    layout, settings = run.layout, run.settings
    axes = {
        "cp": layout.context,
        "dp_replicate": layout.replicate,
        "fsdp": layout.shard * layout.context,
        "tp": layout.tensor,
    }
    return {
        "recomputed_blocks": len(LAYER_TYPES) if settings.recompute else 0,
        "sequence_parallel": layout.sequence_parallel,
        "graph": run.path == "graph",
        "micro_batches": settings.micro_batches,
        "degrees": {axis: size for axis, size in axes.items() if size > 1},
    }


def contradiction(run: Run, ended: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]] = ()) -> str | None:
    """The first thing in which a rank did other than it was asked to.

    Args:
        ended: how each process ended.
        plain: the same of the plain row, where there is one.
    """
    for outcome in ended:
        for name, wanted in asked_for(run).items():
            if (seen := outcome["evidence"].get(name)) != wanted:
                return f"rank {outcome['rank']}: {name} {seen}, not {wanted}"
    if run.settings.recompute and run.path == "graph" and plain:
        mine, without = (outcomes[0]["evidence"]["matrix_products"] for outcomes in (ended, plain))
        if mine <= without:
            return f"{mine} matrix products in the graph, the plain row's has {without}: nothing is recomputed"
    return None
