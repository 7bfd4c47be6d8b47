"""Recipes of Qwen3.5 (v2, under the Module protocol): the debug model, and pretraining of every published size.

In: nothing. Out: complete `HyperTrainer.Config`s. A published size needs its tokenizer, in the folder that
--tokenizer.tokenizer_path names, and text of yours by --dataloader.dataset_path; nothing is downloaded.
"""

from __future__ import annotations

from hp_components import (
    ChatDataLoader,
    CheckpointManager,
    CorpusTokenizer,
    CrossEntropyLoss,
    HuggingFaceTokenizer,
    LRSchedulersContainer,
    MetricsProcessor,
    OptimizersContainer,
    TextDataLoader,
)
from hp_config import ActivationCheckpointConfig, DebugConfig, ParallelismConfig, TrainingConfig
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
            # The same 8 rows per step whether 1, 2, 4 or 8 processes share them.
            local_batch_size=1,
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


def qwen3_5_v2_0_8b() -> HyperTrainer.Config:
    """0.8B from scratch; every process shards, whatever their number."""
    return _pretraining("0.8B", lr=6e-4, local_batch_size=4)


def qwen3_5_v2_2b() -> HyperTrainer.Config:
    """2B from scratch; every process shards, whatever their number."""
    return _pretraining("2B", lr=4e-4, local_batch_size=4)


def qwen3_5_v2_4b() -> HyperTrainer.Config:
    """4B from scratch; every process shards, whatever their number."""
    return _pretraining("4B", lr=3e-4, local_batch_size=2)


def qwen3_5_v2_4b_tp2_fsdp4() -> HyperTrainer.Config:
    """4B on 8 processes: pairs share each matrix, four pairs shard the weights and read their own rows."""
    config = qwen3_5_v2_4b()
    config.recipe += "_tp2_fsdp4"
    config.parallelism = ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=4)
    return config


def qwen3_5_v2_9b() -> HyperTrainer.Config:
    """9B from scratch; every process shards, whatever their number."""
    return _pretraining("9B", lr=3e-4, local_batch_size=1)


def qwen3_5_v2_27b() -> HyperTrainer.Config:
    """27B from scratch; every process shards, whatever their number. Activations are computed again as a whole."""
    config = _pretraining("27B", lr=1.5e-4, local_batch_size=1)
    config.activation_checkpoint.mode = "full"
    return config


def _pretraining(flavor: str, *, lr: float, local_batch_size: int) -> HyperTrainer.Config:
    """A published size from scratch, on rows of 4,096 tokens."""
    return HyperTrainer.Config(
        recipe=f"qwen3_5_v2.qwen3_5_v2_{flavor.lower().replace('.', '_')}",
        model_spec=get_spec("qwen3_5_v2", flavor),
        tokenizer=HuggingFaceTokenizer.Config(tokenizer_path=f"assets/hf/Qwen3.5-{flavor}"),
        dataloader=TextDataLoader.Config(),
        optimizer=OptimizersContainer.Config(
            name="AdamW",
            lr=lr,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            # Of linear attention: neither the decay rates nor their offset (dt_bias) is to be pulled to 0.
            decay_keywords=("bias", "norm", "A_log"),
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=500, decay_type="cosine", min_lr_factor=0.1),
        # The logits of one row, 4,096 x 248,320, would take 4 GB in fp32, and their gradient as much again.
        loss=CrossEntropyLoss.Config(num_chunks=8),
        training=TrainingConfig(
            steps=10_000,
            seq_len=4096,
            local_batch_size=local_batch_size,
            dtype="float32",
            mixed_precision_param="bfloat16",
            mixed_precision_reduce="float32",
        ),
        activation_checkpoint=ActivationCheckpointConfig(mode="selective"),
        checkpoint=CheckpointManager.Config(interval=500, keep_latest_k=3),
        metrics=MetricsProcessor.Config(log_freq=10),
        debug=DebugConfig(seed=42),
    )
