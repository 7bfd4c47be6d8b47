"""hp migrate: what it writes is read and trained, to the bit where both start from the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_run import build, write_yaml

from hp_config import ConfigManager
from hp_trainer.cli import main

OPTIONS: dict[str, Any] = {
    "train__max_steps": 3,
    "train__optimizer": {"lr": 1e-2, "lr_warmup_ratio": 0.4, "max_grad_norm": 0.5, "betas": [0.8, 0.9]},
    "train__checkpoint": {"save_hf_weights": False, "output_dir": "new"},
}


def losses(path: str) -> list[float]:
    lines = map(json.loads, Path(path).read_text().splitlines())
    return [line["loss"] for line in lines if "event" not in line]


def test_the_migrated_file_trains_the_same_bits_from_the_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", write_yaml(**OPTIONS), "-o", "new.yaml"]) == 0
    assert capsys.readouterr().err == ""
    assert next(iter(yaml.safe_load(Path("new.yaml").read_text()))) == "hp_config"
    newer = ConfigManager().parse_args(["new.yaml"], world_size=1).build()
    start = {name: value.detach().clone() for name, value in newer.model.module.state_dict().items()}
    newer.train()
    newer.close()
    older = build(**{**OPTIONS, "train__checkpoint": {"save_hf_weights": False, "output_dir": "old"}})
    own = older.model.state_dict()
    assert sorted(own) == sorted(start)
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(start[name])
    older.train()
    older.close()
    assert losses("old/metrics.jsonl") == losses("new/metrics.jsonl")


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
