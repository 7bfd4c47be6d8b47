"""Graph Mode: a whole training step as one FX graph, partitioned and scheduled by passes."""

__version__ = "0.1.0"
