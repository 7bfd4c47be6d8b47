"""The older trainer's YAML: read strictly, every fault with its line, nothing accepted that would not act."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hp_config import ConfigError, ConfigManager, HyperTrainerConfig, dump_yaml, load_yaml, parse_args

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_text(text: str) -> Path:
        path = tmp_path / "old.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


def faults(path: Path, *words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_args(HyperTrainerConfig, [str(path), *words])
    return [re.sub(re.escape(str(path)) + r":(\d)", r"line \1", str(fault)) for fault in caught.value.faults]


DENSE = """\
model:
  name: qwen3_5
  num_hidden_layers: 4
  config_overrides: {linear_num_key_heads: 2}
  tp_plan: {"layers.*.mlp.up_proj": colwise}
data:
  type: json_file
  train_path: corpus.jsonl
  max_seq_len: 128
train:
  max_steps: 50
  global_batch_size: 16
  micro_batch_size: 2
  accelerator: {dp: 4, tp: 2}
  gradient_checkpointing: {activation_checkpoint: off}
  optimizer: {lr: 1e-4, betas: [0.9, 0.95], lr_decay_style: linear}
  debug: {deterministic: y, check_nan_inf: "on"}
"""


def test_a_file_of_the_older_trainer_is_read_with_overrides_on_top(write: Write) -> None:
    config = parse_args(HyperTrainerConfig, [str(write(DENSE)), "--train.max_steps=20", "--train.optimizer.lr", "3e-4"])
    assert (config.train.max_steps, config.train.optimizer.lr) == (20, 3e-4)
    assert config.model.config_overrides == {"linear_num_key_heads": 2}
    assert config.train.optimizer.betas == (0.9, 0.95)
    assert config.train.accelerator.shard_degree == 4
    assert config.train.gradient_checkpointing.activation_checkpoint == "off"
    assert config.train.debug.deterministic
    assert config.train.debug.check_nan_inf
    # What is not mentioned has the older trainer's default.
    assert config.train.checkpoint.save_steps == 500
    assert config.data.pin_memory


def test_a_number_that_yaml_reads_as_text_is_a_number(write: Write) -> None:
    assert yaml.safe_load("lr: 1e-4") == {"lr": "1e-4"}
    config = parse_args(HyperTrainerConfig, [str(write("train: {optimizer: {lr: 1e-4}}"))])
    assert config.train.optimizer.lr == 1e-4


@pytest.mark.parametrize("word", ["true", "yes", "y", "on", "1", "t", "True", "Y"])
def test_every_older_spelling_of_true_is_read(write: Write, word: str) -> None:
    file = write("train: {accelerator: {reshard_after_forward: false}}")
    config = parse_args(HyperTrainerConfig, [str(file), f"--train.accelerator.reshard_after_forward={word}"])
    assert config.train.accelerator.reshard_after_forward
    config = parse_args(HyperTrainerConfig, [str(write(f"train: {{debug: {{deterministic: '{word}'}}}}"))])
    assert config.train.debug.deterministic


@pytest.mark.parametrize(("word", "value"), [("y", True), ("T", True), ("n", False), ("F", False), ("off", False)])
def test_a_boolean_may_stand_behind_its_option(write: Write, word: str, value: bool) -> None:
    file = write(f"train: {{debug: {{deterministic: {not value}}}}}")
    for words in (["--train.debug.deterministic", word], [f"--train.debug.deterministic={word}"]):
        assert parse_args(HyperTrainerConfig, [str(file), *words]).train.debug.deterministic is value


def test_single_keys_of_a_mapping_are_set_on_top_of_the_file_and_their_numbers_are_numbers(write: Write) -> None:
    file = write("model: {config_overrides: {rms_norm_eps: 1e-5, head_dim: 16}, tp_plan: {lm_head: colwise}}")
    words = ["--model.config_overrides.rope_theta=1e6", "--model.config_overrides.head_dim", "32"]
    model = parse_args(HyperTrainerConfig, [str(file), *words, "--model.tp_plan.layers.*.up_proj=rowwise"]).model
    assert model.config_overrides == {"rms_norm_eps": 1e-5, "head_dim": 32, "rope_theta": 1e6}
    assert model.tp_plan == {"lm_head": "colwise", "layers.*.up_proj": "rowwise"}
    whole = parse_args(HyperTrainerConfig, [str(file), "--model.config_overrides={rms_norm_eps: 1e-7}"]).model
    assert whole.config_overrides == {"rms_norm_eps": 1e-7}
    (fault,) = faults(file, "--model.config_overrides.head_dim")
    assert "no such option" in fault


@pytest.mark.parametrize(
    ("section", "home"),
    [
        ("parallel", "train.accelerator"),
        ("optim", "train.optimizer"),
        ("memory", "train.gradient_checkpointing"),
        ("profiler", "train.profile"),
        ("runtime", "train"),
    ],
)
def test_a_section_that_has_moved_says_where_to(write: Write, section: str, home: str) -> None:
    (fault,) = faults(write(f"model: {{}}\n{section}: {{}}\n"))
    assert fault.startswith(f"line 2 ({section}): is no section of this file; allowed: model, data, train")
    assert fault.endswith(f"its keys belong below {home}")


def test_a_file_of_the_newer_trainer_is_sent_to_hp_train(write: Write) -> None:
    path = write("hp_config: 1\nmodule: qwen3_5_v2\nconfig: qwen3_5_v2_debugmodel\ntrainer: {}\n")
    (fault,) = faults(path)
    assert fault.startswith(
        "line 1 (hp_config): is a file of the newer trainer (hp_config: 1); allowed: sections model"
    )
    assert fault.endswith("takes it as it is")


def test_all_faults_come_at_once_with_line_and_nearest_name(write: Write) -> None:
    text = """\
model:
  num_hiden_layers: 4
data:
  max_seq_len: many
  pp: 1
train:
  lr: 1.0
  accelerator:
    pp: 2
"""
    assert faults(write(text), "--train.max_stepz=3", "--train.seed=x") == [
        "line 2 (model.num_hiden_layers): no such key\n    → did you mean num_hidden_layers?",
        "line 4 (data.max_seq_len): expected an integer, got the text 'many'",
        "line 5 (data.pp): no such key\n    → it belongs at train.accelerator.pp",
        "line 7 (train.lr): no such key\n    → it belongs at train.optimizer.lr",
        "--train.max_stepz: no such option\n    → did you mean --train.max_steps?",
        "--train.seed: expected an integer, got the text 'x'",
        "line 9 (train.accelerator.pp): 2: pipeline parallelism is not available yet; allowed: 1\n"
        "    → dp_shard shards the weights meanwhile",
    ]


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("data.type=vl_dummy", "needs a vision model"),
        ("data.vl_grid_h=4", "needs a vision model"),
        ("data.streaming=true", "cannot be resumed exactly"),
        ("data.template=alpaca", "is not a template"),
        ("data.prefetch_factor=2", "acts only with worker processes"),
        ("data.subset=en", "is not read by data.type: dummy"),
        ("data.type=json_file", "is missing; data.type: json_file reads it"),
        ("model.ep_modules=[a]", "mixture-of-experts"),
        ("train.accelerator.ep=2", "mixture-of-experts"),
        ("train.accelerator.etp=2", "mixture-of-experts"),
        ("train.accelerator.zero_stage=1", "optimizer alone"),
        ("train.accelerator.zero_stage=2", "contradicts reshard_after_forward: true"),
        ("train.accelerator.async_cp=1", "overlapped context parallelism"),
        ("train.accelerator.ulysses_degree=2", "head-parallel"),
        ("train.accelerator.comm_fusion=no", "one transformer block at a time"),
        ("train.accelerator.dp_shard=0", "is no degree"),
        ("train.optimizer.bsz_warmup_ratio=0.1", "growing batch size"),
        ("train.optimizer.lr_decay_style=exp", "expected one of"),
        ("train.optimizer.lr_min=1", "is above lr"),
        ("train.moe_monitor.enabled=true", "mixture-of-experts"),
        ("train.backend=mindspore", "only torch"),
        ("train.max_steps=0", "is not positive"),
        ("train.micro_batch_size=3", "is not a multiple of micro_batch_size 3"),
        ("train.eval.eval_steps=5", "is missing; eval_steps: 5"),
        ("train.accelerator.zero_stage=3 --train.accelerator.dp_shard=1", "leaves nothing to shard"),
        ("train.mixed_precision.output_dtype=float32", "acts only with enabled: true"),
        ("train.optimizer.lr_min=1e-6 --train.optimizer.lr_decay_style=constant", "never reached"),
        ("train.optimizer.max_grad_norm=0", r".inf measures the norm and clips nothing"),
        ("train.optimizer.lr=nan", "is out of range"),
        ("train.num_train_epochs=2", "have no epochs"),
        ("train.profile.enabled=true --train.max_steps=4", "is there after 5, and max_steps is 4"),
        ("model.tokenizer_path=folder", "rows are token ids"),
        ("model.tp_plan.mlp=colwis", "is no way to split a matrix; allowed: colwise, rowwise, replicate"),
        ("data.text_key=body", "template: empty"),
        ("data.messages_key=turns", "template: default"),
        ("train.debug.deterministic_warn_only=true", "acts only with deterministic"),
    ],
)
def test_a_knob_that_could_not_act_is_refused_by_name(write: Write, option: str, text: str) -> None:
    file = write("model: {}\n")
    (fault,) = faults(file, *f"--{option}".split())
    assert text in fault
    assert option.partition("=")[0].rpartition(".")[0] in fault, fault


def test_empty_sections_and_an_empty_mapping_are_the_defaults(write: Write) -> None:
    assert parse_args(HyperTrainerConfig, [str(write("model:\ndata:\ntrain:\n"))]) == HyperTrainerConfig()


def test_a_missing_file_and_a_command_without_one_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        parse_args(HyperTrainerConfig, [str(tmp_path / "none.yaml")])
    with pytest.raises(ValueError, match="the YAML file is missing"):
        parse_args(HyperTrainerConfig, ["--train.max_steps=3"])


def test_a_callers_own_dataclass_with_more_fields_is_read_too(write: Write) -> None:
    @dataclasses.dataclass(kw_only=True)
    class Mine(HyperTrainerConfig):
        note: str = ""

    assert parse_args(Mine, [str(write("note: hello\ntrain: {seed: 3}"))]) == Mine(
        note="hello", train=dataclasses.replace(HyperTrainerConfig().train, seed=3)
    )


def test_the_config_manager_hands_a_file_of_the_three_sections_to_the_older_reader(write: Write) -> None:
    manager = ConfigManager()
    config = manager.parse_args([str(write(DENSE)), "--train.max_steps=20"], world_size=8)
    assert config == parse_args(HyperTrainerConfig, [str(manager.file), "--train.max_steps=20"])
    assert (manager.module, manager.recipe) == (None, None)
    with pytest.raises(ConfigError, match=r"belong below train\.optimizer"):
        ConfigManager().parse_args([str(write("optim: {lr: 1}"))])
    with pytest.raises(ConfigError, match=r"train\.accelerator\): .* = 8, but the world has 2 processes"):
        ConfigManager().parse_args([str(write(DENSE))], world_size=2)
    with pytest.raises(ConfigError, match=r"16 is not a multiple of micro_batch_size 8 × 4 data-parallel ranks"):
        ConfigManager().parse_args([str(write(DENSE)), "--train.micro_batch_size=8"], world_size=8)


def test_what_was_read_is_written_and_read_back_equal(write: Write, tmp_path: Path) -> None:
    config = parse_args(HyperTrainerConfig, [str(write(DENSE))])
    (tmp_path / "again.yaml").write_text(dump_yaml(config), encoding="utf-8")
    assert load_yaml(tmp_path / "again.yaml") == config


def test_help_of_an_older_file_lists_its_options(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        ConfigManager().parse_args([str(write(DENSE)), "--help"])
    assert end.value.code == 0
    assert "--train.optimizer.lr" in capsys.readouterr().out
