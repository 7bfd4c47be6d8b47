"""A tiny run of the older trainer, in this process and in the folder that it is called in."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import yaml

from hp_trainer import LLMTrainer, parse_args

TINY: dict[str, Any] = {
    "model": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 300,
        "config_overrides": {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    },
    "data": {"max_seq_len": 16},
    "train": {
        "max_steps": 2,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "checkpoint": {"save_hf_weights": False},
        "logging": {"log_steps": 1},
    },
}


def write_yaml(name: str = "old.yaml", **options: Any) -> str:
    """The tiny file with options by dotted path (a__b=1 for a.b); never half there, as ranks write it side by side."""
    content = copy.deepcopy(TINY)
    for path, value in options.items():
        *parents, last = path.split("__")
        node = content
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    written = Path(f"{name}.{os.getpid()}")
    written.write_text(yaml.safe_dump(content), encoding="utf-8")
    written.replace(name)
    return name


def build(*callbacks: Any, **options: Any) -> LLMTrainer:
    return LLMTrainer(parse_args(argv=[write_yaml(**options)]), callbacks)


def train(*callbacks: Any, **options: Any) -> LLMTrainer:
    """Build, train and leave the process group."""
    trainer = build(*callbacks, **options)
    trainer.result = trainer.train()  # type: ignore[attr-defined]
    trainer.close()
    return trainer
