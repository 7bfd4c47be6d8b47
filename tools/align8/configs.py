"""The same training run in the words of both trainers.

In: a `Run`, and the folder of the material that all runs share. Out: the older YAML's content, or a
`HyperTrainer.Config`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from align8.material import CORPUS, INITIAL
from align8.matrix import MODEL, Run
from hp_components import (
    CheckpointManager,
    HuggingFaceTokenizer,
    LRSchedulersContainer,
    MetricsProcessor,
    OptimizersContainer,
    TextDataLoader,
)
from hp_config import ActivationCheckpointConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from hp_models.qwen3_5_v2 import Qwen3_5Model
from hp_protocols import get_spec
from hp_trainer import HyperTrainer

__all__ = ["hyper_config", "legacy_content"]


def micro_batch(run: Run) -> int:
    """Rows of one rank's micro-batch."""
    rows, left = divmod(run.settings.rows_per_step, run.layout.data_ranks * run.settings.micro_batches)
    if left:
        raise ValueError(f"{run.name}: {run.settings.rows_per_step} rows cannot be shared by its ranks")
    return rows


def legacy_content(run: Run, material: Path, output: Path) -> dict[str, Any]:
    """The three sections."""
    settings, layout = run.settings, run.layout
    return {
        "model": {"name": MODEL, "weights_path": str(material / INITIAL)},
        "data": {
            "type": "json_file",
            "train_path": str(material / CORPUS),
            "max_seq_len": settings.seq_len,
        },
        "train": {
            "max_steps": settings.steps,
            "global_batch_size": settings.rows_per_step,
            "micro_batch_size": micro_batch(run),
            "seed": settings.seed,
            "accelerator": {
                "dp_replicate": layout.replicate,
                "dp_shard": layout.shard,
                "tp": layout.tensor,
                "cp": layout.context,
            },
            "mixed_precision": {"enabled": settings.mixed_precision},
            "gradient_checkpointing": {"activation_checkpoint": "full" if settings.recompute else "off"},
            "optimizer": {
                "lr": settings.lr,
                "lr_min": settings.lr_min,
                "lr_decay_style": settings.decay,
                "lr_warmup_ratio": settings.warmup_ratio,
                "weight_decay": settings.weight_decay,
                "max_grad_norm": settings.max_norm,
                "eps": settings.eps,
                "betas": list(settings.betas),
                "loss_aggregation": "token_weighted",
            },
            "checkpoint": {
                "output_dir": str(output),
                "save_steps": settings.steps,
                "save_hf_weights": False,
            },
            "logging": {"log_steps": 1},
        },
    }


def hyper_config(run: Run, material: Path, output: Path) -> HyperTrainer.Config:
    """The configuration of `hp train`."""
    settings, layout = run.settings, run.layout
    spec = get_spec("qwen3_5_v2")
    spec.model = Qwen3_5Model.Config.from_hf_config(material / INITIAL)
    decays = settings.decay != "constant"
    return HyperTrainer.Config(
        model_spec=spec,
        dump_folder=str(output),
        tokenizer=HuggingFaceTokenizer.Config(tokenizer_path=str(material / INITIAL)),
        dataloader=TextDataLoader.Config(dataset_path=str(material / CORPUS)),
        optimizer=OptimizersContainer.Config(
            name="AdamW",
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        ),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=math.ceil(settings.steps * settings.warmup_ratio),
            decay_type=settings.decay,  # type: ignore[arg-type]
            lr_min=settings.lr_min if decays else None,
        ),
        training=TrainingConfig(
            steps=settings.steps,
            seq_len=settings.seq_len,
            local_batch_size=micro_batch(run),
            global_batch_size=settings.rows_per_step,
            max_norm=settings.max_norm,
            mixed_precision_param="bfloat16" if settings.mixed_precision else "float32",
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=layout.replicate,
            data_parallel_shard_degree=layout.shard,
            tensor_parallel_degree=layout.tensor,
            enable_sequence_parallel=layout.sequence_parallel,
            context_parallel_degree=layout.context,
        ),
        activation_checkpoint=ActivationCheckpointConfig(mode="full" if settings.recompute else "none"),
        compile=CompileConfig(mode="graph" if run.path == "graph" else "none"),
        checkpoint=CheckpointManager.Config(
            interval=settings.steps,
            initial_load_path=str(material / INITIAL),
            initial_load_in_hf=True,
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        debug=DebugConfig(seed=settings.seed),
    )
