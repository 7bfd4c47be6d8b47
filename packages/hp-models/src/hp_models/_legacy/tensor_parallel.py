"""Tensor parallelism of a bare model: each rank computes with its part of every matrix.

In: a model, its `TensorPlan`, a mesh axis. Out: the same model. Its parameters are distributed tensors under the names
that they had; between them it computes on plain tensors, of which each rank has its own heads and channels.

As in Megatron-LM (Shoeybi et al., arXiv 1909.08053): a block takes its input whole and cuts its first matrices by
outputs (colwise); its last are cut by inputs (rowwise), and what they give is summed over the ranks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hp_models._legacy.plans import COLWISE, ROWWISE, TensorPlan
from hp_protocols.errors import Fault
from hp_protocols.platform import F, Partial, Replicate, Shard, get_platform, nn, ops

if TYPE_CHECKING:
    from torch import Tensor

    from hp_models._legacy.qwen3_5 import Qwen3_5
    from hp_protocols.platform import DeviceMesh, Module, Parameter
    from hp_protocols.types import Placement

__all__ = ["apply_tensor_parallel", "sharing_faults"]

# What the ranks of a block share evenly: dimensions of the config, by the block's name.
SHARED = {
    "self_attn": ("num_attention_heads", "num_key_value_heads"),
    "linear_attn": ("linear_num_key_heads", "linear_num_value_heads"),
    "mlp": ("intermediate_size",),
}


def sharing_faults(model: Qwen3_5, plan: TensorPlan, ranks: int) -> list[Fault]:
    """Heads and channels that so many ranks cannot share."""
    faults = []
    for kind in dict.fromkeys(block.rpartition(".")[2] for block in plan.blocks):
        counts = {name: getattr(model.config, name) for name in SHARED[kind]}
        if unfit := [f"{name} {count}" for name, count in counts.items() if count % ranks]:
            common = math.gcd(*counts.values())
            faults.append(
                Fault(
                    "train.accelerator.tp",
                    f"{ranks} ranks cannot share {' or '.join(unfit)} evenly",
                    allowed=", ".join(str(degree) for degree in range(1, common + 1) if common % degree == 0),
                    hint=f"model.tp_plan: {{'layers.*.{kind}.*': replicate}} lets every rank compute it whole",
                )
            )
    rows = model.config.vocab_size
    if "lm_head" in plan.words or "embed_tokens" in plan.words:
        part = -(-rows // ranks)
        if part * (ranks - 1) >= rows:
            faults.append(Fault("train.accelerator.tp", f"{ranks} ranks: one would have none of {rows} tokens"))
    return faults


def apply_tensor_parallel(model: Qwen3_5, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Lay the parameters out and let the modules compute with a rank's part of them; in place.

    The logits stay cut along the vocabulary, as a distributed tensor: the loss works on each rank's columns.
    """
    _lay_out_parameters(model, plan, mesh)
    for name in plan.blocks:
        model.get_submodule(name).register_forward_pre_hook(functools.partial(_hand_out, mesh))
    for name, word in plan.words.items():
        if word == ROWWISE:
            model.get_submodule(name).register_forward_hook(functools.partial(_add_up, mesh))
    if "lm_head" in plan.words:
        model.lm_head.register_forward_pre_hook(functools.partial(_hand_out, mesh))
        model.lm_head.register_forward_hook(functools.partial(_as_columns, mesh))


def _lay_out_parameters(model: Qwen3_5, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Every parameter becomes a distributed one, a tied one once.

    One that is whole inside of a block meets this rank's heads only: its gradient is a partial sum, and says so.
    """
    # The plain parameter is kept beside the other, so that its id stays its own.
    made: dict[int, tuple[Parameter, Parameter]] = {}
    for name, module in list(model.named_modules()):
        parameters = dict(module.named_parameters(recurse=False))
        if not parameters:
            continue
        shared = any(name.startswith(f"{block}.") for block in plan.blocks)
        gradients: dict[str, Placement] = {}
        for own, parameter in parameters.items():
            matrix = name if isinstance(module, nn.Linear | nn.Embedding) else f"{name}.{own}"
            word = plan.words.get(matrix)
            cut = Replicate() if word is None else Shard(0 if word == COLWISE else 1)
            if id(parameter) not in made:
                made[id(parameter)] = parameter, _distributed(parameter, mesh, cut)
            setattr(module, own, made[id(parameter)][1])
            gradients[own] = Partial() if shared and word is None else cut
        module.tensor_part = TensorPart(mesh, gradients)
        # Any: a class, which mypy does not take for something that a cache can hold.
        cls: Any = EmbeddingOfRows if name in plan.words and isinstance(module, nn.Embedding) else type(module)
        module.__class__ = _computing_with_parts(cls)


def _distributed(parameter: Parameter, mesh: DeviceMesh, placement: Placement) -> Parameter:
    platform = get_platform()
    tensor = platform.distribute_tensor(parameter.detach(), mesh, [placement])
    return platform.Parameter(tensor, requires_grad=parameter.requires_grad)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The ranks that a module's parameters are shared by, and how each parameter's gradient lies on them."""

    mesh: DeviceMesh
    gradients: dict[str, Placement]

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorPart:
        return self  # The mesh has process groups, which cannot be copied.


class View:
    """A module as its forward sees it on this rank: under a parameter's name is the part that the rank has of it.

    State dicts, optimizers and data parallelism see the module itself, with whole parameters.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        for name, parameter in module.named_parameters(recurse=False):
            gradient = module.tensor_part.gradients[name]
            setattr(self, name, parameter.to_local(grad_placements=[gradient]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@functools.cache
def _computing_with_parts(cls: Any) -> Any:
    """The subclass whose forward is that of `cls` on a `View`."""

    @functools.wraps(cls.forward)
    def forward(self: Any, x: Tensor, *others: Any) -> Any:
        # As a node of its own: a norm adds up the parts of its input's gradient before it meets those of others, as
        # where every module redistributes its input. Sums in another order would have other last bits.
        return cls.forward(View(self), x.view_as(x), *others)

    namespace = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(f"{cls.__name__}OfPart", (cls,), namespace)


class EmbeddingOfRows(nn.Embedding):
    """Each rank looks up the tokens whose rows it has, and zeros for the others; the sum has all."""

    tensor_part: TensorPart

    def forward(self, ids: Tensor) -> Tensor:
        rows, mesh = self.weight, self.tensor_part.mesh
        # As torch.chunk cuts: all parts but the last are equally long.
        place = ids - mesh.get_local_rank() * -(-self.num_embeddings // mesh.size())
        missing = (place < 0) | (place >= rows.shape[0])
        found = F.embedding(place.masked_fill(missing, 0), rows)
        return AddUp.apply(found.masked_fill(missing[..., None], 0.0), mesh)


class HandOut(ops.autograd.Function):
    """The same tensor for every rank; each computes a part of its gradient, and these are summed."""

    @staticmethod
    def forward(x: Tensor, mesh: DeviceMesh) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mesh = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.mesh), None


class AddUp(ops.autograd.Function):
    """The sum of what each rank has; it goes on the same on every rank, and so does its gradient."""

    @staticmethod
    def forward(x: Tensor, mesh: DeviceMesh) -> Tensor:
        return _sum(x, mesh)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _sum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return get_platform().all_reduce(x.clone(memory_format=ops.contiguous_format), group=mesh)


def _hand_out(mesh: DeviceMesh, module: Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (HandOut.apply(inputs[0], mesh), *inputs[1:])


def _add_up(mesh: DeviceMesh, module: Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return AddUp.apply(output, mesh)


def _as_columns(mesh: DeviceMesh, lm_head: Any, inputs: tuple[Any, ...], logits: Tensor) -> Tensor:
    """[B, S, this rank's part of V] as distributed logits [B, S, V]."""
    batch, length, _ = logits.shape
    vocabulary = lm_head.out_features
    platform = get_platform()
    return platform.DTensor.from_local(
        logits,
        mesh,
        [platform.Shard(2)],
        run_check=False,
        shape=ops.Size((batch, length, vocabulary)),
        stride=(length * vocabulary, vocabulary, 1),
    )
