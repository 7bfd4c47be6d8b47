"""parallelize(mesh): declared states are distributed, forwards reshard, and mistakes are refused with the FQN (M7).

All cases run in one world of two processes, on a mesh named "tp" unless they make their own.
"""

from __future__ import annotations

import copy
import traceback
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hp_protocols.module import Module, ModuleList
from hp_protocols.platform import nn
from hp_protocols.sharding import LocalMapConfig, ShardingConfig
from hp_protocols.testing import run_world
from hp_protocols.types import MeshAxisName

TP, DP, FSDP = MeshAxisName.TP, MeshAxisName.DP, MeshAxisName.FSDP
CASES: dict[str, Callable[[DeviceMesh], Any]] = {}
Pair = namedtuple("Pair", ["left", "right"])


def case(function: Callable[[DeviceMesh], Any]) -> Callable[[DeviceMesh], Any]:
    CASES[function.__name__] = function
    return function


def run_cases(rank: int, world_size: int) -> dict[str, str | None]:
    """The traceback of each case that failed; None for the others."""
    outcome: dict[str, str | None] = {}
    for name, function in CASES.items():
        try:
            torch.manual_seed(0)
            function(init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)))
            outcome[name] = None
        except Exception:
            outcome[name] = traceback.format_exc()
    return outcome


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str | None]]:
    return run_world(run_cases, 2, timeout=300)


class Linear(nn.Linear, Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_features: int
        out_features: int

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.out_features)


class Any_(Module):
    """A layer whose forward is given from outside, with two states."""

    def __init__(self, sharding: ShardingConfig | None, *, states: bool = True) -> None:
        super().__init__()
        if states:
            self.weight = nn.Parameter(torch.arange(12.0).reshape(6, 2))
            self.register_buffer("table", torch.arange(4.0), persistent=False)
            self.register_buffer("empty", None)
        self._sharding_config = sharding


class Root(Module):
    def __init__(self, **children: torch.nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def refused(mesh: DeviceMesh, module: Module, *parts: str) -> None:
    """parallelize raises a ValueError that holds the parts, and has changed nothing."""
    before = {name: id(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    classes = [type(child) for child in module.modules()]
    with pytest.raises(ValueError) as raised:
        module.parallelize(mesh)
    for part in parts:
        assert part in str(raised.value), str(raised.value)
    assert before == {name: id(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    assert classes == [type(child) for child in module.modules()]


def replicate(*names: str) -> dict[str, Any]:
    return {name: {TP: Replicate()} for name in names}


STATES = {"weight": {TP: Shard(0)}, "table": {TP: Replicate()}}
IN_REPLICATED = {"in_src_shardings": replicate("x"), "in_dst_shardings": replicate("x")}


def mlp() -> Root:
    """Column-wise, then row-wise: the pair of every tensor-parallel feed-forward."""
    up = Linear.Config(
        in_features=4,
        out_features=6,
        sharding_config=ShardingConfig(
            state_shardings={"weight": {TP: Shard(0)}, "bias": {TP: Shard(0)}},
            in_src_shardings=replicate("input"),
            in_dst_shardings=replicate("input"),
            out_dst_shardings={TP: Shard(-1)},
        ),
    )
    down = Linear.Config(
        in_features=6,
        out_features=4,
        sharding_config=ShardingConfig(
            state_shardings={"weight": {TP: Shard(1)}, "bias": {TP: Replicate()}},
            in_dst_shardings={"input": {TP: Shard(-1)}},
            out_dst_shardings={TP: Replicate()},
        ),
    )
    # Plain containers and a wrapper between the root and the layers.
    return Root(box=nn.ModuleDict({"up": up.build(), "act": nn.ReLU(), "down": checkpoint_wrapper(down.build())}))


def run_mlp(model: Root, x: torch.Tensor) -> torch.Tensor:
    box: Any = model.box
    output: torch.Tensor = box["down"](box["act"](box["up"](x)))
    return output


@case
def a_parallel_mlp_computes_what_one_process_computes(mesh: DeviceMesh) -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    model.parallelize(mesh)
    x = torch.randn(3, 4)
    output = run_mlp(model, x)
    assert isinstance(output, DTensor)
    expected = run_mlp(reference, x)
    torch.testing.assert_close(output.full_tensor(), expected)
    output.full_tensor().square().sum().backward()
    expected.square().sum().backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert isinstance(ours, DTensor), name
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@case
def the_gradient_of_an_input_comes_back_in_the_layout_of_the_input(mesh: DeviceMesh) -> None:
    """Also where nothing was to be resharded on the way in: a column-wise layer gives partial sums."""
    model, whole = mlp(), mlp()
    whole.load_state_dict(model.state_dict())
    model.parallelize(mesh)
    x = torch.arange(8.0).reshape(2, 4).requires_grad_()
    reference = x.detach().clone().requires_grad_()
    run_mlp(whole, reference).sum().backward()
    distributed = DTensor.from_local(x.detach(), mesh, [Replicate()], run_check=False).requires_grad_()
    run_mlp(model, distributed).to_local().sum().backward()
    assert distributed.grad.placements == (Replicate(),)
    torch.testing.assert_close(distributed.grad.to_local(), reference.grad)


@case
def state_dict_keys_and_values_do_not_change(mesh: DeviceMesh) -> None:
    model = Root(layer=Any_(ShardingConfig(state_shardings=STATES)), mlp=mlp())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.parallelize(mesh)
    after = model.state_dict()
    assert list(after) == list(before)
    assert "layer.table" not in after
    for name, tensor in after.items():
        assert torch.equal(tensor.full_tensor(), before[name]), name


@case
def declared_states_are_distributed_as_declared_and_none_stays_none(mesh: DeviceMesh) -> None:
    layer = Any_(ShardingConfig(state_shardings={**STATES, "empty": {TP: Replicate()}}))
    layer.weight.requires_grad_(False)
    layer.weight.mark = "mark of an optimizer"
    layer.parallelize(mesh)
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert layer.weight.placements == (Shard(0),)
    assert layer.weight.to_local().shape == (3, 2)
    assert not layer.weight.requires_grad
    assert layer.weight.mark == "mark of an optimizer"
    assert layer.table.placements == (Replicate(),)
    assert layer.empty is None


@case
def states_are_taken_from_rank_zero(mesh: DeviceMesh) -> None:
    layer = Any_(ShardingConfig(state_shardings=STATES))
    with torch.no_grad():
        layer.weight.fill_(float(dist.get_rank()))
    layer.parallelize(mesh)
    assert torch.equal(layer.weight.full_tensor(), torch.zeros(6, 2))


@case
def a_tied_parameter_stays_one_parameter(mesh: DeviceMesh) -> None:
    one, two = (Any_(ShardingConfig(state_shardings=STATES)) for _ in range(2))
    two.weight = one.weight
    Root(one=one, two=two).parallelize(mesh)
    assert isinstance(one.weight, DTensor)
    assert two.weight is one.weight


@case
def a_layer_that_occurs_twice_is_parallelized_once(mesh: DeviceMesh) -> None:
    layer = Any_(ShardingConfig(state_shardings=STATES))
    Root(a=layer, b=ModuleList([layer])).parallelize(mesh)
    assert isinstance(layer.weight, DTensor)


@case
def a_module_without_sharding_config_is_left_alone(mesh: DeviceMesh) -> None:
    layer = Any_(None)
    Root(a=layer).parallelize(mesh)
    assert not isinstance(layer.weight, DTensor)
    assert type(layer) is Any_


@case
def placements_are_resolved_on_a_mesh_of_two_axes(mesh: DeviceMesh) -> None:
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    placement = {TP: Shard(1), FSDP: Shard(0), MeshAxisName.CP: Replicate()}
    layer = Any_(ShardingConfig(state_shardings={"weight": placement, "table": {TP: Replicate(), FSDP: Replicate()}}))
    layer.parallelize(square)
    assert layer.weight.placements == (Shard(0), Shard(1))
    assert layer.weight.to_local().shape == (6, 1)


@case
def fully_shard_works_on_a_parallelized_layer(mesh: DeviceMesh) -> None:
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("fsdp", "tp"))
    model = mlp()
    reference = copy.deepcopy(model)
    model.parallelize(square["tp"])
    for unit in (model.box["up"], model.box["down"], model):
        fully_shard(unit, mesh=square["fsdp"])
    x = torch.randn(3, 4)
    output = run_mlp(model, x).full_tensor()
    torch.testing.assert_close(output, run_mlp(reference, x))
    output.sum().backward()
    assert model.box["up"].weight.grad is not None


@case
def a_copy_of_a_parallelized_layer_uses_its_own_weights(mesh: DeviceMesh) -> None:
    layer = mlp().box["up"]
    layer.parallelize(mesh)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
    x = torch.ones(2, 4)
    assert twin(x).full_tensor().abs().max() == 0
    assert layer(x).full_tensor().abs().max() > 0


@case
def the_class_keeps_its_name_in_the_new_ones_and_its_forward_signature(mesh: DeviceMesh) -> None:
    import inspect

    layer = mlp().box["up"]
    signature = inspect.signature(layer.forward)
    layer.parallelize(mesh)
    assert isinstance(layer, Linear)
    assert type(layer).__name__ == "ParallelLinear"
    assert inspect.signature(layer.forward) == signature
    assert "forward" not in vars(layer)


# What passes through the wrapped forward


@case
def arguments_of_every_kind_pass_through(mesh: DeviceMesh) -> None:
    seen: list[Any] = []

    class Layer(Any_):
        def forward(
            self,
            x: Any,
            y: Any = "default y",
            /,
            z: Any = "default z",
            *rest: Any,
            key: Any = "default key",
            **more: Any,
        ) -> Any:
            seen[:] = [x, y, z, rest, key, more]
            return x

    layer = Layer(ShardingConfig(in_src_shardings=replicate("x", "rest", "key", "named")), states=False)
    layer.parallelize(mesh)
    t = torch.ones(2)

    layer(t)
    assert seen[1:] == ["default y", "default z", (), "default key", {}]
    assert isinstance(seen[0], DTensor)

    layer(t, 1, 2, t, None, 5, key=t, named=t, other=t)
    x, y, z, rest, key, more = seen
    assert (y, z) == (1, 2)
    assert isinstance(rest[0], DTensor)
    assert rest[1:] == (None, 5)
    assert isinstance(x, DTensor)
    assert isinstance(key, DTensor)
    assert isinstance(more["named"], DTensor)
    assert more["other"] is t

    layer(t, z="by keyword")
    assert seen[1:3] == ["default y", "by keyword"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        layer()


@case
def tensors_inside_an_argument_follow_its_declaration(mesh: DeviceMesh) -> None:
    class Layer(Any_):
        def forward(self, x: Any, config: Any) -> Any:
            return x, config

    layer = Layer(ShardingConfig(in_src_shardings=replicate("x"), in_dst_shardings={"x": {TP: Shard(0)}}), states=False)
    layer.parallelize(mesh)
    t, config = torch.arange(4.0), {"unchanged": [1]}
    value = {"a": (t, 1), "b": [Pair(t, "text")], "c": None}
    (out, same) = layer(value, config)
    assert same is config
    for part in (out["a"][0], out["b"][0].left):
        assert part.placements == (Shard(0),)
        assert torch.equal(part.full_tensor(), t)
    assert isinstance(out["b"][0], Pair)
    assert (out["a"][1], out["b"][0].right, out["c"]) == (1, "text", None)
    assert value["a"][0] is t  # type: ignore[index]


def returning(value: Callable[[Any], Any], **sharding: Any) -> Any_:
    class Layer(Any_):
        def forward(self, x: Any) -> Any:
            return value(x)

    return Layer(ShardingConfig(**IN_REPLICATED, **sharding), states=False)


@dataclass
class Output:
    logits: Any
    note: str = "note"


@case
def one_output_layout_holds_for_every_tensor_of_a_nested_output(mesh: DeviceMesh) -> None:
    layer = returning(
        lambda x: (x, {"a": [x * 2, "text"]}, Pair(x, None), Output(logits=x)), out_dst_shardings={TP: Shard(0)}
    )
    layer.parallelize(mesh)
    x = torch.arange(4.0)
    first, mapping, pair, output = layer(x)
    for tensor in (first, mapping["a"][0], pair.left, output.logits):
        assert tensor.placements == (Shard(0),)
    assert torch.equal(mapping["a"][0].full_tensor(), x * 2)
    assert (mapping["a"][1], pair.right, output.note) == ("text", None, "note")
    assert isinstance(pair, Pair)
    assert isinstance(output, Output)


@case
def outputs_can_be_declared_one_by_one(mesh: DeviceMesh) -> None:
    layer = returning(
        lambda x: (x, x, {"a": x, "b": x}),
        out_dst_shardings=({TP: Shard(0)}, None, {"b": {TP: Shard(1)}}),
    )
    layer.parallelize(mesh)
    first, second, mapping = layer(torch.ones(4, 4))
    assert [t.placements[0] for t in (first, second, mapping["a"], mapping["b"])] == [
        Shard(0),
        Replicate(),
        Replicate(),
        Shard(1),
    ]


@case
def an_output_of_another_structure_than_declared_is_refused(mesh: DeviceMesh) -> None:
    layer = returning(lambda x: (x, x, x), out_dst_shardings=({TP: Shard(0)}, None))
    root = Root(a=layer)
    root.parallelize(mesh)
    with pytest.raises(ValueError, match=r"a \(Layer\): output is declared as a tuple of 2, but is a tuple of 3"):
        layer(torch.ones(4))
    layer = returning(lambda x: {"a": x}, out_dst_shardings={"b": {TP: Shard(0)}})
    layer.parallelize(mesh)
    with pytest.raises(ValueError, match="output is declared as a dict with b, but is a dict with a"):
        layer(torch.ones(4))


@case
def a_plain_output_becomes_what_its_source_says(mesh: DeviceMesh) -> None:
    layer = returning(
        lambda x: torch.ones(2) * (1 + dist.get_rank()),
        out_src_shardings={TP: Partial()},
        out_dst_shardings={TP: Replicate()},
    )
    layer.parallelize(mesh)
    assert torch.equal(layer(torch.ones(2)).to_local(), torch.full((2,), 3.0))


@case
def a_plain_tensor_without_a_declared_source_is_refused(mesh: DeviceMesh) -> None:
    class Layer(Any_):
        def forward(self, x: Any) -> Any:
            return torch.ones(2)

    layer = Layer(ShardingConfig(in_dst_shardings=replicate("x")), states=False)
    Root(a=layer).parallelize(mesh)
    with pytest.raises(ValueError, match=r"a \(Layer\): input 'x' is a plain tensor.*declare it in in_src_shardings"):
        layer(torch.ones(2))
    layer = Layer(ShardingConfig(out_dst_shardings={TP: Shard(0)}), states=False)
    layer.parallelize(mesh)
    with pytest.raises(ValueError, match=r"output is a plain tensor.*declare it in out_src_shardings"):
        layer(torch.ones(2))


# local_map


def local_layer(forward: Callable[..., Any], **sharding: Any) -> Any_:
    class Layer(Any_):
        pass

    Layer.forward = forward
    return Layer(ShardingConfig(**sharding), states=False)


@case
def a_local_forward_sees_local_tensors_and_other_arguments_as_they_are(mesh: DeviceMesh) -> None:
    seen: dict[str, Any] = {}

    def forward(self: Any, q: Any, k: Any, mask: Any = None, *, scale: float, kind: str = "full") -> Any:
        seen.update(q=q, k=k, mask=mask, scale=scale, kind=kind)
        return q * k * scale, k

    head = {TP: Shard(1)}
    layer = local_layer(
        forward,
        in_src_shardings=replicate("q", "k"),
        in_dst_shardings={"q": head, "k": head},
        out_src_shardings=(head, head),
        local_map=LocalMapConfig(in_grad_placements=(head, head)),
    )
    layer.parallelize(mesh)
    q, k = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    product, again = layer(q, k=k, scale=2.0)
    assert (seen["mask"], seen["scale"], seen["kind"]) == (None, 2.0, "full")
    assert type(seen["q"]) is torch.Tensor
    assert seen["q"].shape == (2, 2)
    assert product.placements == again.placements == (Shard(1),)
    torch.testing.assert_close(product.full_tensor(), q * k * 2.0)
    product.full_tensor().sum().backward()
    torch.testing.assert_close(q.grad, k.detach() * 2.0)

    mask = torch.ones(2)
    layer(q, k, mask, scale=1.0, kind="sliding")
    assert seen["mask"] is mask
    assert seen["kind"] == "sliding"


@case
def gradients_of_a_local_forward_have_the_declared_layout(mesh: DeviceMesh) -> None:
    """A replicated input whose ranks each use a part: its gradient is the sum over the ranks."""

    def forward(self: Any, x: Any, part: Any) -> Any:
        return x * part

    def gradient(grad_placements: tuple[Any, ...]) -> torch.Tensor:
        layer = local_layer(
            forward,
            in_dst_shardings={**replicate("x"), "part": {TP: Shard(0)}},
            out_src_shardings={TP: Shard(0)},
            local_map=LocalMapConfig(in_grad_placements=grad_placements),
        )
        layer.parallelize(mesh)
        x = DTensor.from_local(torch.ones(3), mesh, [Replicate()]).requires_grad_()
        part = DTensor.from_local(torch.full((2, 3), 1.0 + dist.get_rank()), mesh, [Shard(0)])
        layer(x, part).full_tensor().sum().backward()
        return x.grad.full_tensor()

    assert torch.equal(gradient(({TP: Partial()}, None)), torch.full((3,), 6.0))


@case
def an_undeclared_distributed_input_of_a_local_forward_is_refused(mesh: DeviceMesh) -> None:
    layer = local_layer(
        lambda self, x, y: x, in_dst_shardings=replicate("x"), out_src_shardings={TP: Replicate()},
        local_map=LocalMapConfig(),
    )  # fmt: skip
    Root(a=layer).parallelize(mesh)
    x = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    with pytest.raises(ValueError, match=r"a \(Layer\): input 'y' is a distributed tensor.*in_dst_shardings"):
        layer(x, x)
    assert isinstance(layer(x, torch.ones(2)), DTensor)


@case
def a_local_forward_needs_the_layout_of_its_output(mesh: DeviceMesh) -> None:
    layer = local_layer(lambda self, x: x, in_dst_shardings=replicate("x"), local_map=LocalMapConfig())
    refused(mesh, Root(a=layer), "a (Layer): local_map needs out_src_shardings")


@case
def more_gradient_layouts_than_inputs_are_refused(mesh: DeviceMesh) -> None:
    layer = local_layer(
        lambda self, x: x,
        out_src_shardings={TP: Replicate()},
        local_map=LocalMapConfig(in_grad_placements=(None, {TP: Partial()})),
    )
    refused(mesh, Root(a=layer), "a (Layer): local_map.in_grad_placements has 2 entries, forward takes 1 inputs: x")


# What is refused before anything is changed


@case
def a_second_call_is_refused(mesh: DeviceMesh) -> None:
    root = Root(box=nn.ModuleList([Any_(ShardingConfig(state_shardings=STATES))]))
    root.parallelize(mesh)
    refused(mesh, root, "Root (the root): was parallelized before")
    first, last = (Any_(ShardingConfig(state_shardings=STATES)) for _ in range(2))
    root = Root(first=first, box=nn.ModuleList([last]))
    last.parallelize(mesh)
    refused(mesh, root, "box.0 (Any_): was parallelized before")


@case
def an_undeclared_state_is_refused_with_its_fqn(mesh: DeviceMesh) -> None:
    good = Any_(ShardingConfig(state_shardings=STATES))
    refused(
        mesh,
        Root(first=good, box=nn.ModuleList([Any_(ShardingConfig(state_shardings={"weight": {TP: Shard(0)}}))])),
        "box.0.table: Any_ declares no placement for it in state_shardings; declared: weight",
    )


@case
def a_declared_state_that_does_not_exist_is_refused(mesh: DeviceMesh) -> None:
    states = {**STATES, "wieght": {TP: Shard(0)}}
    refused(
        mesh,
        Root(a=Any_(ShardingConfig(state_shardings=states))),
        "a (Any_): state_shardings declares 'wieght'",
        "did you mean 'weight'",
    )


@case
def an_undeclared_axis_is_refused_with_the_fqn(mesh: DeviceMesh) -> None:
    dp = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    refused(dp, Root(a=Any_(ShardingConfig(state_shardings=STATES))), "a.weight: no placement is declared", "'dp'")
    states = {name: {**named, DP: Replicate()} for name, named in STATES.items()}

    class Layer(Any_):
        def forward(self, x: Any) -> Any:
            return x

    for declared in (
        {"in_src_shardings": replicate("x")},
        {"in_dst_shardings": replicate("x")},
        {"out_src_shardings": {TP: Shard(0)}},
        {"out_dst_shardings": ({TP: Shard(0)}, None)},
    ):
        layer = Layer(ShardingConfig(state_shardings=states, **declared))  # type: ignore[arg-type]
        refused(dp, Root(a=layer), "a (Layer): " + next(iter(declared)), "no placement is declared for mesh axis 'dp'")


@case
def an_unnamed_mesh_is_refused(mesh: DeviceMesh) -> None:
    nameless = init_device_mesh("cpu", (2,))
    refused(nameless, Root(a=Any_(ShardingConfig(state_shardings=STATES))), "Root (the root): the device mesh has no")


@case
def a_declared_input_that_forward_does_not_take_is_refused(mesh: DeviceMesh) -> None:
    class Layer(Any_):
        def forward(self, hidden: Any) -> Any:
            return hidden

    layer = Layer(ShardingConfig(in_dst_shardings=replicate("hiden")), states=False)
    refused(mesh, Root(a=layer), "a (Layer): in_dst_shardings: forward takes no 'hiden'; did you mean 'hidden'")


@case
def a_tied_parameter_with_two_layouts_is_refused(mesh: DeviceMesh) -> None:
    one = Any_(ShardingConfig(state_shardings=STATES))
    two = Any_(ShardingConfig(state_shardings={**STATES, "weight": {TP: Shard(1)}}))
    two.weight = one.weight
    refused(mesh, Root(one=one, two=two), "tied parameter", "one.weight", "two.weight")
    three = Any_(None)
    three.weight = one.weight
    refused(mesh, Root(one=one, three=three), "tied parameter", "one.weight", "three.weight: None")


@case
def a_layer_that_data_parallelism_has_sharded_is_refused(mesh: DeviceMesh) -> None:
    layer = Any_(ShardingConfig(state_shardings=STATES))
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    refused(mesh, Root(a=layer), "a.weight: is distributed already, over ('fsdp',)", "before data parallelism")


@case
def a_class_may_parallelize_itself(mesh: DeviceMesh) -> None:
    calls = []

    class Own(Any_):
        def parallelize(self, mesh: DeviceMesh) -> None:
            calls.append(mesh.mesh_dim_names)
            super().parallelize(mesh)

    layer = Own(ShardingConfig(state_shardings=STATES))
    Root(a=layer, b=Any_(ShardingConfig(state_shardings=STATES))).parallelize(mesh)
    assert calls == [("tp",)]
    assert isinstance(layer.weight, DTensor)


@pytest.mark.parametrize("name", CASES)
def test_parallelize(name: str, outcomes: list[dict[str, str | None]]) -> None:
    failures = [f"--- rank {rank}\n{outcome[name]}" for rank, outcome in enumerate(outcomes) if outcome[name]]
    assert not failures, "\n".join(failures)
