"""Token ids to vectors.

In: ids of any shape, whole numbers in [0, num_embeddings). Out: their rows, one more dimension at the end.
It is the platform's own Embedding, made configurable; the weight is [num_embeddings, embedding_dim].
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_protocols.module import Module
from hp_protocols.platform import nn

__all__ = ["Embedding"]


class Embedding(nn.Embedding, Module):
    """A configurable `nn.Embedding`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        num_embeddings: int
        embedding_dim: int

    def __init__(self, config: Config) -> None:
        super().__init__(config.num_embeddings, config.embedding_dim)
