"""Module as base class and mixin, third-party layers as Modules, containers (M5, M8)."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hp_protocols.configurable import Configurable
from hp_protocols.module import Module, ModuleDict, ModuleList, Sequential
from hp_protocols.platform import nn
from hp_protocols.sharding import ShardingConfig


class Counting(torch.nn.Module):
    """A third-party layer that counts how often it is initialised."""

    inits = 0

    def __init__(self, size: int) -> None:
        type(self).inits += 1
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))


class Counted(Counting, Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        size: int = 2

    def __init__(self, config: Config) -> None:
        super().__init__(config.size)


class Marker(Module):
    """Needs no __init__ of its own."""


class TakesConfig(torch.nn.Module):
    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        self.size = config["size"]


def zeros(tensor: Any) -> None:
    tensor.zero_()


def test_a_mixin_runs_the_init_of_its_base_once() -> None:
    Counted.inits = 0
    layer = Counted.Config(size=5).build()
    assert Counted.inits == 1
    assert layer.weight.shape == (5,)
    assert isinstance(layer, Counting)
    assert isinstance(layer, Module)


def test_a_mixin_is_the_backends_own_layer() -> None:
    class Linear(nn.Linear, Module):
        @dataclass(kw_only=True, slots=True)
        class Config(Module.Config):
            size: int = 3

        def __init__(self, config: Config) -> None:
            super().__init__(config.size, config.size)

    layer = Linear.Config().build()
    assert isinstance(layer, torch.nn.Linear)
    plain = torch.nn.Linear(3, 3)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3)
    assert torch.equal(layer(x), plain(x))


def test_declarations_are_kept_however_the_layer_is_made() -> None:
    sharding = ShardingConfig()
    config = Counted.Config(param_init={"weight": zeros}, sharding_config=sharding)
    for layer in (config.build(), Counted(config), Counted(config=config)):
        layer.init_states()
        assert torch.equal(layer.weight, torch.zeros(2))
        assert layer._sharding_config == sharding


def test_build_keeps_declarations_apart_from_the_config() -> None:
    config = Counted.Config(param_init={"weight": zeros}, sharding_config=ShardingConfig())
    layer = config.build()
    config.param_init["weight"] = None  # type: ignore[index]
    config.sharding_config.state_shardings["weight"] = {}  # type: ignore[union-attr]
    layer.init_states()
    assert layer._sharding_config.state_shardings == {}


def test_a_module_without_init_builds() -> None:
    assert isinstance(Marker.Config().build(), Marker)
    assert isinstance(Marker(), Marker)


def test_declarations_are_hidden_from_the_command_line() -> None:
    fields = {field.name: field for field in Counted.Config.__dataclass_fields__.values()}
    assert fields["param_init"].metadata["cli"] is False
    assert fields["sharding_config"].metadata["cli"] is False


def test_a_config_that_cannot_hold_declarations_is_refused_when_the_class_is_created() -> None:
    with pytest.raises(TypeError, match=r"Bad\.Config must derive from Module\.Config"):

        class Bad(Module):
            @dataclass(kw_only=True, slots=True)
            class Config(Configurable.Config):
                pass


def test_modules_copy_and_pickle() -> None:
    layer = Counted.Config(param_init={"weight": zeros}).build()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin.weight, layer.weight)
        twin.init_states()
        assert torch.equal(twin.weight, torch.zeros(2))
    assert torch.equal(layer.weight, torch.ones(2))


def test_a_third_party_layer_becomes_a_module_that_computes_the_same() -> None:
    conv_class = Module.from_nn_module(torch.nn.Conv1d)
    conv = conv_class(2, 3, kernel_size=2)
    assert isinstance(conv, torch.nn.Conv1d)
    assert isinstance(conv, Module)
    plain = torch.nn.Conv1d(2, 3, kernel_size=2)
    plain.load_state_dict(conv.state_dict())
    x = torch.randn(1, 2, 5)
    assert torch.equal(conv(x), plain(x))
    assert repr(conv) == repr(plain)


def test_the_module_version_of_a_class_is_always_the_same_one() -> None:
    assert Module.from_nn_module(torch.nn.Conv1d) is Module.from_nn_module(torch.nn.Conv1d)
    assert Module.from_nn_module(Counted) is Counted


def test_a_third_party_layer_builds_from_a_config_with_its_own_arguments_as_keywords() -> None:
    config = Module.from_nn_module(Counting).Config(param_init={"weight": zeros})  # type: ignore[attr-defined]
    Counting.inits = 0
    layer = config.build(size=4)
    layer.init_states()
    assert torch.equal(layer.weight, torch.zeros(4))


def test_a_third_party_layer_keeps_an_argument_called_config() -> None:
    version = Module.from_nn_module(TakesConfig)
    assert version(config={"size": 3}).size == 3
    assert version({"size": 4}).size == 4


def test_generated_classes_pickle_into_a_fresh_process() -> None:
    version = Module.from_nn_module(torch.nn.Bilinear)
    config = version.Config(param_init={"weight": torch.nn.init.zeros_})  # type: ignore[attr-defined]
    data = pickle.dumps([version(2, 2, 2), config])
    code = (
        "import pickle, sys\n"
        "layer, config = pickle.loads(sys.stdin.buffer.read())\n"
        "from hp_protocols.module import Module\nimport torch\n"
        "assert type(layer) is Module.from_nn_module(torch.nn.Bilinear)\n"
        "assert config == type(layer).Config(param_init={'weight': torch.nn.init.zeros_})\n"
    )
    result = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()


def test_the_config_of_a_generated_class_is_saved_and_read() -> None:
    config = Module.from_nn_module(torch.nn.Bilinear).Config(  # type: ignore[attr-defined]
        param_init={"weight": torch.nn.init.zeros_}
    )
    again = Configurable.Config.from_dict(config.to_dict())
    assert again == config
    assert type(again) is type(config)


def test_a_class_inside_a_function_becomes_a_module_too() -> None:
    class Local(torch.nn.Module):
        pass

    version = Module.from_nn_module(Local)
    assert isinstance(version(), Module)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(version())


def test_an_unknown_generated_name_is_an_attribute_error() -> None:
    import hp_protocols.module as module

    for name in ("from_nn_module(torch/nn/Nothing)", "nothing"):
        with pytest.raises(AttributeError, match="no attribute"):
            getattr(module, name)


def test_containers_behave_as_the_backends_and_are_modules() -> None:
    layer = torch.nn.Linear(2, 2)
    containers = [ModuleList([layer]), ModuleDict({"a": layer}), Sequential(layer)]
    for container, plain in zip(
        containers, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential), strict=True
    ):
        assert isinstance(container, Module)
        assert isinstance(container, plain)
        assert next(container.children()) is layer
    x = torch.ones(1, 2)
    assert torch.equal(containers[2](x), layer(x))
