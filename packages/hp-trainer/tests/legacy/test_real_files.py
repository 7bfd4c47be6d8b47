"""Files as they are in use: read as they stand, trained small by overrides, refused by name where nothing could act."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hp_config import HyperTrainerConfig
from hp_protocols.errors import ConfigError
from hp_trainer import LLMTrainer, parse_args
from hp_trainer.cli import main

FILES = Path(__file__).parent / "files"
SMALL = [
    *("--model.num_hidden_layers=2", "--model.hidden_size=32", "--model.intermediate_size=48"),
    *("--model.vocab_size=400", "--model.config_overrides.head_dim=16", "--data.train_path=text.jsonl"),
    *("--data.max_seq_len", "32", "--data.num_workers", "1", "--train.global_batch_size=4", "--train.max_steps=3"),
    *("--train.accelerator.dp_replicate=1", "--train.accelerator.dp_shard=-1", "--train.accelerator.tp=1"),
    *("--train.checkpoint.output_dir=run", "--train.tensorboard.output_dir=tb", "--train.logging.log_steps=1"),
]
REFUSED = {
    "experts": [
        *("model.ep_modules", "train.accelerator.ep", "train.accelerator.etp", "train.accelerator.comm_fusion"),
        "train.moe_monitor.enabled",
    ],
    "vision": [
        *("data.type", "data.image_key", "data.image_token_id", "data.vl_grid_t", "data.vl_grid_h", "data.vl_grid_w"),
        *("data.streaming", "train.accelerator.pp", "train.accelerator.async_cp", "train.accelerator.ulysses_degree"),
        "train.optimizer.bsz_warmup_ratio",
    ],
}


def test_a_dense_file_is_read_as_it_stands_and_trains_small_with_overrides() -> None:
    args = parse_args(HyperTrainerConfig, [str(FILES / "dense.yaml")])
    assert (args.train.optimizer.lr, args.train.optimizer.weight_decay, args.train.max_steps) == (3e-4, 0.1, 20_000)
    assert args.model.config_overrides == {"rope_theta": 1e7, "head_dim": 256, "tie_word_embeddings": True}
    assert (args.model.weights_path, args.data.pin_memory, args.train.profile.enabled) == (None, True, False)

    lines = [{"content": f"the number {n} comes before the number {n + 1}"} for n in range(60)]
    Path("text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trainer = LLMTrainer(parse_args(HyperTrainerConfig, [str(FILES / "dense.yaml"), *SMALL]))
    result = trainer.train()
    trainer.close()
    assert (result.step, result.reason) == (3, "finished")
    assert Path("run/checkpoint/step-3-hf/config.json").is_file()
    assert list(Path("tb").glob("events.*"))


@pytest.mark.parametrize("name", ["experts", "vision"])
def test_what_is_not_supported_is_refused_by_name_all_at_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = FILES / f"{name}.yaml"
    with pytest.raises(ConfigError) as caught:
        parse_args(HyperTrainerConfig, [str(file)])
    named = [fault.where.rpartition("(")[2].rstrip(")") for fault in caught.value.faults]
    assert sorted(named) == sorted(REFUSED[name])
    assert all(f"{file}:" in fault.where for fault in caught.value.faults)
    assert main(["train", str(file)]) == 2
    assert main(["migrate", str(file)]) == 2
    assert f"{len(REFUSED[name])} mistakes; nothing was run" in capsys.readouterr().err


def test_without_what_is_refused_the_rest_of_such_a_file_trains() -> None:
    content = yaml.safe_load((FILES / "experts.yaml").read_text())
    for path in REFUSED["experts"]:
        *sections, key = path.split(".")
        node = content
        for section in sections:
            node = node[section]
        del node[key]
    Path("rest.yaml").write_text(yaml.safe_dump(content))
    assert main(["train", "rest.yaml", "--train.max_steps=1", "--train.micro_batch_size=4"]) == 0
