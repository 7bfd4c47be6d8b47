"""The older trainer: `LLMTrainer(parse_args(HyperTrainerConfig, argv)).train()`, with callbacks.

In: the YAML of three sections (model, data, train). Out: a run folder as HyperTrainer leaves it. The numerics are
HyperTrainer's own helpers; what is here is the older way in.
"""

from __future__ import annotations

from hp_trainer._legacy.callbacks.base import Callback
from hp_trainer._legacy.llm_trainer import LLMTrainer

__all__ = ["Callback", "LLMTrainer"]
