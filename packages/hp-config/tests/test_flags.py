"""Options as they are typed: every form, every mistake, all in one pass. Each test parses a real command line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import toy_trainer

from hp_config import ConfigError, ConfigManager
from hp_config.flags import split_words

SMALL = ("--module", "toy", "--config", "small")


def parse(*words: str) -> Any:
    return ConfigManager().parse_args([*SMALL, *words])


def faults(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(*words)
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize(
    "words",
    [
        ("--training.seq_len=32",),
        ("--training.seq_len", "32"),
        ("--training.seq-len=32",),
        ("--training.seq-len", "32"),
    ],
)
def test_a_value_may_follow_an_equals_sign_or_a_space_with_dashes_or_underscores(words: tuple[str, ...]) -> None:
    config = parse(*words)
    assert config.training.seq_len == 32
    assert config.replace(training=toy_trainer.small().training, recipe="") == toy_trainer.small()


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("--debug.deterministic",), True),
        (("--debug.no-deterministic",), False),
        (("--debug.no_deterministic",), False),
        (("--no-debug.deterministic",), False),
        (("--debug.deterministic=true",), True),
        (("--debug.deterministic=false",), False),
        (("--debug.deterministic", "yes"), True),
        (("--debug.deterministic", "off"), False),
        (("--debug.deterministic", "--debug.print-config"), True),
    ],
)
def test_a_boolean_has_every_form(words: tuple[str, ...], value: bool) -> None:
    assert parse("--debug.deterministic=true", *words).debug.deterministic is value


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("--optimizer.fused",), True),
        (("--no-optimizer.fused",), False),
        (("--optimizer.fused=none",), None),
        (("--optimizer.fused", "None"), None),
    ],
)
def test_an_optional_boolean_also_takes_none(words: tuple[str, ...], value: bool | None) -> None:
    assert parse(*words).optimizer.fused is value


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (("--optimizer.betas", "0.8", "0.9"), "optimizer.betas", (0.8, 0.9)),
        (("--optimizer.betas=0.8,0.9",), "optimizer.betas", (0.8, 0.9)),
        (("--optimizer.betas=[0.8, 0.9]",), "optimizer.betas", (0.8, 0.9)),
        (("--optimizer.decay-keywords", "a", "b", "--debug.seed", "3"), "optimizer.decay_keywords", ["a", "b"]),
        (("--optimizer.decay-keywords=",), "optimizer.decay_keywords", []),
        (("--dataloader.weights", "a=1", "b=2"), "dataloader.weights", {"a": 1.0, "b": 2.0}),
        (("--dataloader.weights={a: 1}",), "dataloader.weights", {"a": 1.0}),
        (("--training.global-batch-size", "-1"), "training.global_batch_size", -1),
        (("--dataloader.dataset_path=--odd name=",), "dataloader.dataset_path", "--odd name="),
        (("--dataloader.dataset_path", "-odd"), "dataloader.dataset_path", "-odd"),
        (("--dataloader.dataset_path=",), "dataloader.dataset_path", ""),
        (("--dataloader.dataset_path=true",), "dataloader.dataset_path", "true"),
        (("--dataloader.dataset_path=none",), "dataloader.dataset_path", None),
        (("--dataloader.cache", "x y"), "dataloader.cache", Path("x y")),
        (("--dataloader.colour=dark-blue",), "dataloader.colour", toy_trainer.Colour.DARK_BLUE),
        (("--dataloader.limit=5",), "dataloader.limit", 5),
        (("--dataloader.limit=auto",), "dataloader.limit", "auto"),
        (("--dataloader.extra=[1, null]",), "dataloader.extra", [1, None]),
        (("--optimizer.lr=1e-4",), "optimizer.lr", 1e-4),
        (("--training.max_norm=inf",), "training.max_norm", float("inf")),
        (("--dump-folder", "runs/1"), "dump_folder", "runs/1"),
        (("--debug.seed=none",), "debug.seed", None),
    ],
)
def test_a_value_arrives_with_its_type(words: tuple[str, ...], path: str, value: Any) -> None:
    config = parse(*words)
    for name in path.split("."):
        config = getattr(config, name)
    assert config == value
    assert type(config) is type(value)


def test_fields_of_a_subclass_are_options_where_the_recipe_has_the_subclass() -> None:
    assert parse("--optimizer.betas=0.1,0.2").optimizer.betas == (0.1, 0.2)
    with pytest.raises(ConfigError, match=r"--optimizer\.betas: no such option"):
        ConfigManager().parse_args(["--module", "toy", "--config", "plain_optimizer", "--optimizer.betas=0.1,0.2"])


def test_an_option_given_twice_counts_the_last_time_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse("--debug.seed=1", "--debug.seed=2").debug.seed == 2
    assert "--debug.seed is given twice: 1, then 2; the last one counts" in caplog.text


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--training.step=5", "--training.steps"),
        ("--trainign.steps=5", "--training.steps"),
        ("--steps=5", "--training.steps"),
        ("--seed=5", "--debug.seed"),
        ("--optimizer.steps=5", "--training.steps"),
        ("--learning_rte=5", None),
        ("--dump_foldr=x", "--dump_folder"),
        ("--sed=1", "--debug.seed"),
    ],
)
def test_an_unknown_option_names_the_nearest_one(word: str, meant: str | None) -> None:
    (fault,) = faults(word)
    assert fault.startswith(f"{word.partition('=')[0]}: no such option")
    assert (f"did you mean {meant}?" if meant else "--help lists the options") in fault


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--training.steps=ten",), "--training.steps: expected an integer, got the text 'ten'"),
        (("--training.steps", "1.5"), "--training.steps: expected an integer, got the text '1.5'"),
        (("--training.steps",), "--training.steps: a value is missing; allowed: an integer"),
        (("--training.steps="), "--training.steps: expected an integer, got the text ''"),
        (("--training.steps", "--debug.deterministic"), "--training.steps: a value is missing"),
        (("--debug.deterministic=maybe",), "--debug.deterministic: expected true or false, got the text 'maybe'"),
        (("--debug.deterministic", "maybe"), "--debug.deterministic: expected true or false, got the text 'maybe'"),
        (("--no-debug.deterministic=false",), "takes no value"),
        (("--no-training.steps",), "--no-training.steps: no such option"),
        (("--training.dtype=float8",), "expected one of bfloat16, float32, float16, got the text 'float8'"),
        (("--optimizer.betas", "1"), "--optimizer.betas: expected 2 values"),
        (("--optimizer.betas", "1", "x"), "--optimizer.betas[1]: expected a number, got the text 'x'"),
        (("--training", "5"), "--training: is a section, not a value"),
        (("--training",), "its options begin with --training., such as --training.steps"),
        (("--model_spec.model.vocab=3",), "--model_spec.model.vocab: model_spec is set by the recipe"),
        (("--model-spec=3",), "--model-spec: is set by the recipe, not on the command line"),
        (("--dataloader.secret=x",), "--dataloader.secret: is set by the recipe"),
        (("--dataloader.transform=x",), "cannot be written as text; set it in a recipe or in a YAML"),
        (("--validation.colour=red",), "--validation.colour: validation cannot be written as text"),
        (("--training.gc_debug",), "--training.gc_debug: an option of torchtitan: not offered"),
        (("--compile.enable",), "use compile.mode"),
        (
            ("--parallelism.pipeline_parallel_degree=2",),
            "which is not available yet; allowed: 1",
        ),
        (("stray",), "stray: no option comes before this word"),
        (("-training.steps=5",), "-training.steps=5: an option begins with two dashes\n    → --training.steps=5"),
        (("training.steps=5",), "training.steps=5: an option begins with two dashes"),
        (("--",), "--: no option comes before this word"),
    ],
)
def test_a_mistake_is_named_as_it_was_typed(words: tuple[str, ...] | str, message: str) -> None:
    (fault,) = faults(*([words] if isinstance(words, str) else words))
    assert message in fault


def test_a_word_before_module_is_no_file_unless_it_is_there() -> None:
    with pytest.raises(ConfigError, match=r"training\.steps=5: an option begins with two dashes"):
        ConfigManager().parse_args(["training.steps=5", *SMALL])


def test_every_mistake_of_a_command_is_found_at_once() -> None:
    found = faults(
        "--training.steps=ten",
        "--trainng.seq_len=5",
        "--training.local_batch_size=0",
        "--optimizer.lr=-1",
        "--optimizer.betas",
        "--parallelism.pipeline-parallel-degree=4",
        "--debug.seed",
        "-3",
        "--nonsense",
    )
    assert [fault.partition(":")[0] for fault in found] == [
        "--training.steps",
        "--trainng.seq_len",
        "--optimizer.betas",
        "--nonsense",
        "--optimizer.lr",
        "--training.local_batch_size",
        "--parallelism.pipeline_parallel_degree",
        "--debug.seed",
    ]


@pytest.mark.parametrize("local", ["--training.local_batch_size=x", "--training.local_batchsize=3"])
def test_one_slip_is_not_reported_as_two(local: str) -> None:
    # With the recipe's local batch of 2 a global batch of 9 would not divide, but the user asked for another.
    found = faults("--training.global_batch_size=9", local)
    assert len(found) == 1
    assert "global_batch_size" not in found[0]


def test_values_that_a_config_refuses_by_itself_are_faults_of_the_user() -> None:
    assert faults("--optimizer.betas=2,0.9", "--training.steps=0") == [
        "--optimizer.betas: betas must lie below 1, got (2.0, 0.9)",
        "--training.steps: 0 is too small; allowed: at least 1",
    ]
    # Which of several values of a section is at fault, only the section knows.
    assert faults("--optimizer.betas=2,0.9", "--optimizer.lr=-1") == [
        "--optimizer.betas, --optimizer.lr: betas must lie below 1, got (2.0, 0.9)"
    ]


def test_a_section_that_refuses_its_values_is_not_blamed_for_those_it_keeps() -> None:
    # The recipe's 4 rows x 2 replicas would not fit its batch of 4, but the user asked for 13 rows, not for 4.
    words = ("--training.local_batch_size=13", "--parallelism.data_parallel_replicate_degree=2")
    with pytest.raises(ConfigError) as caught:
        ConfigManager().parse_args(["--module", "toy", "--config", "picky", *words])
    assert str(caught.value) == "--training.local_batch_size: 13 rows bring bad luck"


def test_module_and_config_need_values_and_one_value() -> None:
    with pytest.raises(ConfigError) as caught:
        split_words(["--module", "--config="])
    assert [fault.where for fault in caught.value.faults] == ["--module", "--config"]
    with pytest.raises(ConfigError, match="--module: given twice: a, then b"):
        split_words(["--module=a", "--module", "b"])
    words = split_words(["--module=a", "--config", "b", "--x", "--module=a", "-h"])
    assert (words.module, words.recipe, words.wants_help, words.options) == ("a", "b", True, ("--x",))
