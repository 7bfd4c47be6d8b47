"""Recipes of the published sizes: found, laid out on pretended worlds, changed by options, clear about their needs."""

from __future__ import annotations

import pytest
import torch

from hp_config import ConfigManager, dump_yaml, list_recipes
from hp_protocols import get_spec, list_flavors
from hp_protocols.distributed import plan_rank
from hp_protocols.errors import ConfigError
from hp_trainer.preparation import load_config, prepare
from hp_trainer.recipes import qwen3_5_v2 as recipes

# Flavour, recipe, parameters in billions as published (the text model, tied where it is), degrees on 8 processes.
SIZES = [
    ("0.8B", "qwen3_5_v2_0_8b", 0.75, (8, 1)),
    ("2B", "qwen3_5_v2_2b", 1.88, (8, 1)),
    ("4B", "qwen3_5_v2_4b", 4.2, (8, 1)),
    ("4B", "qwen3_5_v2_4b_tp2_fsdp4", 4.2, (4, 2)),
    ("9B", "qwen3_5_v2_9b", 8.95, (8, 1)),
    ("27B", "qwen3_5_v2_27b", 26.9, (8, 1)),
]
TP2_FSDP4 = ("--module", "qwen3_5_v2", "--config", "qwen3_5_v2_4b_tp2_fsdp4")


def by_name() -> dict[str, object]:
    return {recipe.name: recipe for recipe in list_recipes() if recipe.module == "qwen3_5_v2"}


def test_every_flavour_has_a_recipe_that_is_found() -> None:
    assert {name for _, name, *_ in SIZES} <= by_name().keys()
    assert {flavor for flavor, *_ in SIZES} == set(list_flavors("qwen3_5_v2")) - {"debugmodel"}


@pytest.mark.parametrize(("flavor", "name", "billions", "degrees"), SIZES)
def test_a_recipe_lays_its_model_out_on_eight_processes(flavor, name, billions, degrees) -> None:
    config = by_name()[name].load()
    assert (config.recipe, config.model_spec.flavor) == (f"qwen3_5_v2.{name}", flavor)
    assert config == getattr(recipes, name)(), "called directly it is the same"
    plan = plan_rank(config.model_spec, trainer_config=config, world_size=8)
    assert plan.parameters / 1e9 == pytest.approx(billions, rel=0.02)
    assert (plan.parallel_dims.dp_shard, plan.parallel_dims.tp) == degrees
    # fp32 weights, one eighth of them; norms and what tensor parallelism leaves whole make it a little more.
    assert 4 * plan.parameters / 8 <= plan.rank_bytes.parameters < 4 * plan.parameters / 8 * 1.01


@pytest.mark.parametrize("name", ["qwen3_5_v2_0_8b", "qwen3_5_v2_4b_tp2_fsdp4"])
def test_options_change_a_recipe_and_its_yaml_reads_back(name, tmp_path) -> None:
    words = ["--module", "qwen3_5_v2", "--config", name, "--training.seq_len", "8192", "--optimizer.lr=1e-5"]
    words += ["--compile.mode", "graph", "--tokenizer.tokenizer_path", "elsewhere"]
    config = ConfigManager().parse_args(words, world_size=8)
    assert (config.training.seq_len, config.optimizer.lr, config.compile.mode) == (8192, 1e-5, "graph")
    assert config.training.mixed_precision_param == "bfloat16"
    assert config.activation_checkpoint.mode != "none"
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    assert ConfigManager().parse_args([str(tmp_path / "run.yaml")]) == config


@pytest.mark.parametrize("world_size", [1, 3, 8, 48, 1024])
def test_sizes_take_any_number_of_processes_and_a_named_layout_its_own(world_size) -> None:
    for _, name, _, degrees in SIZES:
        words = ["--module", "qwen3_5_v2", "--config", name]
        if degrees == (8, 1) or world_size == 8:
            ConfigManager().parse_args(words, world_size=world_size)
        else:
            with pytest.raises(ConfigError, match="--nproc 8"):
                ConfigManager().parse_args(words, world_size=world_size)
    options = ["--parallelism.data_parallel_shard_degree", "2"]
    ConfigManager().parse_args([*TP2_FSDP4, *options], world_size=4)


def test_a_tokenizer_that_is_not_there_is_named_by_its_option_before_anything_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config([*TP2_FSDP4], world_size=8)
    with pytest.raises(ConfigError) as refused:
        prepare(config)
    (fault,) = refused.value.faults
    assert fault.where == "tokenizer.tokenizer_path"
    assert "'assets/hf/Qwen3.5-4B' does not exist" in fault.problem
    assert "tokenizer.json" in str(fault)
    assert not list(tmp_path.iterdir())


def test_matrices_decay_and_nothing_else_does() -> None:
    config = recipes.qwen3_5_v2_0_8b()
    with torch.device("meta"):
        # The smallest model with the same layers; A_log, dt_bias and norms are vectors.
        model = get_spec("qwen3_5_v2", "debugmodel").model.build()
    groups = config.optimizer.build(model_parts=[model]).param_groups
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        name: 0.1 if p.dim() > 1 else 0.0 for name, p in model.named_parameters()
    }
