"""Recipes of Qwen3.5 (v2, under the Module protocol). In: nothing. Out: complete `HyperTrainer.Config`s."""

from __future__ import annotations

from hp_components import (
    ChatDataLoader,
    CheckpointManager,
    CorpusTokenizer,
    CrossEntropyLoss,
    LRSchedulersContainer,
    MetricsProcessor,
    OptimizersContainer,
    TextDataLoader,
)
from hp_config import ActivationCheckpointConfig, DebugConfig, TrainingConfig
from hp_protocols import get_spec
from hp_trainer.hyper_trainer import HyperTrainer


def qwen3_5_v2_debugmodel() -> HyperTrainer.Config:
    """A model of a few million parameters on the text of this machine: about four minutes on two cores."""
    return HyperTrainer.Config(
        recipe="qwen3_5_v2.qwen3_5_v2_debugmodel",
        model_spec=get_spec("qwen3_5_v2", "debugmodel"),
        tokenizer=CorpusTokenizer.Config(vocab_size=2048),
        dataloader=TextDataLoader.Config(),
        optimizer=OptimizersContainer.Config(name="AdamW", lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=20),
        loss=CrossEntropyLoss.Config(),
        training=TrainingConfig(
            steps=400,
            seq_len=256,
            # The same 8 rows per step whether 1, 2 or 4 processes share them.
            local_batch_size=2,
            global_batch_size=8,
            mixed_precision_param="float32",
        ),
        activation_checkpoint=ActivationCheckpointConfig(mode="none"),
        checkpoint=CheckpointManager.Config(interval=100, keep_latest_k=3),
        metrics=MetricsProcessor.Config(log_freq=10),
        debug=DebugConfig(seed=42),
    )


def qwen3_5_v2_debugmodel_sft() -> HyperTrainer.Config:
    """The debug model on conversations (--dataloader.dataset_path chats.jsonl): labels on the answers only."""
    config = qwen3_5_v2_debugmodel()
    config.recipe = "qwen3_5_v2.qwen3_5_v2_debugmodel_sft"
    # Its tokenizer is trained on the conversations themselves, and so has no chat template.
    config.dataloader = ChatDataLoader.Config(template="human_assistant")
    config.optimizer.lr = 1e-3
    return config
