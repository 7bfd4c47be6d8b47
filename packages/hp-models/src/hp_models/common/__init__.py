"""Building blocks of decoder-only language models under the Module protocol.

In: configs. Out: modules that compute on any backend of `hp_protocols.platform` and name no parallelism; how
their parameters and activations are sharded is declared by `decoder_sharding`.
"""

from hp_models.common.attention import BaseAttention, GQAttention, ScaledDotProductAttention
from hp_models.common.decoder import Decoder, TransformerBlock
from hp_models.common.embedding import Embedding
from hp_models.common.feed_forward import FeedForward
from hp_models.common.gated_delta_net import GatedDeltaNet, GatedDeltaRule
from hp_models.common.linear import Linear
from hp_models.common.norm import GatedRMSNorm, Qwen3_5RMSNorm, RMSNorm
from hp_models.common.rope import RoPE

__all__ = [
    "BaseAttention",
    "Decoder",
    "Embedding",
    "FeedForward",
    "GQAttention",
    "GatedDeltaNet",
    "GatedDeltaRule",
    "GatedRMSNorm",
    "Linear",
    "Qwen3_5RMSNorm",
    "RMSNorm",
    "RoPE",
    "ScaledDotProductAttention",
    "TransformerBlock",
]
