"""BaseModel: the protocol check, and what a trainer asks of a model's config (M9)."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hp_protocols.model import BaseModel, ModelConfigConverter
from hp_protocols.module import Module, ModuleList
from hp_protocols.trainer_sections import TrainerConfig
from hp_protocols.traversal import set_node


class Layer(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        size: int = 2

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(config.size))


class Wide(Layer):
    pass


class Model(BaseModel):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        layer: Layer.Config
        seq_len: int = 0

        def update_from_config(self, *, trainer_config: TrainerConfig) -> None:
            self.seq_len = trainer_config.training.seq_len

        def get_nparams_and_flops(self, model: Module, seq_len: int) -> tuple[int, int]:
            size = sum(parameter.numel() for parameter in model.parameters())
            return size, 6 * size

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.layers = ModuleList([config.layer.build()])


def ones(tensor: Any) -> None:
    tensor.fill_(1.0)


def test_a_model_of_modules_passes_the_check() -> None:
    Model.Config(layer=Layer.Config()).build().verify_module_protocol()


def test_every_submodule_that_is_no_module_is_listed_with_its_class() -> None:
    model = Model.Config(layer=Layer.Config()).build()
    model.extra = torch.nn.Linear(2, 2)
    model.layers.append(torch.nn.Sequential(torch.nn.ReLU()))
    with pytest.raises(RuntimeError) as raised:
        model.verify_module_protocol()
    for line in (
        "extra: torch.nn.modules.linear.Linear",
        "layers.1: torch.nn.modules.container.Sequential",
        "layers.1.0: torch.nn.modules.activation.ReLU",
    ):
        assert line in str(raised.value)
    assert "layers.0" not in str(raised.value)


def test_init_weights_is_init_states() -> None:
    one, two = (
        Model.Config(layer=Layer.Config(param_init={"weight": torch.nn.init.normal_})).build() for _ in range(2)
    )
    one.init_weights(seed=3, buffer_device="cpu")
    two.init_states(seed=3)
    assert torch.equal(one.layers[0].weight, two.layers[0].weight)
    assert not torch.equal(one.layers[0].weight, torch.ones(2))


def test_the_config_is_filled_from_the_trainers_and_counts_parameters() -> None:
    config = Model.Config(layer=Layer.Config(size=5))
    trainer: Any = SimpleNamespace(training=SimpleNamespace(seq_len=128))
    config.update_from_config(trainer_config=trainer)
    assert config.seq_len == 128
    assert config.get_nparams_and_flops(config.build(), 128) == (5, 30)


def test_a_model_is_built_without_memory_in_a_named_type_and_torch_keeps_its_default() -> None:
    class Failing(Model):
        @dataclass(kw_only=True, slots=True)
        class Config(Model.Config):
            pass

        def __init__(self, config: Any) -> None:
            raise RuntimeError("cannot be built")

    parameters = list(Model.Config(layer=Layer.Config()).build_on_meta("bfloat16").parameters())
    assert {(parameter.device.type, parameter.dtype) for parameter in parameters} == {("meta", torch.bfloat16)}
    with pytest.raises(RuntimeError, match="cannot be built"):
        Failing.Config(layer=Layer.Config()).build_on_meta("float64")
    assert torch.get_default_dtype() == torch.float32


def test_what_a_model_does_not_implement_is_said_by_name() -> None:
    class Bare(BaseModel):
        pass

    config = Bare.Config()
    with pytest.raises(NotImplementedError, match=r"Bare\.Config does not implement update_from_config"):
        config.update_from_config(trainer_config=SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=r"Bare\.Config does not implement get_nparams_and_flops"):
        config.get_nparams_and_flops(Marker(), 1)
    with pytest.raises(NotImplementedError, match=r"Unfinished does not implement convert"):
        Unfinished.Config().build().convert(config)


class Marker(Module):
    pass


class Unfinished(ModelConfigConverter):
    pass


class Widen(ModelConfigConverter):
    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        factor: int = 2

    def convert(self, config: BaseModel.Config) -> None:
        for _, node, parent, key in config.traverse(Layer.Config):
            set_node(parent, key, Wide.Config(size=node.size * self.config.factor))  # type: ignore[attr-defined]


def test_a_converter_changes_the_tree_before_the_model_is_built() -> None:
    config = Model.Config(layer=Layer.Config(size=3))
    Widen.Config(factor=4).build().convert(config)
    model = config.build()
    assert type(model.layers[0]) is Wide
    assert model.layers[0].weight.shape == (12,)


def test_parallelism_that_a_model_does_not_know_is_refused_by_name_unless_it_only_shares_data() -> None:
    names = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel")
    names += ("pipeline_parallel", "expert_parallel")

    def refused(**degrees: int) -> list[str]:
        given = {f"{name}_degree": 1 for name in names} | {f"{name}_degree": value for name, value in degrees.items()}
        run: Any = SimpleNamespace(parallelism=SimpleNamespace(**given))
        return [str(fault) for fault in Model.Config(layer=Layer.Config()).run_faults(trainer_config=run)]

    assert refused(data_parallel_shard=-1, data_parallel_replicate=2) == []
    first, second = refused(tensor_parallel=2, context_parallel=4)
    assert first.startswith("parallelism.tensor_parallel_degree: 2: Model has no tensor parallelism; allowed: 1")
    assert second.startswith("parallelism.context_parallel_degree: 4: Model has no context parallelism")
