"""Every loss in every layout against one process: data, tensor and sequence parallelism, accumulation, chunks (M32)."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_components import ChunkedCELoss, CrossEntropyLoss
from hp_protocols import MeshAxisName, Module, ShardingConfig
from hp_protocols.distributed import apply_fsdp, canonical_named_parameters
from hp_protocols.testing import run_world

ROWS, LENGTH, WIDTH = 8, 12, 6
EVEN, UNEVEN, FEWER_THAN_RANKS = 16, 13, 5
LOSSES = {
    "whole": CrossEntropyLoss.Config(),
    "1 chunk": ChunkedCELoss.Config(num_chunks=1),
    "3 chunks": ChunkedCELoss.Config(num_chunks=3),
    "more chunks than positions": ChunkedCELoss.Config(num_chunks=50),
}

Embedding, Norm, Linear = (Module.from_nn_module(cls) for cls in (nn.Embedding, nn.LayerNorm, nn.Linear))


class Model(Module):
    """What matters of a decoder: an embedding, a norm, a projection that an `output_fn` may take over."""

    def __init__(self, vocab_size, *, sp=False, loss_parallel=True, tied=False):
        super().__init__()
        whole, stretch = {MeshAxisName.TP: Replicate()}, {MeshAxisName.TP: Shard(1)}
        rows = {MeshAxisName.TP: Shard(0)}
        between = stretch if sp else whole
        norm = ShardingConfig(
            state_shardings={"weight": whole, "bias": whole},
            in_src_shardings={"input": whole},
            in_dst_shardings={"input": between},
            out_dst_shardings=between,
        )
        head = ShardingConfig(
            state_shardings={"weight": rows, "bias": rows},
            in_src_shardings={"input": between},
            in_dst_shardings={"input": whole},
            out_dst_shardings={MeshAxisName.TP: Shard(-1)} if loss_parallel else whole,
        )
        self.embed = Embedding.Config().build(num_embeddings=vocab_size, embedding_dim=WIDTH)
        self.norm = Norm.Config(sharding_config=norm).build(normalized_shape=WIDTH)
        self.lm_head = Linear.Config(sharding_config=head).build(in_features=WIDTH, out_features=vocab_size)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids_BS, output_fn=None):
        hidden_BSD = self.norm(self.embed(ids_BS))
        return self.lm_head(hidden_BSD) if output_fn is None else output_fn(self.lm_head, hidden_BSD)


@dataclass(frozen=True)
class Layout:
    vocab_size: int = EVEN
    tp: int = 1
    sp: bool = False
    loss_parallel: bool = True
    tied: bool = False
    reshard: str = "default"
    head_alone: bool = False
    micro_batches: int = 1


LAYOUTS = [
    Layout(),
    Layout(tied=True, micro_batches=2),
    Layout(reshard="always", micro_batches=2),
    Layout(head_alone=True, reshard="always", micro_batches=2),
    Layout(tp=2),
    Layout(tp=2, sp=True, micro_batches=4),
    Layout(tp=2, sp=True, loss_parallel=False),
    Layout(tp=4, sp=True),
    Layout(tp=4, vocab_size=UNEVEN),
    Layout(tp=4, vocab_size=FEWER_THAN_RANKS, sp=True, micro_batches=8),
]


def built(vocab_size, dtype, **options):
    torch.manual_seed(0)
    model = Model(vocab_size, **options).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64))
    return model


def batch(vocab_size):
    """Rows with very unequal numbers of valid labels; the first two have none."""
    generator = torch.Generator().manual_seed(1)
    ids_BS = torch.randint(vocab_size, (ROWS, LENGTH), generator=generator)
    labels_BS = torch.randint(vocab_size, (ROWS, LENGTH), generator=generator)
    for row in range(ROWS):
        labels_BS[row, : LENGTH - max(0, 2 * (row - 1))] = -100
    return ids_BS, labels_BS


def by_hand(layout, dtype):
    """One process, one batch, plain torch."""
    model = built(layout.vocab_size, dtype, tied=layout.tied)
    ids_BS, labels_BS = batch(layout.vocab_size)
    valid = int((labels_BS != -100).sum())
    loss = F.cross_entropy(model(ids_BS).flatten(0, 1), labels_BS.flatten(), reduction="sum") / valid
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_step(layout, loss_config, dtype, world_size):
    """Loss over all ranks, and whole gradients, of the same batch shared out."""
    dp = world_size // layout.tp
    mesh = init_device_mesh("cpu", (dp, layout.tp), mesh_dim_names=("fsdp", "tp"))
    model = built(layout.vocab_size, dtype, sp=layout.sp, loss_parallel=layout.loss_parallel, tied=layout.tied)
    if layout.tp > 1:
        model.parallelize(mesh["tp"])
    last = [[model.norm], [model.lm_head]] if layout.head_alone else [[model.norm, model.lm_head]]
    units = [[model.embed, model.norm, model.lm_head]] if layout.tied else [model.embed, *last]
    if dp > 1:
        apply_fsdp(model, mesh=mesh["fsdp"], units=units, reshard_after_forward=layout.reshard)
    loss_fn = loss_config.build()
    ids_BS, labels_BS = batch(layout.vocab_size)
    valid = loss_fn.count_tokens(labels_BS)
    mine = slice(mesh.get_local_rank("fsdp") * (ROWS // dp), (mesh.get_local_rank("fsdp") + 1) * (ROWS // dp))
    count = min(layout.micro_batches, ROWS // dp)
    total = torch.zeros((), dtype=dtype)
    for ids_bS, labels_bS in zip(ids_BS[mine].chunk(count), labels_BS[mine].chunk(count), strict=True):
        loss = loss_fn.run_model(model, labels_bS, ids_bS) / valid
        assert not isinstance(loss, DTensor)
        loss.backward()
        total += loss.detach()
    torch.distributed.all_reduce(total, group=mesh["fsdp"].get_group())
    return total.item(), {name: whole(p.grad) for name, p in canonical_named_parameters(model)}


def all_layouts(rank, world_size, dtype):
    return [{name: train_step(layout, loss, dtype, world_size) for name, loss in LOSSES.items()} for layout in LAYOUTS]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_loss_and_gradients_are_those_of_one_process_in_every_layout(dtype, tolerance):
    by_rank = run_world(all_layouts, 4, dtype)
    for number, layout in enumerate(LAYOUTS):
        loss, gradients = by_hand(layout, dtype)
        for results in by_rank:
            for name, (ours, theirs) in results[number].items():
                assert ours == pytest.approx(loss, rel=tolerance), (layout, name)
                for parameter, gradient in gradients.items():
                    close = torch.allclose(theirs[parameter], gradient, rtol=tolerance, atol=tolerance)
                    assert close, (layout, name, parameter, theirs[parameter] - gradient)


def empty_batches(rank, world_size):
    """Nothing to learn from, and logits that are not finite where nothing is asked of them."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    ids_BS = batch(EVEN)[0]
    found = []
    for config in LOSSES.values():
        for weights in (1.0, math.inf):
            model = built(EVEN, torch.float32)
            with torch.no_grad():
                model.lm_head.bias.mul_(weights)
            model.parallelize(mesh)
            loss = config.build().run_model(model, torch.full((ROWS, LENGTH), -100), ids_BS)
            loss.backward()
            found.append((loss.item(), {name: whole(p.grad) for name, p in model.named_parameters()}))
    return found


def test_without_a_valid_token_loss_and_gradients_are_zero_where_the_vocabulary_is_cut():
    for found in run_world(empty_batches, 2):
        for loss, gradients in found:
            assert loss == 0.0
            assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients.values())


def refusals(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    logits_BSV = DTensor.from_local(torch.zeros(1, 2, 3), mesh, [Shard(-1)])
    partial_BSV = DTensor.from_local(torch.zeros(1, 2, 3), mesh, [torch.distributed.tensor.Partial()])
    loss_fn = CrossEntropyLoss.Config().build()
    texts = []
    for logits, labels in (
        (logits_BSV, [[0, 6]]),
        (logits_BSV, [[0, -1]]),
        (logits_BSV, [[0]]),
        (partial_BSV, [[0, 1]]),
    ):
        try:
            loss_fn(logits, torch.tensor(labels))
        except (RuntimeError, ValueError) as error:
            texts.append(str(error))
    return texts


def test_what_a_cut_vocabulary_cannot_hold_is_refused_on_every_rank():
    for texts in run_world(refusals, 2):
        assert [text.partition(":")[0].partition(" (")[0] for text in texts] == [
            "a label is outside the vocabulary of 6",
            "a label is outside the vocabulary of 6",
            "logits",
            "logits are partial sums",
        ]
