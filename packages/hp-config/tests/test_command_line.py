"""The command line as tyro shows it, and that tyro, the pre-pass and YAML agree about every value."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any, Literal

import pytest
import toy_trainer

from hp_config import ConfigManager, dump_yaml
from hp_config.coerce import coerce
from hp_config.command_line import apply_options, to_text
from hp_config.flags import read_flags
from hp_config.tree import find_options, replace_at

SMALL = ("--module", "toy", "--config", "small")


@pytest.fixture
def help_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit) as end:
        ConfigManager().parse_args([*SMALL, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_option_with_its_default_and_sentence(help_text: str) -> None:
    for option in find_options(toy_trainer.small()).values():
        assert option.flag in help_text, option.flag
    flat = " ".join(help_text.replace("│", " ").split())
    assert "--training.steps INT Optimizer steps of the whole run; a resumed run goes on to this total." in flat
    assert "goes on to this total. (default: 10)" in flat
    assert "--optimizer.betas FLOAT,FLOAT Decay rates of the moments. (default: '[0.9, 0.95]')" in flat
    assert "--training.dtype {bfloat16,float32,float16}" in flat
    assert "--debug.seed INT|none" in flat
    assert "--dataloader.limit INT|{auto}" in flat
    assert "hp train --module toy --config small" in flat


def test_help_groups_options_by_section_with_what_the_section_is(help_text: str) -> None:
    assert "training options" in help_text
    assert "How weights are updated." not in help_text  # the recipe's optimizer is a subclass with its own fields
    assert "How the processes of a run share the work" in help_text
    assert help_text.index("optimizer options") < help_text.index("training options")


def test_help_says_what_is_not_available_yet(help_text: str) -> None:
    flat = " ".join(help_text.replace("│", " ").split())
    assert "Ranks that each hold a stretch of the layers; 1 is off. Not available yet. (default: 1)" in flat


def test_help_hides_what_is_no_option_and_shows_the_model_for_reading(help_text: str) -> None:
    options, _, model = help_text.partition("set by the recipe, not by options:")
    for hidden in ("model_spec", "param_init", "secret", "--recipe", "--dataloader.transform"):
        assert hidden not in options
    assert model.splitlines()[1:] == [
        "  model_spec: Spec(name=toy, parallelize_fn=parallelize)",
        "    model: Model(vocab=100)",
        "      layers.0-3: Layer(dim=8, heads=2)",
        "      head: Layer(dim=9, heads=2)",
    ]


def test_help_of_a_file_shows_its_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = toy_trainer.small()
    config.training.steps = 77
    config.model_spec.model.layers[2].dim = 5
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    with pytest.raises(SystemExit):
        ConfigManager().parse_args([str(tmp_path / "run.yaml"), "-h"])
    out = capsys.readouterr().out
    assert "(default: 77)" in out
    assert "layers.0-1: Layer(dim=8, heads=2)\n      layers.2: Layer(dim=5, heads=2)\n      layers.3: Layer" in out


WORDS = [
    *("--training.steps=3", "--no-debug.deterministic", "--optimizer.fused", "--optimizer.betas", "0.1", "1e-3"),
    *("--optimizer.decay-keywords=a,true,null", "--dataloader.weights", "a=1", "b c=2e-3", "--dataloader.limit=auto"),
    *("--dataloader.dataset_path=--x=' \"y: [", "--dataloader.cache=none", "--dataloader.colour=dark-blue"),
    *("--dataloader.extra={a: [1, null, 'x']}", "--dataloader.split=off", "--dump_folder=", "--debug.seed=none"),
    *("--training.max_norm=inf", "--optimizer.scale.kwargs", "by=3"),
]


def test_tyro_and_the_pre_pass_give_the_same_config() -> None:
    config = toy_trainer.small()
    reading = read_flags(WORDS, config)
    assert reading.faults == []
    assert len(reading.values) == 16
    assert apply_options(config, reading.values) == replace_at(config, reading.values)


def test_a_recipe_with_options_and_a_file_with_options_give_the_same_config(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(dump_yaml(toy_trainer.small().replace(recipe="toy.small")))
    assert ConfigManager().parse_args([str(tmp_path / "run.yaml"), *WORDS]) == ConfigManager().parse_args(
        [*SMALL, *WORDS]
    )


def test_a_value_written_as_a_word_reads_back_equal() -> None:
    draw = random.Random(0)
    floats = [struct.unpack("d", draw.randbytes(8))[0] for _ in range(200)]
    cases: list[tuple[Any, Any]] = [(float, value) for value in floats if value == value]
    cases += [(list[float], floats[:3]), (tuple[float, ...], tuple(floats[:2]))]
    cases += [(str, text) for text in ("", " a ", "true", "None", "[1", "a,b", "ü", "1e-4", "new\nline")]
    cases += [(list[str], ["", "true", "a, b", "None", "#", "'", "1"]), (dict[str, str], {"a=b": "c,d", "": ""})]
    cases += [(int, -5), (bool, True), (int | None, None), (Path, Path("a b")), (Literal["x", 2], 2)]
    cases += [(toy_trainer.Colour, toy_trainer.Colour.DARK_BLUE), (set[int], {1, 2}), (Any, {"k": [None, 1.5]})]
    for annotation, value in cases:
        read = coerce(annotation, to_text(value), "x", text=True)
        assert read == value, (annotation, value)
        assert type(read) is type(value)
