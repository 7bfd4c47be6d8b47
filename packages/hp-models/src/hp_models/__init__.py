"""Qwen3.5 and its building blocks under the hyper-parallel Module protocol."""

__version__ = "0.1.0"
