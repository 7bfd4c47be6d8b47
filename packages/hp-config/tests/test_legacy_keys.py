"""Every key of the older trainer's table: its name, its default, its type, the hint for a slip in its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hp_config import ConfigError, HyperTrainerConfig, find_faults, parse_args

TABLE: dict[str, dict[str, Any]] = {
    "model": {
        "name": "qwen3_5", "weights_path": None, "tokenizer_path": None, "freeze_modules": None, "tp_plan": None,
        "cp_modules": None, "ep_modules": None, "num_hidden_layers": None, "hidden_size": None,
        "intermediate_size": None, "num_attention_heads": None, "num_key_value_heads": None, "vocab_size": None,
        "max_position_embeddings": None, "config_overrides": None,
    },
    "data": {
        "type": "dummy", "train_path": None, "subset": None, "max_seq_len": 2048, "text_key": "text",
        "train_size": None, "template": "empty", "image_key": "image", "messages_key": "messages",
        "image_token_id": 151655, "vl_grid_t": 2, "vl_grid_h": 2, "vl_grid_w": 2, "streaming": False,
        "num_workers": 0, "prefetch_factor": None, "pin_memory": True, "shuffle": True,
    },
    "train": {
        "max_steps": 100, "num_train_epochs": 1, "global_batch_size": 8, "micro_batch_size": 1, "seed": 42,
        "backend": "torch", "init_device": "meta", "comm_backend": None, "local_rank": 0,
    },
    "train.accelerator": {
        "dp": None, "dp_replicate": 1, "dp_shard": None, "tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": 1,
        "zero_stage": 0, "reshard_after_forward": True, "async_cp": False, "ulysses_degree": None,
        "comm_fusion": True,
    },
    "train.mixed_precision": {
        "enabled": False, "param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": None,
    },
    "train.gradient_checkpointing": {"activation_checkpoint": "off"},
    "train.optimizer": {
        "type": "adamw", "lr": 1e-4, "lr_min": 1e-5, "lr_decay_style": "cosine", "lr_warmup_ratio": 0.1,
        "loss_aggregation": "token_weighted", "weight_decay": 0.01, "max_grad_norm": 1.0, "bsz_warmup_ratio": 0.0,
        "eps": 1e-8, "betas": (0.9, 0.999),
    },
    "train.checkpoint": {
        "output_dir": "outputs", "save_steps": 500, "save_hf_weights": True, "load_path": None, "save_async": False,
    },
    "train.logging": {
        "report_to": "none", "report_global_loss": False, "log_steps": 10, "report_throughput": True,
        "model_flops_per_token": None, "peak_tflops": None,
    },
    "train.tensorboard": {"enabled": False, "output_dir": "tb_traces", "log_steps": 1},
    "train.wandb": {"enabled": False, "project": "hyper-parallel", "run_name": None, "log_steps": 1},
    "train.profile": {
        "enabled": False, "output_dir": "profiler_traces", "wait_steps": 1, "warmup_steps": 1, "active_steps": 3,
    },
    "train.memory_monitor": {"enabled": False, "log_steps": 50, "reset_peak_each_step": False},
    "train.moe_monitor": {"enabled": False, "lr": 1e-3, "num_recomputations": 1},
    "train.eval": {"eval_steps": 0, "eval_dataset": None},
    "train.debug": {
        "deterministic": False, "deterministic_warn_only": False, "check_nan_inf": False, "gc_steps": 0,
    },
}  # fmt: skip
PATHS = [f"{section}.{key}" for section, keys in TABLE.items() for key in keys]


def leaves(node: Any, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in vars(node).items():
        full = f"{path}.{name}" if path else name
        found |= leaves(value, full) if hasattr(value, "__dataclass_fields__") else {full: value}
    return found


def written(tmp_path: Path, path: str, value: Any) -> str:
    """A file that sets one key."""
    for key in reversed(path.split(".")):
        value = {key: value}
    file = tmp_path / "old.yaml"
    file.write_text(yaml.safe_dump(value), encoding="utf-8")
    return str(file)


def test_keys_and_defaults_are_those_of_the_table() -> None:
    assert leaves(HyperTrainerConfig()) == {
        f"{section}.{key}": value for section, keys in TABLE.items() for key, value in keys.items()
    }
    assert find_faults(HyperTrainerConfig(), 1) == []


@pytest.mark.parametrize("path", PATHS)
def test_a_key_refuses_another_type_by_name_and_a_slip_in_it_is_answered_with_it(tmp_path: Path, path: str) -> None:
    wrong = [[]] if path in ("model.config_overrides", "model.tp_plan") else {"a": [1]}
    with pytest.raises(ConfigError) as caught:
        parse_args(HyperTrainerConfig, [written(tmp_path, path, wrong)])
    assert re.search(rf"old\.yaml:\d+ \({re.escape(path)}\): expected ", str(caught.value))
    section, _, key = path.rpartition(".")
    slip = f"{section}.{key}x"
    with pytest.raises(ConfigError, match=rf"\({re.escape(slip)}\): no such key\n.*did you mean {key}\?"):
        parse_args(HyperTrainerConfig, [written(tmp_path, slip, 1)])
    with pytest.raises(ConfigError, match=rf"--{re.escape(slip)}: no such option\n.*did you mean --{path}\?"):
        parse_args(HyperTrainerConfig, [written(tmp_path, "model.name", "qwen3_5"), f"--{slip}=1"])


def test_what_was_built_in_python_is_checked_like_a_file() -> None:
    config = HyperTrainerConfig()
    config.train.accelerator.pp = 2
    config.train.accelerator.dp_replicate = 3
    assert [fault.where for fault in find_faults(config)] == ["train.accelerator.pp"]
    config.train.accelerator.pp = 1
    assert [fault.where for fault in find_faults(config, world_size=4)] == ["train.accelerator"]
