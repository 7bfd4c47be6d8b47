"""LLMTrainer against plain torch, step for step; its build steps, hooks, checkpoints and files."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_run import build, train, write_yaml

from hp_config import ConfigManager, HyperTrainerConfig
from hp_protocols import get_spec
from hp_protocols.errors import ConfigError, Fault
from hp_protocols.testing import run_world
from hp_trainer import Callback, HyperTrainer, LLMTrainer, parse_args
from hp_trainer._legacy.messages import closing
from hp_trainer._legacy.migration import migrate
from hp_trainer._legacy.sections import _OLDER_NAMES, in_older_words
from hp_trainer.base_trainer import BaseTrainer
from hp_trainer.run_folder import RunFolder

MODEL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 300, "head_dim": 16}
KINDS = ("linear_attention", "full_attention")
STEPS = 4


def records() -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in Path("outputs/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def prepared_rows(count: int = 16, length: int = 12) -> torch.Tensor:
    return torch.randint(300, (count, length), generator=torch.Generator().manual_seed(3))


def prepared_labels() -> torch.Tensor:
    """Of very unequal numbers of tokens to learn."""
    labels = prepared_rows().clone()
    labels[::4, 3:] = -100
    labels[1::4, 5:] = -100
    return labels


def bare_model() -> torch.nn.Module:
    """As LLMTrainer fills it: every parameter from the global random numbers after the seed."""
    model = get_spec("qwen3_5").build_model_fn(**MODEL, layer_types=KINDS)
    torch.manual_seed(42)
    model.init_weights()
    return model


def by_hand(aggregation: str) -> tuple[list[tuple[float, float]], torch.nn.Module]:
    """Four steps of two micro-batches of two rows, written out in torch."""
    model, ids, wanted = bare_model(), prepared_rows(), F.pad(prepared_labels(), (0, 1), value=-100)[:, 1:]
    plain = ("bias", "norm")
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(w in n for w in plain)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(w in n for w in plain)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, foreach=False)
    seen = []
    for step in range(STEPS):
        warmup, progress = math.ceil(STEPS * 0.5), max(0, step - 2) / 2
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
        floor = 1e-5 / 1e-2
        factor = (step + 1) / warmup if step < warmup else 1.0 if step == warmup else floor + (1 - floor) * remaining
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        micro_batches = [slice(4 * step, 4 * step + 2), slice(4 * step + 2, 4 * step + 4)]
        total, valid = torch.zeros(()), wanted[4 * step : 4 * step + 4].ne(-100).sum()
        for rows in micro_batches:
            labels = wanted[rows]
            logits = model(ids[rows]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss / (valid if aggregation == "token_weighted" else 2 * labels.ne(-100).sum())
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((total.item(), norm.item()))
    return seen, model


@pytest.mark.parametrize("aggregation", ["token_weighted", "rank_average"])
@pytest.mark.parametrize("init_device", ["meta", "cpu"])
def test_training_is_bitwise_that_of_a_plain_torch_loop(aggregation: str, init_device: str) -> None:
    torch.save({"input_ids": prepared_rows(), "labels": prepared_labels()}, "rows.pt")
    trainer = train(
        data__type="preset_pt",
        data__train_path="rows.pt",
        data__shuffle=False,
        data__max_seq_len=12,
        train__max_steps=STEPS,
        train__init_device=init_device,
        train__optimizer={
            "lr": 1e-2,
            "lr_warmup_ratio": 0.5,
            "max_grad_norm": 0.5,
            "loss_aggregation": aggregation,
        },
    )
    expected, model = by_hand(aggregation)
    assert [(record["loss"], record["grad_norm"]) for record in records()] == expected
    for (name, ours), theirs in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_both_trainers_are_base_trainers_and_the_older_has_its_thirteen_steps_in_order() -> None:
    assert issubclass(HyperTrainer, BaseTrainer)
    names = [getattr(step, "__name__", "") for step in LLMTrainer.build_steps(LLMTrainer.__new__(LLMTrainer))]
    assert names == [
        *("setup", "build_model", "freeze_modules", "build_model_assets", "build_data_transform", "build_dataset"),
        *("build_collate", "build_dataloader", "parallelise_model", "build_optimizer", "build_lr_scheduler"),
        *("build_training_context", "build_callbacks", "start_callbacks"),
    ]


class Diary(Callback):
    """Writes down every hook."""

    def __init__(self) -> None:
        self.hooks: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            object.__getattribute__(self, "hooks").append(name)
        return object.__getattribute__(self, name)


def test_every_hook_is_called_in_its_place() -> None:
    torch.save({"input_ids": prepared_rows(8)}, "rows.pt")
    diary = Diary()
    train(
        diary,
        data__type="preset_pt",
        data__train_path="rows.pt",
        train__num_train_epochs=2,
        train__max_steps=3,
        train__checkpoint={"save_hf_weights": False, "save_steps": 2},
        train__eval={"eval_steps": 2, "eval_dataset": "rows.pt"},
    )
    step = ["on_step_begin", "on_substep_end", "on_substep_end", "on_pre_optimizer_step"]
    saved = ["on_evaluate", "on_save"]
    assert diary.hooks == [
        *("on_init_end", "on_train_begin", "on_epoch_begin"),
        *(*step, "on_log", "on_step_end"),
        *(*step, "on_log", *saved, "on_step_end"),
        *("on_epoch_end", "on_epoch_begin"),
        *(*step, "on_log", "on_evaluate", "on_step_end"),
        *("on_epoch_end", "on_save", "on_train_end"),
    ]


def test_a_run_goes_on_bitwise_where_it_was_saved_and_never_writes_over_another() -> None:
    options = {"train__max_steps": 4, "data__train_size": 64}
    whole = train(**options)
    losses = [record["loss"] for record in records()]
    half = train(**options, train__checkpoint={"save_hf_weights": False, "save_steps": 2, "output_dir": "half"})
    assert half.run_folder.path == Path("half")
    resumed = train(
        **options,
        train__checkpoint={"save_hf_weights": False, "output_dir": "other", "load_path": "half/checkpoint/step-2"},
    )
    assert resumed.first_step == 2
    lines = map(json.loads, Path("other/metrics.jsonl").read_text().splitlines())
    assert [line["loss"] for line in lines] == losses[2:]
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert train(**options).run_folder.path == Path("outputs-2")
    again = build(**options, train__checkpoint={"save_hf_weights": False, "load_path": "outputs"})
    assert (again.state.step, again.run_folder.path) == (4, Path("outputs"))
    assert again.train().reason == "already_finished"
    again.close()


class Overtaken(LLMTrainer):
    """Another run takes the folder, trains and ends while this one is being built."""

    def build_optimizer(self) -> None:
        super().build_optimizer()
        quicker = RunFolder(self.run_folder.path)
        quicker.open()
        quicker.write_resolved("quicker", 0)
        quicker.close()


def test_runs_that_start_together_have_a_folder_each() -> None:
    being_built = RunFolder(Path("outputs"))
    being_built.open()
    late = Overtaken(parse_args(argv=[write_yaml(train__checkpoint={"output_dir": "late"})]))
    assert (late.run_folder.path, late.place.occupied) == (Path("late-2"), "late")
    assert late.train().reason == "finished"
    late.close()
    assert Path("late/resolved.yaml").read_text() == "quicker"
    assert train().run_folder.path == Path("outputs-2")
    being_built.close()


def test_a_run_that_is_still_trained_is_not_gone_on_with() -> None:
    place = {"save_hf_weights": False, "save_steps": 1}
    train(train__checkpoint=place)
    still = RunFolder(Path("outputs"))
    still.open()
    with pytest.raises(ConfigError, match="another run is using this folder") as caught:
        build(train__checkpoint={**place, "load_path": "outputs"})
    assert "--train.checkpoint.output_dir" in str(caught.value)
    assert "dump_folder" not in str(caught.value)
    still.close()


class StopsBeforeTheLastStep(Callback):
    def on_step_end(self, trainer: LLMTrainer, result: Any) -> None:
        if trainer.state.step == trainer.total_steps - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_that_comes_in_the_last_step_leaves_a_finished_run_with_its_export() -> None:
    options = {"train__checkpoint": {"save_hf_weights": True}}
    assert train(StopsBeforeTheLastStep(), **options).result.reason == "finished"
    assert Path("outputs/checkpoint/step-2-hf/config.json").is_file()
    assert train(StopsBeforeTheLastStep(), **options, train__max_steps=3).result.reason == "finished"

    text = migrate(parse_args(argv=[write_yaml(**options, train__checkpoint__output_dir="new")])).text
    Path("new.yaml").write_text(text)
    newer = ConfigManager().parse_args(["new.yaml"], world_size=1).build()
    after_step = newer.after_step

    def stopped(result: Any) -> None:
        after_step(result)
        if newer.state.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    newer.after_step = stopped
    assert newer.train().reason == "finished"
    newer.close()
    assert Path("new/checkpoint/step-2-hf/config.json").is_file()


def test_the_end_says_what_really_goes_on_in_the_same_folder() -> None:
    train()
    ended = train()
    said = closing(ended, ended.result)
    options = said.rpartition("Go on with it:  ")[2].split()
    more = LLMTrainer(parse_args(argv=["old.yaml", *options]))
    assert (more.run_folder.path, more.first_step, more.state.step) == (Path("outputs-2"), 0, 2)
    assert (more.train().step, more.first_step) == (4, 2)
    more.close()
    drained = train(train__max_steps=100, data__train_size=6)
    options = closing(drained, drained.result).rpartition("Go on with it:  ")[2].split()
    assert "--train.num_train_epochs=2" in options
    more = LLMTrainer(parse_args(argv=["old.yaml", *options]))
    assert more.train().step > 2
    more.close()


class RefusesToBegin(Callback):
    def on_train_begin(self, trainer: LLMTrainer) -> None:
        raise ConfigError(Fault("metrics.enable_wandb", "does not start", hint="choose another --dump_folder"))


def test_faults_are_in_the_words_of_the_older_file_also_when_training_begins() -> None:
    trainer = build(RefusesToBegin())
    with pytest.raises(ConfigError, match=r"train\.wandb\.enabled.*\n.*--train\.checkpoint\.output_dir$"):
        trainer.train()
    trainer.close()
    for newer, older in _OLDER_NAMES.items():
        node: Any = HyperTrainerConfig()
        for name in older.split("."):
            node = getattr(node, name)
        said = in_older_words(Fault(newer, "is wrong", hint=f"use it ({newer}); --{newer}=x"))
        assert (said.where, said.hint) == (older, f"use it ({older}); --{older}=x")


def test_a_column_of_conversations_that_is_not_there_is_looked_for_under_its_own_key() -> None:
    from datasets import Dataset

    Dataset.from_list([{"message": [{"role": "user", "content": "hi"}]}]).save_to_disk("saved")
    with pytest.raises(ConfigError, match=r"no column 'messages'.*\n.*--data\.messages_key message$"):
        build(data__type="hf_datasets", data__train_path="saved", data__template="default")


def _built_from_own_files(rank: int, world_size: int, folder: str) -> str:
    os.chdir(f"machine-{rank}")
    with pytest.raises(ConfigError) as caught:
        build(model__weights_path=folder)
    return str(caught.value)


def test_machines_with_different_files_of_the_model_are_told_on_all_ranks() -> None:
    adapter = get_spec("qwen3_5").state_dict_adapter
    for rank in range(2):
        theta = 1e4 * (rank + 1)
        config = adapter(get_spec("qwen3_5").build_model_fn(**MODEL, rope_theta=theta).config).hf_config()
        for folder in ("other_values", "missing")[: 2 - rank]:
            Path(f"machine-{rank}", folder).mkdir(parents=True)
            Path(f"machine-{rank}", folder, "config.json").write_text(json.dumps(config))
    helpers = {"PYTHONPATH": str(Path(__file__).parent)}
    for folder, said in (
        ("other_values", ("model: is not the same on every rank", "rope_theta=20000.0")),
        ("missing", ("rank 1: model.weights_path: there is no",)),
    ):
        first, second = run_world(_built_from_own_files, 2, folder, init_process_group=False, env=helpers)
        assert first == second
        assert all(words in first for words in said)


def test_a_callback_added_later_is_called_and_one_that_fails_ends_the_run() -> None:
    class Fails(Callback):
        def on_step_end(self, trainer: LLMTrainer, result: Any) -> None:
            raise RuntimeError("asked to fail")

    trainer = build()
    trainer.add_callback(Fails())
    with pytest.raises(RuntimeError, match="asked to fail"):
        trainer.train()
    trainer.close()


def test_the_end_of_the_data_ends_the_run_with_a_checkpoint() -> None:
    trainer = train(train__max_steps=100, data__train_size=6)
    assert trainer.result.reason == "data_exhausted"
    assert trainer.result.step == 2
    assert Path("outputs/checkpoint/step-2").is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model__name": "qwen3_5_v2"}, "no build_model_fn"),
        ({"model__freeze_modules": ["nothing_like_it"]}, "in no parameter's name"),
        ({"model__config_overrides": {"head_dimm": 3}}, "did you mean head_dim"),
        ({"model__tokenizer_path": "folder"}, "rows are token ids"),
        ({"model__max_position_embeddings": 8}, "max_position_embeddings 8"),
        ({"train__optimizer": {"type": "adamv"}}, "train.optimizer.type"),
        ({"train__optimizer": {"type": "sgd", "betas": [0.5, 0.5]}}, "betas"),
        ({"train__checkpoint": {"load_path": "nowhere"}}, "there is no checkpoint at nowhere"),
        ({"train__num_train_epochs": 3}, "have no epochs"),
        ({"train__mixed_precision": {"output_dtype": "bfloat16"}}, "acts only with enabled"),
        ({"train__eval": {"eval_steps": 1, "eval_dataset": "x"}}, "is not read by data.type: dummy"),
        ({"train__init_device": "npu"}, "this run is on"),
        ({"data__type": "json_file", "data__train_path": "none.jsonl"}, r"data\.train_path: .*none\.jsonl"),
        ({"data__type": "preset_pt", "data__train_path": "none.pt"}, r"data\.train_path: there is no file none\.pt"),
        ({"train__memory_monitor": {"enabled": True, "reset_peak_each_step": True}}, "cannot be reset"),
    ],
)
def test_what_cannot_act_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**options)
    assert not torch.distributed.is_initialized()


def test_the_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    from hp_trainer.cli import main

    assert main(["train", write_yaml(), "--train.max_steps=1"]) == 0
    assert "Finished 1 steps." in capsys.readouterr().out
    assert main(["train", "old.yaml", "--train.max_stepz=1", "--train.seed=x"]) == 2
    error = capsys.readouterr().err
    assert "2 mistakes; nothing was run" in error
    assert "did you mean --train.max_steps?" in error
