"""ShiftLM: every layer mixes each position with the one before it.

In: token ids [B, S]. Out: logits [B, S, V]. Shape suffixes: B rows, S positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_models.common import Embedding, FeedForward, Linear, RMSNorm
from hp_models.common.param_init import normal, ones
from hp_protocols import BaseModel, Module, ModuleList
from hp_protocols.platform import F, nn, ops

if TYPE_CHECKING:
    from torch import Tensor

    from hp_protocols.trainer_sections import TrainerConfig


class ShiftMix(Module):
    """Adds to each position a share of the one before, channel by channel."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.share = nn.Parameter(ops.empty(config.dim))

    def forward(self, x_BSD: Tensor) -> Tensor:
        before_BSD = F.pad(x_BSD[:, :-1], (0, 0, 1, 0))
        return x_BSD + self.share * before_BSD


class Block(Module):
    """x + mlp(norm(mix(x)))."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        mix: ShiftMix.Config
        norm: RMSNorm.Config
        mlp: FeedForward.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.mix = config.mix.build()
        self.norm = config.norm.build()
        self.mlp = config.mlp.build()

    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + self.mlp(self.norm(self.mix(x_BSD)))


class ShiftLM(BaseModel):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        vocab_size: int
        embed: Embedding.Config
        layers: list[Block.Config]
        norm: RMSNorm.Config
        head: Linear.Config

        def update_from_config(self, *, trainer_config: TrainerConfig) -> None:
            """Nothing here depends on the run."""

        def get_nparams_and_flops(self, model: Module, seq_len: int) -> tuple[int, int]:
            weights = sum(parameter.numel() for parameter in model.parameters())
            return weights, 6 * (weights - self.vocab_size * self.embed.embedding_dim)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = config.embed.build()
        self.layers = ModuleList([layer.build() for layer in config.layers])
        self.norm = config.norm.build()
        self.head = config.head.build()

    def forward(self, ids_BS: Tensor, *, output_fn: Callable[[Module, Tensor], Tensor] | None = None) -> Tensor:
        """`output_fn` is how a loss in chunks gets at the output projection (--loss.num_chunks)."""
        x_BSD = self.embed(ids_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        x_BSD = self.norm(x_BSD)
        return self.head(x_BSD) if output_fn is None else output_fn(self.head, x_BSD)

    def segments(self) -> Sequence[Module | Sequence[Module]]:
        """What FSDP gathers together, in the order of forward."""
        return [self.embed, *self.layers, [self.norm, self.head]]


def shift_lm(*, vocab_size: int, dim: int, depth: int) -> ShiftLM.Config:
    """The config tree: sizes, and how every parameter starts."""
    start = {"weight": normal(0.05)}

    def linear(in_features: int, out_features: int) -> Linear.Config:
        return Linear.Config(in_features=in_features, out_features=out_features, param_init=start)

    def norm() -> RMSNorm.Config:
        return RMSNorm.Config(dim=dim, param_init={"weight": ones()})

    def block() -> Block.Config:
        mlp = FeedForward.Config(
            gate_proj=linear(dim, 2 * dim), up_proj=linear(dim, 2 * dim), down_proj=linear(2 * dim, dim)
        )
        return Block.Config(mix=ShiftMix.Config(dim=dim, param_init={"share": normal(0.5)}), norm=norm(), mlp=mlp)

    return ShiftLM.Config(
        vocab_size=vocab_size,
        embed=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=start),
        layers=[block() for _ in range(depth)],
        norm=norm(),
        head=linear(dim, vocab_size),
    )
