"""HyperTrainer and the hp command: train language models from one CPU to clusters."""

__version__ = "0.1.0"
