"""Optimizer, schedule, loss, tokenizer, data, checkpoint and metrics components of hyper-parallel."""

__version__ = "0.1.0"
