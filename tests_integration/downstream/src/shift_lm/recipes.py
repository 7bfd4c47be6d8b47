"""Complete runs of ShiftLM. In: nothing. Out: `HyperTrainer.Config`s, which options change."""

from __future__ import annotations

from hp_components import CorpusTokenizer, LRSchedulersContainer
from hp_config import TrainingConfig
from hp_protocols import get_spec
from hp_trainer import HyperTrainer
from shift_lm.data import CountingDataLoader
from shift_lm.optimizer import ValueClippedOptimizers


def shift_lm_small() -> HyperTrainer.Config:
    """The small model on the text of this machine."""
    return HyperTrainer.Config(
        model_spec=get_spec("shift_lm", "small"),
        tokenizer=CorpusTokenizer.Config(vocab_size=512),
        optimizer=ValueClippedOptimizers.Config(name="AdamW", lr=1e-2, clip_value=0.5),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10),
        training=TrainingConfig(steps=200, seq_len=128, local_batch_size=4, global_batch_size=8),
    )


def shift_lm_counting() -> HyperTrainer.Config:
    """The same on rows that count."""
    config = shift_lm_small()
    config.dataloader = CountingDataLoader.Config()
    return config
