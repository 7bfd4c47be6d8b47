"""Configs as YAML: what is written reads back equal; nothing unknown, mistyped or doubled passes; lines are named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy_trainer
import yaml

from hp_config import ConfigError, ConfigManager, TrainingConfig, dump_yaml, load_yaml

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_text(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


def faults(path: Path, *words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        ConfigManager().parse_args([str(path), *words])
    return [re.sub(re.escape(str(path)) + r":(\d)", r"line \1", str(fault)) for fault in caught.value.faults]


def unusual() -> toy_trainer.Trainer.Config:
    """A config with values that are easy to lose: long floats, empty and numeric texts, null-like words."""
    config = toy_trainer.small()
    config.training = TrainingConfig(steps=3, seq_len=4, max_norm=float("inf"))
    config.optimizer = toy_trainer.Adam.Config(lr=0.1 + 0.2, betas=(1e-5, 1 / 3), fused=False, decay_keywords=[])
    config.dataloader = toy_trainer.Loader.Config(
        dataset_path="1e-4",
        cache=Path("ü/x"),
        colour=toy_trainer.Colour.DARK_BLUE,
        split="off",
        weights={"on": 1e300, "2": 5e-324},
        limit=7,
        extra={"deep": [1, None, {"x": (1, 2)}]},
        transform=toy_trainer.scale,
    )
    config.validation = toy_trainer.Loader.Config(dataset_path="")
    config.dump_folder = "a: b # c"
    config.lr_scheduler.warmup_steps = 1
    config.model_spec.model.layers[1].dim = 99
    return config


@pytest.mark.parametrize("make", [toy_trainer.small, toy_trainer.wide, toy_trainer.plain_optimizer, unusual])
def test_what_is_written_reads_back_equal(make: Callable[[], Any], write: Write) -> None:
    config = make()
    assert load_yaml(write(dump_yaml(config))) == config


def test_a_written_file_names_its_format_and_recipe_first_and_the_model_last() -> None:
    text = dump_yaml(toy_trainer.small(), module="toy", recipe="small")
    assert text.splitlines()[:4] == ["hp_config: 1", "module: toy", "config: small", "trainer:"]
    assert list(yaml.safe_load(text)["trainer"])[-1] == "model_spec"
    assert dump_yaml(toy_trainer.small().replace(recipe="toy.small")).splitlines()[1:3] == [
        "module: toy",
        "config: small",
    ]
    assert dump_yaml(toy_trainer.small()).splitlines()[1] == "trainer:"


def test_the_yaml_is_plain_and_has_no_aliases() -> None:
    shared = toy_trainer.Layer.Config()
    config = toy_trainer.small()
    config.model_spec.model.layers = [shared, shared]
    text = dump_yaml(config)
    assert "&id" not in text
    assert "!!" not in text


def test_a_value_without_a_plain_form_is_refused_with_its_place() -> None:
    config = toy_trainer.small()
    config.dataloader.transform = lambda x: x
    with pytest.raises(TypeError, match=r"dataloader\.transform"):
        dump_yaml(config)


def test_a_file_takes_overrides_and_a_folder_stands_for_its_resolved_yaml(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text(dump_yaml(toy_trainer.small().replace(recipe="toy.small")))
    manager = ConfigManager()
    config = manager.parse_args([str(tmp_path), "--training.steps=5", "--optimizer.betas", "0.1", "0.2"])
    assert (config.training.steps, config.optimizer.betas) == (5, (0.1, 0.2))
    assert (manager.module, manager.recipe, manager.file) == ("toy", "small", tmp_path / "resolved.yaml")


def test_a_file_may_hold_only_changes_to_a_recipe(write: Write) -> None:
    path = write(
        "hp_config: 1\nmodule: toy\nconfig: wide\ntrainer:\n"
        "  training:\n    steps: 7\n"
        "  optimizer: {_type: toy_trainer.Optimizer.Config, lr: 1e-4}\n"
        "  model_spec: {model: {vocab: 5}}\n"
    )
    wide = toy_trainer.wide()
    wide.training.steps = 7
    wide.optimizer = toy_trainer.Optimizer.Config(lr=1e-4)
    wide.model_spec.model.vocab = 5
    assert load_yaml(path) == wide
    assert load_yaml(write("hp_config: 1\nmodule: toy\nconfig: wide\n")) == toy_trainer.wide()


def test_changes_need_a_recipe_to_change(write: Write) -> None:
    (fault,) = faults(write("hp_config: 1\nmodule: toy\ntrainer: {}\n"))
    assert fault.startswith("line 1 (config): is missing; allowed: picky, plain_optimizer, small, wide")
    (fault,) = faults(write("hp_config: 1\nmodule: toy\n\nconfig: smal\n"))
    assert fault.startswith("line 4 (config): no recipe 'smal'")
    assert "did you mean config small?" in fault


def test_every_mistake_of_a_file_is_found_at_once_with_its_line(write: Write) -> None:
    path = write(
        "hp_config: 1\n"
        "module: toy\n"
        "config: small\n"
        "trainer:\n"
        "  training:\n"
        "    steps: ten\n"
        "    sqe_len: 4\n"
        "    gc_debug: true\n"
        "    local_batch_size: 0\n"
        "  optimizer:\n"
        "    betas:\n"
        "    - 0.9\n"
        "    - x\n"
        "    lr: -1\n"
        "  dataloader:\n"
        "    dataset_path: 5\n"
        "    split: off\n"
        "  optimiser: {}\n"
        "  model_spec:\n"
        "    model:\n"
        "      layers:\n"
        "      - {_type: toy_trainer.Layer.Config, dim: wide}\n"
    )
    found = faults(path, "--debug.seed=x", "--nope")
    places = [fault.partition(": ")[0] for fault in found]
    assert places == [
        "line 6 (training.steps)",
        "line 7 (training.sqe_len)",
        "line 8 (training.gc_debug)",
        "line 9 (training.local_batch_size)",
        "line 13 (optimizer.betas[1])",
        "line 14 (optimizer.lr)",
        "line 16 (dataloader.dataset_path)",
        "line 17 (dataloader.split)",
        "line 18 (optimiser)",
        "line 22 (model_spec.model.layers.0.dim)",
        "--debug.seed",
        "--nope",
    ]
    text = "\n".join(found)
    assert "(training.steps): expected an integer, got the text 'ten'" in text
    assert "did you mean seq_len?" in text
    assert "a key of torchtitan: not offered" in text
    assert 'put it in quotes: "5"' in text
    assert "put the word in quotes: YAML reads it as a boolean" in text
    assert "did you mean optimizer?" in text


def test_a_cross_field_fault_of_a_file_has_a_line_and_of_an_override_its_flag(write: Write) -> None:
    path = write("hp_config: 1\nmodule: toy\nconfig: small\ntrainer:\n  training:\n    global_batch_size: 7\n")
    assert faults(path)[0].startswith("line 6 (training.global_batch_size): 7 rows cannot be shared out")
    assert faults(path, "--training.global_batch_size=9")[0].startswith("--training.global_batch_size: 9 rows")
    assert faults(path, "--training.local_batch_size=7", "--debug.seed=-1")[0].startswith("--debug.seed")


def test_a_missing_field_an_unknown_class_and_a_refused_value_are_faults_with_lines(write: Write) -> None:
    path = write("hp_config: 1\ntrainer:\n  _type: toy_trainer.Trainer.Config\n  recipe: x\n")
    assert faults(path) == ["line 2 (model_spec): missing; Trainer.Config needs it"]
    path = write("hp_config: 1\ntrainer:\n  _type: toy_trainer.Trainer.Confg\n")
    assert faults(path)[0].startswith("line 3 (_type): 'toy_trainer.Trainer.Confg' is unknown")
    assert "did you mean 'toy_trainer.Trainer.Config'?" in faults(path)[0]
    path = write("hp_config: 1\ntrainer: {_type: pathlib.Path}\n")
    assert "is no config class" in faults(path)[0]
    path = write(
        "hp_config: 1\nmodule: toy\nconfig: small\ntrainer:\n  optimizer:\n    betas: [2, 0.9]\n  debug: {seed: x}\n"
    )
    found = faults(path)
    assert "betas must lie below 1, got (2.0, 0.9)" in "\n".join(found)
    assert any(fault.startswith("line 5 (optimizer)") for fault in found)
    assert any(fault.startswith("line 7 (debug.seed)") for fault in found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hp_config: 2\ntrainer: {}\n", "line 1: format 2 is not known"),
        ("hp_config: 1\ntrainr: {}\n", "line 2 (trainr): no such key"),
        ("hp_config: 1\ntraining: {}\n", "line 2 (training): no such key"),
        ("hp_config: 1\nmodule: 3\n", "line 2 (module): expected a name, got 3"),
        ("hp_config: 1\nmodule: toy\nconfig: small\ntrainer: [1]\n", "line 4 (trainer): expected a mapping"),
        ("hp_config: 1\nmodule: toy\nconfig: small\ntrainer: {training: 5}\n", "training): expected TrainingConfig"),
        ("module: toy\nhp_config: 1\n", "line 2: hp_config must be the first key"),
        ("a: [1\nb: 2\n", "line 2: is not YAML"),
        ("hp_config: 1\ntrainer:\n  x: {a: 1, a: 2}\n", "line 3 (trainer.x.a): the key stands twice; first in line 3"),
        ("hp_config: 1\nhp_config: 1\n", "line 2 (hp_config): the key stands twice; first in line 1"),
    ],
)
def test_a_broken_document_is_refused_with_its_line(text: str, message: str, write: Write) -> None:
    assert message in faults(write(text))[0]


@pytest.mark.parametrize("text", ["", "- 1\n", "5\n", "a: 1\n"])
def test_a_file_of_something_else_is_no_configuration(text: str, write: Write) -> None:
    path = write(text)
    assert faults(path)[0].startswith(f"{path}: is no configuration; allowed: a file that begins with `hp_config: 1`, ")


def test_a_file_that_is_missing_or_unreadable_is_refused(tmp_path: Path) -> None:
    assert "there is no such file" in faults(tmp_path / "none.yaml")[0]
    assert faults(tmp_path)[0].startswith(f"{tmp_path}/resolved.yaml: there is no such file")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in faults(tmp_path / "bytes.yaml")[0]


def test_a_file_and_a_module_exclude_each_other(write: Write) -> None:
    path = write(dump_yaml(toy_trainer.small()))
    with pytest.raises(ConfigError, match="--module: cannot be combined with the file"):
        ConfigManager().parse_args([str(path), "--module", "toy"])
    with pytest.raises(ConfigError, match="--config: cannot be combined with the file"):
        ConfigManager().parse_args([str(path), "--config", "small"])


def test_anchors_and_merges_of_yaml_work(write: Write) -> None:
    path = write(
        "hp_config: 1\nmodule: toy\nconfig: small\ntrainer:\n"
        "  training: &base {steps: 3, seq_len: 4}\n"
        "  validation: {_type: toy_trainer.Loader.Config, weights: {<<: {a: 1}, b: 2}}\n"
    )
    config = load_yaml(path)
    assert config.training.steps == 3
    assert config.validation.weights == {"a": 1.0, "b": 2.0}


def test_the_world_size_is_checked_for_a_file_too(write: Write) -> None:
    path = write("hp_config: 1\nmodule: toy\nconfig: small\ntrainer: {parallelism: {data_parallel_shard_degree: 2}}\n")
    assert load_yaml(path, world_size=2).parallelism.data_parallel_shard_degree == 2
    with pytest.raises(ConfigError, match="= 2, but the run has 3 processes"):
        load_yaml(path, world_size=3)
