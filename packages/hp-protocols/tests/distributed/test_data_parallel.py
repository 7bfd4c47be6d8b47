"""apply_fsdp and apply_replicate on real processes, against hand-written FSDP2 and against one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hp_protocols.distributed import (
    ParallelDims,
    apply_data_parallel,
    apply_fsdp,
    apply_replicate,
    data_parallel_mode,
)
from hp_protocols.errors import ConfigError
from hp_protocols.testing import run_world

VOCAB, WIDTH, LAYERS = 11, 6, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.seen_dtypes = None

    def forward(self, x_BSD, positions):
        self.seen_dtypes = self.up.weight.dtype, positions.dtype
        return x_BSD + self.down(torch.tanh(self.up(x_BSD)))


class Model(nn.Module):
    """Embedding, blocks, norm and head; 11 rows over 2 or 4 ranks are uneven on purpose."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids_BS):
        x_BSD = self.embed(ids_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, torch.ones(1))
        return self.head(self.norm(x_BSD)) * self.scale

    def units(self):
        return [self.embed, *self.blocks, [self.norm, self.head]]


def batch_of(rank):
    ids = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(100 + rank))
    return ids[:, :-1], ids[:, 1:]


def loss_of(model, rank):
    ids_BS, labels_BS = batch_of(rank)
    logits_BSV = model(ids_BS)
    return nn.functional.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten(), reduction="sum")


def train(model, rank, steps=3):
    """Losses, and gradients of the last step and final weights, gathered."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, rank)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses, gathered({n: p.grad for n, p in model.named_parameters()}), gathered(model.state_dict())


def gathered(tensors):
    return {n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in tensors.items()}


def summed_gradients(world_size, tied=False):
    """What one process computes from all ranks' batches."""
    model = Model(tied)
    sum(loss_of(model, rank) for rank in range(world_size)).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def assert_close(left, right):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-5, atol=1e-6, msg=name)


def sharded_gradients(model, rank):
    loss_of(model, rank).backward()
    return gathered({n: p.grad for n, p in model.named_parameters()})


# FSDP on two processes


def hand_written(mesh, policy=None):
    model = Model()
    options = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    for unit in [model.embed, *model.blocks]:
        fully_shard(unit, reshard_after_forward=True, **options)
    fully_shard([model.norm, model.head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def check_fsdp(rank, world_size):
    mesh = ParallelDims(world_size=world_size).get_mesh("fsdp")
    model = Model()
    names = list(model.state_dict())
    assert apply_fsdp(model, mesh=mesh, units=model.units()) is model
    assert list(model.state_dict()) == names
    assert all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in model.parameters())

    losses, grads, weights = train(model, rank)
    hand_losses, hand_grads, hand_weights = train(hand_written(mesh), rank)
    assert all(torch.equal(a, b) for a, b in zip(losses, hand_losses, strict=True))
    assert_equal(grads, hand_grads)
    assert_equal(weights, hand_weights)

    first = Model()
    assert_close(
        sharded_gradients(apply_fsdp(first, mesh=mesh, units=first.units()), rank), summed_gradients(world_size)
    )
    mean = Model()
    for module in apply_fsdp(mean, mesh=mesh, units=mean.units(), sum_gradients=False).modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot average; the divisor is FSDP2's own
    halves = {n: g * world_size for n, g in sharded_gradients(mean, rank).items()}
    assert_close(halves, summed_gradients(world_size))

    tied = Model(tied=True)
    apply_fsdp(tied, mesh=mesh, units=[*tied.blocks, [tied.embed, tied.norm, tied.head]])
    assert tied.head.weight is tied.embed.weight
    assert_close(sharded_gradients(tied, rank), summed_gradients(world_size, tied=True))


def check_precision(rank, world_size):
    mesh = ParallelDims(world_size=world_size).get_mesh("fsdp")
    model = Model()
    apply_fsdp(model, mesh=mesh, units=model.units(), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    assert_equal(sharded_gradients(model, rank), sharded_gradients(hand_written(mesh, policy), rank))
    # Weights are cast, what a block is handed beside them is not, unless asked for.
    assert {block.seen_dtypes for block in model.blocks} == {(torch.bfloat16, torch.float32)}
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}

    model = Model()
    apply_fsdp(model, mesh=mesh, units=model.units(), param_dtype=torch.bfloat16, cast_forward_inputs=True)
    loss_of(model, rank)
    assert {block.seen_dtypes for block in model.blocks} == {(torch.bfloat16, torch.bfloat16)}


def kept_whole(mesh, **options):
    """Which units still hold whole parameters after forward, by the kind of weight that is registered."""
    model = Model()
    apply_fsdp(model, mesh=mesh, units=model.units(), **options)
    loss_of(model, 0)
    weights = [model.embed.weight, *(block.up.weight for block in model.blocks), model.head.weight]
    return [not isinstance(weight, DTensor) for weight in weights]


def check_resharding(rank, world_size):
    mesh = ParallelDims(world_size=world_size).get_mesh("fsdp")
    all_sharded, all_whole = [False] * (LAYERS + 2), [True] * (LAYERS + 2)
    assert kept_whole(mesh, reshard_after_forward="always") == all_sharded
    assert kept_whole(mesh, reshard_after_forward=True) == all_sharded
    assert kept_whole(mesh, reshard_after_forward="never") == all_whole
    assert kept_whole(mesh, reshard_after_forward=False) == all_whole
    assert kept_whole(mesh) == [*all_sharded[:-1], True]
    assert kept_whole(mesh, pp_enabled=True) == all_whole
    assert kept_whole(mesh, pp_enabled=True, reshard_after_forward="always") == all_sharded


def check_nested_units(rank, world_size):
    mesh = ParallelDims(world_size=world_size).get_mesh("fsdp")
    model = Model()
    inner = [block.up for block in model.blocks]
    apply_fsdp(model, mesh=mesh, units=[*model.units()[:-1], *inner, model.units()[-1]])
    assert all(isinstance(module, FSDPModule) for module in inner)
    assert_close(sharded_gradients(model, rank), summed_gradients(world_size))


def check_two(rank, world_size):
    check_fsdp(rank, world_size)
    check_precision(rank, world_size)
    check_resharding(rank, world_size)
    check_nested_units(rank, world_size)
    check_replicate(rank, world_size)
    check_choice_of_two(rank, world_size)


def chosen(dims, **options):
    model = Model()
    options = {"param_dtype": torch.float32, "reduce_dtype": torch.float32} | options
    assert apply_data_parallel(model, parallel_dims=dims, units=model.units(), **options) is model
    return model


def check_choice_of_two(rank, world_size):
    """The layout alone chooses: the gradients are those of the function that it chooses, called by hand."""
    sharded, replicated = ParallelDims(world_size=2), ParallelDims(dp_replicate=2, world_size=2)
    assert (data_parallel_mode(sharded), data_parallel_mode(replicated)) == ("fsdp", "ddp")
    narrow = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for dims, apply in ((sharded, apply_fsdp), (replicated, apply_replicate)):
        mesh = dims.get_mesh("fsdp" if dims is sharded else "dp_replicate")
        for dtypes in ({}, narrow):
            by_hand = apply(hand := Model(), mesh=mesh, units=hand.units(), **dtypes)
            assert_equal(sharded_gradients(chosen(dims, **dtypes), rank), sharded_gradients(by_hand, rank))
    kept = chosen(sharded, reshard_after_forward="never")
    loss_of(kept, rank)
    assert not isinstance(kept.embed.weight, DTensor)
    # Context parallelism shards over its ranks, too.
    assert isinstance(chosen(ParallelDims(cp=2, world_size=2)).embed.weight, DTensor)
    # Tensor parallelism alone is none of data parallelism, unless there is a dtype to compute in.
    alone = ParallelDims(tp=2, world_size=2)
    assert not any(isinstance(module, FSDPModule) for module in chosen(alone).modules())
    assert isinstance(chosen(alone, **narrow), FSDPModule)
    with pytest.raises(ValueError, match="cpu_offload works on shards, and this layout only replicates"):
        chosen(replicated, cpu_offload=True)


def check_replicate(rank, world_size):
    mesh = ParallelDims(dp_replicate=world_size, world_size=world_size).get_mesh("dp_replicate")
    model = Model()
    names = list(model.state_dict())
    assert apply_replicate(model, mesh=mesh, units=model.units()) is model
    assert list(model.state_dict()) == names
    assert all(p.to_local().shape == p.shape for p in model.parameters() if isinstance(p, DTensor))
    assert_close(sharded_gradients(model, rank), summed_gradients(world_size))
    with pytest.raises(ValueError, match="sharded or replicated already"):
        apply_fsdp(model, mesh=mesh, units=model.units())

    _, _, weights = train(apply_replicate(fresh := Model(), mesh=mesh, units=fresh.units()), rank)
    reference = Model()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=False)
    for _ in range(3):
        optimizer.zero_grad()
        sum(loss_of(reference, r) for r in range(world_size)).backward()
        optimizer.step()
    assert_close(weights, reference.state_dict())


def test_two_ranks_train_as_hand_written_fsdp2_and_sum_their_gradients():
    run_world(check_two, 2)


# HSDP, and FSDP over tensor-parallel parameters, on four processes


def check_hsdp(rank, world_size):
    dims = ParallelDims(dp_replicate=2, world_size=world_size)
    model = Model()
    apply_fsdp(model, mesh=dims.get_mesh(["dp_replicate", "fsdp"]), units=model.units())
    assert all(p.placements == (Replicate(), Shard(0)) for p in model.parameters())
    assert_close(sharded_gradients(model, rank), summed_gradients(world_size))
    assert data_parallel_mode(dims) == "hsdp"
    assert all(p.placements == (Replicate(), Shard(0)) for p in chosen(dims).parameters())


def check_tp(rank, world_size):
    """Ranks of tp see the same rows; the meshes of ParallelDims have the common root that FSDP2 asks for."""
    dims = ParallelDims(tp=2, world_size=world_size)
    tp, fsdp = dims.get_mesh("tp"), dims.get_mesh("fsdp")
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False))
    model[0].weight = nn.Parameter(distribute_tensor(torch.linspace(-1, 1, 48).view(8, 6), tp, [Shard(0)]))
    model[1].weight = nn.Parameter(distribute_tensor(torch.linspace(-1, 1, 48).view(6, 8), tp, [Shard(1)]))
    apply_fsdp(model, mesh=fsdp, units=[model[0]])
    for parameter in model.parameters():
        assert parameter.device_mesh.mesh_dim_names == ("fsdp", "tp")
    x = torch.linspace(-1, 1, 12).view(2, 6) * (1 + fsdp.get_local_rank())
    out = model(DTensor.from_local(x, tp, [Replicate()], run_check=False))
    out.full_tensor().square().sum().backward()

    plain = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False))
    plain[0].weight = nn.Parameter(torch.linspace(-1, 1, 48).view(8, 6))
    plain[1].weight = nn.Parameter(torch.linspace(-1, 1, 48).view(6, 8))
    sum(plain(torch.linspace(-1, 1, 12).view(2, 6) * k).square().sum() for k in (1, 2)).backward()
    assert_close(
        gathered({n: p.grad for n, p in model.named_parameters()}), {n: p.grad for n, p in plain.named_parameters()}
    )


def check_four(rank, world_size):
    check_hsdp(rank, world_size)
    check_tp(rank, world_size)


def test_hsdp_and_tensor_parallel_meshes_sum_gradients_over_all_data_ranks():
    run_world(check_four, 4)


# One process


@pytest.fixture
def one_rank():
    from hp_protocols.platform import get_platform

    platform = get_platform()
    platform.init_process_group(device="cpu")
    yield ParallelDims(world_size=1).get_mesh("fsdp")
    platform.destroy_process_group()


def test_a_mesh_of_one_rank_gives_the_gradients_of_the_plain_model(one_rank):
    model = Model()
    apply_fsdp(model, mesh=one_rank, units=model.units())
    assert_equal(sharded_gradients(model, 0), summed_gradients(1))
    model = Model()
    apply_replicate(model, mesh=one_rank, units=model.units())
    assert_equal(sharded_gradients(model, 0), summed_gradients(1))


@pytest.mark.parametrize("apply", [apply_fsdp, apply_replicate])
def test_units_that_cannot_be_wrapped_are_refused_before_anything_is(one_rank, apply):
    model, other = Model(), Model()
    cases = [
        ([other.embed], r"units\[0\] \(Embedding\) is not a module of the model"),
        ([model.embed, model], r"units\[1\] is the model itself"),
        ([model.embed, [model.norm, model.embed]], r"units\[1\]: 'embed' is given twice"),
        ([[]], r"units\[0\] is an empty list"),
        ([model.embed, model.blocks], r"blocks \(ModuleList\) has no forward; make its members units"),
    ]
    for units, text in cases:
        with pytest.raises(ValueError, match=text):
            apply(model, mesh=one_rank, units=units)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


@pytest.mark.parametrize("apply", [apply_fsdp, apply_replicate])
def test_a_weight_shared_by_two_units_is_refused_since_it_would_become_two(one_rank, apply):
    model = Model(tied=True)
    for units in (model.units(), [model.embed], [*model.blocks, model.head]):
        with pytest.raises(ValueError, match=r"'embed\.weight' and 'head\.weight' are one parameter in two units"):
            apply(model, mesh=one_rank, units=units)
    apply(model, mesh=one_rank, units=model.blocks)
    assert model.head.weight is model.embed.weight


def test_a_module_that_two_units_share_is_refused_and_one_that_a_unit_uses_twice_is_not(one_rank):
    shared = nn.Linear(3, 3)
    model = nn.Sequential(nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Tanh(), shared))
    with pytest.raises(ValueError, match=r"'0\.0\.weight' and '1\.1\.weight' are one parameter in two units"):
        apply_fsdp(model, mesh=one_rank, units=list(model))
    apply_fsdp(model, mesh=one_rank, units=[list(model)])
    assert model[0][0] is model[1][1]


@pytest.mark.parametrize("apply", [apply_fsdp, apply_replicate])
def test_a_model_is_wrapped_once(one_rank, apply):
    model = Model()
    apply(model, mesh=one_rank, units=model.units())
    with pytest.raises(ValueError, match="the model is sharded or replicated already"):
        apply(model, mesh=one_rank, units=model.units())
    model = Model()
    apply(model.blocks[1], mesh=one_rank, units=[])
    with pytest.raises(ValueError, match=r"blocks\.1 is sharded or replicated already"):
        apply(model, mesh=one_rank, units=model.units())


def test_options_that_cannot_act_are_refused(one_rank):
    model = Model()
    with pytest.raises(ValueError, match="reshard_after_forward='sometimes'; allowed: True, False, 'default'"):
        apply_fsdp(model, mesh=one_rank, units=model.units(), reshard_after_forward="sometimes")
    with pytest.raises(ConfigError, match=r"training\.enable_cpu_offload: the device is the cpu"):
        apply_fsdp(model, mesh=one_rank, units=model.units(), cpu_offload=True)
    cube = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match="this mesh has 3"):
        apply_fsdp(model, mesh=cube, units=model.units())
    with pytest.raises(ValueError, match="replication runs over 1 axis; this mesh has 3"):
        apply_replicate(model, mesh=cube, units=model.units())
