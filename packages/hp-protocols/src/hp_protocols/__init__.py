"""Configurable, Module, ShardingConfig, ModelSpec and the platform layer of hyper-parallel."""

__version__ = "0.1.0"
