"""init_states gives the same bits for one process, FSDP2, a tensor-parallel mesh and both; uneven rows too (M6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hp_protocols.distributed import canonical_fqn
from hp_protocols.function import Function
from hp_protocols.module import Module, ModuleList, skip_param_init
from hp_protocols.platform import nn
from hp_protocols.sharding import ShardingConfig
from hp_protocols.testing import run_world
from hp_protocols.types import MeshAxisName

TP, FSDP = MeshAxisName.TP, MeshAxisName.FSDP
SEED = 1234
State = dict[str, torch.Tensor]

normal = Function.Config(fn="torch.nn.init.normal_", kwargs={"std": 0.3})


def shift_by_one(tensor: torch.Tensor) -> None:
    """An initialiser whose result depends on the whole tensor."""
    torch.nn.init.uniform_(tensor)
    tensor.sub_(tensor.mean())


def rows(tp: Any) -> dict[str, Any]:
    return {"weight": {TP: tp}, "bias": {TP: tp if tp == Shard(0) else Replicate()}}


class Linear(nn.Linear, Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_features: int
        out_features: int

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.out_features)


class Embedding(nn.Embedding, Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        rows: int = 7
        dim: int = 6

    def __init__(self, config: Config) -> None:
        super().__init__(config.rows, config.dim)


class Rotary(Module):
    """Has buffers only, one of them sharded."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        size: int = 5

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.size
        self.register_buffer("table", torch.empty(config.size, 2), persistent=False)
        self.register_buffer("noise", torch.empty(3))

    def _init_self_buffers(self, *, buffer_device: Any = None) -> None:
        self.table = torch.arange(2.0 * self.size, device=buffer_device).reshape(self.size, 2)
        self.noise = torch.rand(3)


def linear(in_features: int, out_features: int, tp: Any, **param_init: Any) -> Linear.Config:
    return Linear.Config(
        in_features=in_features,
        out_features=out_features,
        param_init=param_init or None,
        sharding_config=ShardingConfig(state_shardings=rows(tp)),
    )


class Net(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        embed: Embedding.Config = field(
            default_factory=lambda: Embedding.Config(
                param_init={"weight": normal},
                sharding_config=ShardingConfig(state_shardings={"weight": {TP: Shard(0)}}),
            )
        )
        layers: list[Linear.Config] = field(
            default_factory=lambda: [
                linear(6, 5, Shard(0), weight=shift_by_one, bias=normal),  # 5 rows: uneven over 2 and 3 ranks
                linear(5, 6, Shard(1), weight=normal, bias=normal),
                linear(6, 6, Shard(0)),  # by reset_parameters
            ]
        )
        rotary: Rotary.Config = field(
            default_factory=lambda: Rotary.Config(
                sharding_config=ShardingConfig(state_shardings={"table": {TP: Shard(0)}, "noise": {TP: Replicate()}})
            )
        )
        head: Embedding.Config = field(
            default_factory=lambda: Embedding.Config(
                param_init={"weight": skip_param_init},
                sharding_config=ShardingConfig(state_shardings={"weight": {TP: Shard(0)}}),
            )
        )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = config.embed.build()
        self.layers = ModuleList(layer.build() for layer in config.layers)
        # A plain container, a plain layer in it, and a wrapper: none of them is a Module.
        self.plain = nn.ModuleDict({"inner": config.layers[0].build(), "norm": nn.LayerNorm(3)})
        self.wrapped = checkpoint_wrapper(config.layers[1].build())
        self.rotary = config.rotary.build()
        self.head = config.head.build()
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.empty(3))
        self._param_init = {"scale": normal}


def make_net() -> Net:
    with torch.device("meta"):
        net: Net = Net.Config().build()
    return net


def materialised(net: Net, **how: Any) -> State:
    net.to_empty(device="cpu")
    for state in [*net.parameters(), *net.buffers()]:  # to_empty may hand out zeros, which would hide a mistake
        local = state.to_local() if isinstance(state, DTensor) else state
        local.detach().fill_(float("nan"))
    net.init_states(**how)
    assert net.head.weight is net.embed.weight
    return whole_state(net)


def whole_state(module: torch.nn.Module) -> State:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        canonical_fqn(name): (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


def one_process() -> State:
    return materialised(make_net(), seed=SEED)


def shard_by_fsdp(net: Net, mesh: Any) -> None:
    for unit in (*net.layers, net.plain["inner"], net.wrapped, net):
        fully_shard(unit, mesh=mesh)


def in_fsdp(rank: int, world_size: int) -> State:
    net = make_net()
    shard_by_fsdp(net, init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",)))
    assert isinstance(net.embed.weight, DTensor)
    return materialised(net, seed=SEED)


def in_tensor_parallel(rank: int, world_size: int) -> State:
    net = make_net()
    net.parallelize(init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)))
    assert isinstance(net.plain["inner"].weight, DTensor)
    state = materialised(net, seed=SEED)
    assert isinstance(net.rotary.table, DTensor)
    assert net.rotary.table.placements == (Shard(0),)
    return state


def in_both(rank: int, world_size: int) -> State:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    net = make_net()
    net.parallelize(mesh["tp"])
    shard_by_fsdp(net, mesh["fsdp"])
    state = materialised(net, seed=SEED)
    assert "_StridedShard" in type(net.layers[0].weight.placements[0]).__name__
    return state


def after_fsdp_by_hand(rank: int, world_size: int) -> tuple[bool, ...]:
    """Whether the local part that init_states wrote is what FSDP itself cuts from the whole parameter."""
    expected = one_process()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    ours = make_net()
    ours.parallelize(mesh["tp"])
    shard_by_fsdp(ours, mesh["fsdp"])
    materialised(ours, seed=SEED)
    theirs = Net.Config().build()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(expected[canonical_fqn(name)])
    theirs.parallelize(mesh["tp"])
    shard_by_fsdp(theirs, mesh["fsdp"])
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return tuple(torch.equal(a.to_local(), b.to_local()) and a.placements == b.placements for a, b in pairs)


def assert_same_bits(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert not tensor.isnan().any(), name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("layout", ["fsdp of 2", "fsdp of 3", "tp of 2", "tp of 3", "fsdp of 2 over tp of 2"])
def test_every_layout_starts_with_the_bits_of_one_process(layout: str, worlds: dict[str, list[Any]]) -> None:
    expected = one_process()
    for state in worlds[layout]:
        assert_same_bits(expected, state)


def test_the_local_parts_are_what_fsdp_over_tensor_parallel_cuts_itself(worlds: dict[str, list[Any]]) -> None:
    for equal in worlds["local parts"]:
        assert all(equal)


def with_a_seed_per_rank(rank: int, world_size: int) -> State:
    torch.manual_seed(100 + rank)
    net = make_net()
    shard_by_fsdp(net, init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",)))
    state = materialised(net)
    after = torch.rand(4)
    torch.manual_seed(100 + rank)
    assert torch.equal(after, torch.rand(4))  # init_states leaves the generator of the process alone
    return state


def test_without_a_seed_all_ranks_use_that_of_rank_zero(worlds: dict[str, list[Any]]) -> None:
    torch.manual_seed(100)
    expected = materialised(make_net())
    for state in worlds["a seed per rank"]:
        assert_same_bits(expected, state)


def half_the_world(rank: int, world_size: int) -> tuple[int, bool]:
    """A parameter on a mesh that leaves a rank out."""
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    layer = linear(4, 4, Shard(0), weight=normal, bias=normal).build()
    layer.parallelize(mesh)
    layer.init_states(seed=SEED)
    dist.barrier()
    reference = linear(4, 4, Shard(0), weight=normal, bias=normal).build()
    reference.init_states(seed=SEED)
    local = layer.weight.to_local()
    start = 2 * rank
    return local.numel(), rank > 1 or torch.equal(local, reference.weight[start : start + 2])


def test_a_rank_outside_the_mesh_holds_nothing_and_does_not_fail(worlds: dict[str, list[Any]]) -> None:
    assert worlds["half the world"] == [(8, True), (8, True), (0, True)]


def sharded_by_torch(rank: int, world_size: int) -> bool:
    from hp_protocols.local_pieces import local_piece

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    equal = True
    for shape in ((7, 5), (4, 4), (1, 3), (2, 9)):
        whole = torch.arange(float(shape[0] * shape[1])).reshape(shape)
        for placements in ((Shard(0), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Shard(-1)), (Shard(1), Shard(1))):
            ours = local_piece(whole, placements, tuple(mesh.shape), mesh.get_coordinate() or ())
            equal &= torch.equal(ours, distribute_tensor(whole, mesh, placements).to_local())
    return equal


def test_pieces_are_cut_as_torch_distributes_tensors(worlds: dict[str, list[Any]]) -> None:
    assert worlds["pieces"] == [True] * 4


# Starting a world costs more than what runs in it: one world per size runs all that needs it.
WORLDS: dict[int, dict[str, Callable[[int, int], Any]]] = {
    2: {"fsdp of 2": in_fsdp, "tp of 2": in_tensor_parallel, "a seed per rank": with_a_seed_per_rank},
    3: {"fsdp of 3": in_fsdp, "tp of 3": in_tensor_parallel, "half the world": half_the_world},
    4: {"fsdp of 2 over tp of 2": in_both, "local parts": after_fsdp_by_hand, "pieces": sharded_by_torch},
}


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    return {name: function(rank, world_size) for name, function in WORLDS[world_size].items()}


@pytest.fixture(scope="module")
def worlds() -> dict[str, list[Any]]:
    """What each function returned, by rank."""
    results: dict[str, list[Any]] = {}
    for size, functions in WORLDS.items():
        by_rank = run_world(run_all, size, timeout=300)
        results |= {name: [result[name] for result in by_rank] for name in functions}
    return results
