"""Initialisation in one process: who initialises what, once, from which numbers, and what is refused (M6)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hp_protocols.function import Function
from hp_protocols.module import Module, ModuleList, Sequential, skip_param_init
from hp_protocols.platform import nn


class Linear(nn.Linear, Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        size: int = 4
        bias: bool = True

    def __init__(self, config: Config) -> None:
        super().__init__(config.size, config.size, bias=config.bias)


class Holder(Module):
    """Any children, no parameters of its own."""

    def __init__(self, **children: torch.nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Own(Module):
    """One parameter of its own, and no reset_parameters."""

    def __init__(self, **param_init: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 7.0))
        self._param_init = param_init or None


def linear(**param_init: Any) -> Linear:
    # Called directly and not built: a test may watch through a closure, which build() refuses.
    return Linear(Linear.Config(param_init=param_init or None))


def fives(tensor: torch.Tensor) -> None:
    tensor.fill_(5.0)


def sixes(tensor: torch.Tensor) -> None:
    tensor.fill_(6.0)


def new_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor)


def test_each_parameter_is_initialised_by_its_own_entry() -> None:
    layer = linear(weight=fives, bias=Function.Config(fn="torch.nn.init.constant_", kwargs={"val": 2.5}))
    layer.init_states()
    assert torch.equal(layer.weight, torch.full((4, 4), 5.0))
    assert torch.equal(layer.bias, torch.full((4,), 2.5))
    assert layer.weight.requires_grad


def test_a_parameter_is_drawn_with_the_numbers_of_its_own_seed_and_name() -> None:
    def weights(seed: int, name: str) -> torch.Tensor:
        layer = linear(weight=torch.nn.init.normal_, bias=fives)
        Holder(**{name: layer}).init_states(seed=seed)
        return layer.weight.detach()

    assert torch.equal(weights(1, "a"), weights(1, "a"))
    assert not torch.equal(weights(1, "a"), weights(2, "a"))
    assert not torch.equal(weights(1, "a"), weights(1, "b"))


def test_the_seed_is_that_of_the_process_unless_given() -> None:
    one, two = linear(weight=torch.nn.init.normal_, bias=fives), linear(weight=torch.nn.init.normal_, bias=fives)
    torch.manual_seed(77)
    torch.rand(5)  # How far the generator has gone does not matter.
    one.init_states()
    two.init_states(seed=77)
    assert torch.equal(one.weight, two.weight)


def test_the_generator_of_the_process_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    root = Holder(a=linear(weight=torch.nn.init.normal_, bias=fives), b=linear())
    torch.manual_seed(3)
    root.init_states()
    assert torch.equal(torch.rand(4), expected)


def test_a_layer_without_param_init_is_initialised_by_its_reset_parameters() -> None:
    torch.manual_seed(0)
    layer = linear()
    with torch.no_grad():
        layer.weight.fill_(99.0)
        layer.bias.fill_(99.0)
    layer.init_states()
    assert layer.weight.abs().max() <= 0.5  # nn.Linear: uniform in ±1/sqrt(fan in)
    assert layer.bias.abs().max() <= 0.5
    assert layer.weight.unique().numel() == 16


def test_plain_containers_and_plain_layers_are_initialised_too() -> None:
    inner = linear(weight=fives, bias=fives)
    plain, norm = nn.Linear(2, 2), nn.BatchNorm1d(3)
    root = Holder(box=nn.ModuleList([nn.ModuleDict({"inner": inner, "plain": plain}), nn.Sequential(norm)]))
    with torch.no_grad():
        for tensor in (*root.parameters(), norm.running_mean, norm.running_var):
            tensor.fill_(float("nan"))
    root.init_states()
    assert torch.equal(inner.weight, torch.full((4, 4), 5.0))
    assert plain.weight.isfinite().all()
    assert torch.equal(norm.weight, torch.ones(3))
    assert torch.equal(norm.running_var, torch.ones(3))


def test_running_statistics_without_weights_are_reset() -> None:
    norm = nn.BatchNorm1d(3, affine=False)
    norm.running_mean.fill_(9.0)
    Holder(norm=norm).init_states()
    assert torch.equal(norm.running_mean, torch.zeros(3))


def test_a_tied_parameter_is_drawn_once_under_its_first_name() -> None:
    calls = []

    def count(tensor: torch.Tensor) -> None:
        calls.append(tuple(tensor.shape))
        torch.nn.init.normal_(tensor)

    first, second = linear(weight=count, bias=fives), linear(weight=count, bias=fives)
    second.weight = first.weight
    Holder(first=first, second=second).init_states(seed=5)
    alone = linear(weight=torch.nn.init.normal_, bias=fives)
    Holder(first=alone).init_states(seed=5)
    assert calls == [(4, 4)]
    assert torch.equal(first.weight, alone.weight)


def test_the_owner_that_does_not_skip_draws_a_tied_parameter_under_its_first_name() -> None:
    first, second = linear(weight=skip_param_init, bias=fives), linear(weight=torch.nn.init.normal_, bias=fives)
    second.weight = first.weight
    Holder(first=first, second=second).init_states(seed=5)
    alone = linear(weight=torch.nn.init.normal_, bias=fives)
    Holder(first=alone).init_states(seed=5)
    assert torch.equal(first.weight, alone.weight)


def test_a_layer_that_occurs_twice_is_initialised_once() -> None:
    calls = []

    class Counting(Holder):
        def _init_self_buffers(self, *, buffer_device: Any = None) -> None:
            calls.append(buffer_device)

    layer = Counting()
    Holder(a=layer, b=ModuleList([layer])).init_states(buffer_device="cpu")
    assert calls == ["cpu"]


def test_a_tie_survives_to_empty() -> None:
    with torch.device("meta"):
        first, second = linear(weight=fives, bias=fives), linear(weight=skip_param_init, bias=fives)
        second.weight = first.weight
    root = Holder(first=first, box=nn.ModuleList([second]))
    assert root.to_empty(device="cpu") is root
    assert second.weight is first.weight
    root.init_states()
    assert torch.equal(second.weight, torch.full((4, 4), 5.0))


def test_skip_param_init_leaves_a_parameter_alone() -> None:
    layer = Own(weight=skip_param_init)
    layer.init_states()
    named = Own(weight=Function.Config(fn="hp_protocols.module.skip_param_init"))
    named.init_states()
    assert torch.equal(layer.weight, torch.full((3,), 7.0))
    assert torch.equal(named.weight, torch.full((3,), 7.0))


def test_children_are_initialised_before_their_parents() -> None:
    order = []

    class Noting(Holder):
        def _init_self_buffers(self, *, buffer_device: Any = None) -> None:
            order.append(self.label)

    def noting(label: str, **children: torch.nn.Module) -> Noting:
        module = Noting(**children)
        module.label = label
        return module

    noting("root", a=noting("a", b=noting("b")), box=nn.ModuleList([noting("c")])).init_states()
    assert order == ["b", "a", "c", "root"]


def test_an_overridden_init_states_is_called_and_keeps_names_and_seed() -> None:
    class Tying(Holder):
        def init_states(self, *, buffer_device: Any = None) -> None:
            self.second.weight = self.first.weight
            super().init_states(buffer_device=buffer_device)

    first, second = linear(weight=torch.nn.init.normal_, bias=fives), linear(weight=skip_param_init, bias=fives)
    Holder(inner=Tying(first=first, second=second)).init_states(seed=5)
    expected = linear(weight=torch.nn.init.normal_, bias=fives)
    Holder(inner=Holder(first=expected)).init_states(seed=5)
    assert second.weight is first.weight
    assert torch.equal(first.weight, expected.weight)


def test_only_one_whole_parameter_is_alive_at_a_time() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def most(tensor: torch.Tensor) -> None:
        gc.collect()
        assert not [ref for ref in alive if ref() is not None]
        alive.append(weakref.ref(tensor))

    class Resetting(Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))

        def reset_parameters(self) -> None:
            own = [self.one, self.two]
            assert sorted(p.device.type for p in own) == ["cpu", "meta"]
            most(next(p for p in own if p.device.type == "cpu"))

    Holder(a=linear(weight=most, bias=most), b=linear(weight=most, bias=most), c=Resetting()).init_states()
    assert len(alive) == 6


def test_drawing_happens_on_the_cpu_in_the_dtype_of_the_parameter() -> None:
    seen = []

    def note(tensor: torch.Tensor) -> None:
        seen.append((tensor.device.type, tensor.dtype, tensor.requires_grad))

    linear(weight=note, bias=note).to(torch.bfloat16).init_states()
    assert seen == [("cpu", torch.bfloat16, False)] * 2


def test_a_parameter_without_an_entry_is_refused_with_its_fqn() -> None:
    with pytest.raises(ValueError, match=r"^box\.0\.bias: param_init of Linear has no entry for it; entries: weight"):
        Holder(box=nn.ModuleList([linear(weight=fives)])).init_states()


def test_an_entry_that_names_no_parameter_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"^a\.wieght: .*did you mean 'weight'"):
        Holder(a=linear(wieght=fives, bias=fives)).init_states()


def test_an_entry_for_a_parameter_that_is_off_is_fine() -> None:
    layer = Linear.Config(bias=False, param_init={"weight": fives, "bias": fives}).build()
    layer.init_states()
    assert layer.bias is None


def test_a_module_with_parameters_and_no_initialiser_is_refused_with_its_fqn() -> None:
    with pytest.raises(ValueError, match=r"^a\.b\.weight: Own has neither param_init nor reset_parameters"):
        Holder(a=Holder(b=Own())).init_states()


def test_states_on_the_meta_device_are_refused_with_their_fqn() -> None:
    with torch.device("meta"):
        layer = linear(weight=fives, bias=fives)
        holder = Holder()
        holder.register_buffer("table", torch.zeros(2))
    with pytest.raises(ValueError, match=r"^a\.weight: still on the meta device; call to_empty"):
        Holder(a=layer).init_states()
    with pytest.raises(ValueError, match=r"^a\.table: the buffer is still on the meta device"):
        Holder(a=holder).init_states()


def test_an_initialiser_that_returns_a_new_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^a\.weight: its initialiser returned a new tensor"):
        Holder(a=linear(weight=new_tensor, bias=fives)).init_states()


@pytest.mark.parametrize("entry", [3, "torch.nn.init.zeros_"])
def test_an_entry_that_is_no_function_is_refused(entry: Any) -> None:
    with pytest.raises(TypeError, match=r"^weight: its entry in param_init is no function"):
        linear(weight=entry, bias=fives).init_states()


def test_a_reset_that_needs_the_values_of_another_parameter_says_what_to_do() -> None:
    class Coupled(Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.two.copy_(self.one)

    with pytest.raises(Exception) as raised:
        Holder(a=Coupled()).init_states()
    assert "declare param_init instead" in "".join(raised.value.__notes__)


def test_the_layer_is_whole_again_after_a_reset_that_failed() -> None:
    class Failing(Linear):
        def reset_parameters(self) -> None:
            raise RuntimeError("no")

    layer = Failing.__new__(Failing)
    Module.__init__(layer)
    layer.weight, layer.bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    before = dict(layer.named_parameters())
    with pytest.raises(RuntimeError):
        layer.init_states()
    assert all(layer.get_parameter(name) is parameter for name, parameter in before.items())


def test_buffers_are_filled_by_the_module_and_do_not_touch_the_generator() -> None:
    class Rotary(Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(3), persistent=False)
            self.register_buffer("nothing", None)

        def _init_self_buffers(self, *, buffer_device: Any = None) -> None:
            self.table = torch.rand(3, device=buffer_device)

    one, two = Rotary(), Rotary()
    torch.manual_seed(4)
    Holder(a=one).init_states(buffer_device="cpu", seed=1)
    Holder(a=two).init_states(buffer_device="cpu", seed=1)
    after = torch.rand(2)
    torch.manual_seed(4)
    assert torch.equal(after, torch.rand(2))
    assert torch.equal(one.table, two.table)
    assert one.table.max() > 0
    assert list(one.state_dict()) == []


def test_containers_of_this_package_are_modules() -> None:
    inner = linear(weight=fives, bias=fives)
    Sequential(inner, ModuleList([])).init_states()
    assert torch.equal(inner.bias, torch.full((4,), 5.0))


def test_names_of_wrappers_do_not_change_the_draw() -> None:
    def weights(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> torch.Tensor:
        layer = linear(weight=torch.nn.init.normal_, bias=fives)
        Holder(a=wrap(layer)).init_states(seed=1)
        return layer.weight.detach()

    assert torch.equal(weights(checkpoint_wrapper), weights(lambda module: module))
