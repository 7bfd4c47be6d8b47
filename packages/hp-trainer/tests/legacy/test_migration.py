"""hp migrate: what it writes is read and trained, to the bit where both start from the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import test_every_key
import torch
import yaml
from tiny_run import build, train, write_yaml

from hp_config import ConfigManager
from hp_protocols import get_spec
from hp_protocols.errors import ConfigError
from hp_trainer import parse_args
from hp_trainer._legacy.migration import migrate
from hp_trainer.cli import main

OPTIONS: dict[str, Any] = {
    "train__max_steps": 12,
    "train__optimizer": {"lr": 1e-2, "lr_warmup_ratio": 0.4, "max_grad_norm": 0.5, "betas": [0.8, 0.9]},
    "train__checkpoint": {"save_hf_weights": False, "output_dir": "new"},
}


def records(path: str) -> list[tuple[float, float, float]]:
    lines = map(json.loads, Path(path).read_text().splitlines())
    return [(line["loss"], line["grad_norm"], line["lr"]) for line in lines if "event" not in line]


@pytest.mark.parametrize(
    "optimizer",
    [{}, {"lr_decay_style": "linear", "weight_decay": 0.3}, {"type": "adam", "lr_decay_style": "sqrt", "eps": 1e-4}],
    ids=["cosine", "linear", "adam-sqrt"],
)
def test_the_migrated_file_trains_the_same_bits_from_the_same_weights(
    optimizer: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**OPTIONS, "train__optimizer": {**OPTIONS["train__optimizer"], **optimizer}}
    assert main(["migrate", write_yaml(**options), "-o", "new.yaml"]) == 0
    assert capsys.readouterr().err == ""
    assert next(iter(yaml.safe_load(Path("new.yaml").read_text()))) == "hp_config"
    newer = ConfigManager().parse_args(["new.yaml"], world_size=1).build()
    start = {name: value.detach().clone() for name, value in newer.model.module.state_dict().items()}
    newer.train()
    newer.close()
    older = build(**{**options, "train__checkpoint": {"save_hf_weights": False, "output_dir": "old"}})
    own = older.model.state_dict()
    assert sorted(own) == sorted(start)
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(start[name])
    older.train()
    assert all(torch.equal(value, newer.model.module.state_dict()[name]) for name, value in own.items())
    older.close()
    assert len(records("old/metrics.jsonl")) == 12
    assert records("old/metrics.jsonl") == records("new/metrics.jsonl")


@pytest.mark.parametrize("case", test_every_key.ACTS, ids=lambda case: case.key)
def test_a_key_is_taken_over_or_listed_and_never_dropped(case: Any) -> None:
    """Another value gives another file: a change to the recipe, or a line that says why there is none."""
    Path("files", "weights").mkdir(parents=True)
    with torch.device("meta"):
        model = get_spec("qwen3_5").build_model_fn(hidden_size=24)
    config = get_spec("qwen3_5").state_dict_adapter(model.config).hf_config()
    Path("files", "weights", "config.json").write_text(json.dumps(config))
    beside = test_every_key.filled(case.beside, Path("files"))
    beside.pop("poison", None)
    changes = test_every_key.filled({**case.also, **test_every_key.option(case.key, case.value)}, Path("files"))
    texts = []
    for options in (beside, {**beside, **changes}):
        try:
            texts.append(migrate(parse_args(argv=[write_yaml(**options)])).text)
        except ConfigError as error:
            texts.append(str(error))
    assert texts[0] != texts[1] or "preset_pt: prepared tensors have no dataloader there" in texts[0]


def place(**checkpoint: Any) -> tuple[Any, ...]:
    """Folder, step and source of the migrated file."""
    text = migrate(parse_args(argv=[write_yaml(train__checkpoint={"save_hf_weights": False, **checkpoint})])).text
    found = yaml.safe_load(text)["trainer"]
    options = found["checkpoint"]
    assert options.get("initial_load_model_only", True) is (options.get("initial_load_path") is None)
    assert ("load_step is taken each time" in text) == ("load_step" in options)
    return found["dump_folder"], options.get("load_step", -1), options.get("initial_load_path")


def test_the_migrated_file_goes_on_where_the_older_trainer_would() -> None:
    text = {"data__type": "json_file", "data__train_path": "text.jsonl"}
    lines = (f'{{"text": "the number {n} comes before the number {n + 1}"}}\n' for n in range(60))
    Path("text.jsonl").write_text("".join(lines))
    own = {"save_hf_weights": False, "save_steps": 2}
    train(**text, train__max_steps=4, train__checkpoint=own)
    older = records("outputs/metrics.jsonl")

    assert place() == ("outputs-2", -1, None)
    assert place(output_dir="free") == ("free", -1, None)
    assert place(load_path="outputs") == ("outputs", -1, None)
    assert place(load_path="outputs/checkpoint/step-2") == ("outputs", 2, None)
    assert place(output_dir="free", load_path="outputs") == ("free", -1, "outputs/checkpoint/step-4")
    # What is on another machine is taken as it is written.
    assert place(output_dir="far", load_path="far/checkpoint/step-7") == ("far", 7, None)
    assert place(output_dir="far", load_path="far") == ("far", -1, "far")

    options = {**text, "train__max_steps": 4, "train__checkpoint": {**own, "load_path": "outputs/checkpoint/step-2"}}
    Path("new.yaml").write_text(migrate(parse_args(argv=[write_yaml(**options)])).text)
    newer = ConfigManager().parse_args(["new.yaml"], world_size=1).build()
    assert newer.first_step == 2
    newer.train()
    newer.close()
    assert records("outputs/metrics.jsonl") == older


def test_a_migrated_run_of_random_tokens_goes_on_with_tokens_from_the_start() -> None:
    train(train__max_steps=2, train__checkpoint={"save_hf_weights": False, "save_steps": 2})
    file = write_yaml(train__max_steps=4, train__checkpoint={"save_hf_weights": False, "load_path": "outputs"})
    text = migrate(parse_args(argv=[file])).text
    assert "Random tokens are drawn from the first one again" in text
    Path("new.yaml").write_text(text)
    newer = ConfigManager().parse_args(["new.yaml"], world_size=1).build()
    assert (newer.first_step, newer.train().step) == (2, 4)
    newer.close()


def test_what_has_no_counterpart_is_listed_in_the_file_and_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write_yaml(model__freeze_modules=["embed"], train__optimizer={"loss_aggregation": "rank_average"})
    assert main(["migrate", file, "--train.wandb.project=mine"]) == 0
    out, err = capsys.readouterr()
    for path in ("model.freeze_modules", "train.optimizer.loss_aggregation", "train.wandb.project"):
        assert f"#   {path}: " in out
        assert f"not taken over: {path}: " in err
    assert yaml.safe_load(out)["hp_config"] == 1


def test_what_cannot_be_migrated_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    file = write_yaml(data__type="preset_pt", data__train_path="rows.pt")
    assert main(["migrate", file]) == 2
    assert "preset_pt" in capsys.readouterr().err
    Path("there.yaml").touch()
    assert main(["migrate", write_yaml(), "-o", "there.yaml"]) == 2
    assert "not written over" in capsys.readouterr().err
