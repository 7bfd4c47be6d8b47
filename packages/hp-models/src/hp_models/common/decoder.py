"""A decoder-only language model: embedding, blocks of attention and feed-forward, final norm, output projection.

In: token ids [B, S], optionally positions, a padding mask, document boundaries. Out: logits [B, S, V].
Attribute names are those of Hugging Face checkpoints, so that converting a state dict is a change of prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_models.common.attention import BaseAttention
from hp_models.common.attention_mask import (
    check_cu_seqlens,
    document_starts,
    make_attention_mask,
    make_causal_mask,
    make_position_ids,
    split_positions,
    starts_of_positions,
)
from hp_models.common.embedding import Embedding
from hp_models.common.feed_forward import FeedForward
from hp_models.common.gated_delta_net import GatedDeltaNet
from hp_models.common.linear import Linear
from hp_models.common.rope import RoPE
from hp_protocols.errors import ConfigError, Fault
from hp_protocols.model import BaseModel
from hp_protocols.module import Module, ModuleList
from hp_protocols.platform import nn

if TYPE_CHECKING:
    from torch import Tensor

    from hp_protocols.trainer_sections import TrainerConfig

__all__ = ["Decoder", "TransformerBlock"]


class TransformerBlock(Module):
    """One pre-norm layer: x + mixer(norm(x)), then x + mlp(norm(x)). The mixer is attention or linear attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        input_layernorm: Module.Config
        self_attn: BaseAttention.Config | None = None
        linear_attn: GatedDeltaNet.Config | None = None
        """Exactly one of the two is given."""
        post_attention_layernorm: Module.Config
        mlp: FeedForward.Config

        @property
        def mixer(self) -> BaseAttention.Config | GatedDeltaNet.Config:
            """The one of `self_attn` and `linear_attn` that is given."""
            if self.self_attn is not None and self.linear_attn is None:
                return self.self_attn
            if self.linear_attn is not None and self.self_attn is None:
                return self.linear_attn
            raise ValueError("a TransformerBlock needs exactly one of self_attn and linear_attn")

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = config.input_layernorm.build()
        mixer = config.mixer.build()
        # Under the name that checkpoints use; the other is not there.
        self.self_attn = mixer if config.self_attn is not None else None
        self.linear_attn = mixer if config.linear_attn is not None else None
        self.post_attention_layernorm = config.post_attention_layernorm.build()
        self.mlp = config.mlp.build()

    def forward(
        self,
        x_BSD: Tensor,
        cos_BSR: Tensor,
        sin_BSR: Tensor,
        mask_B1SS: Tensor | None = None,
        padding_BS: Tensor | None = None,
        age_BS: Tensor | None = None,
    ) -> Tensor:
        """[B, S, D]. Angles and mask are for attention; padding and ages of tokens say the same to linear attention."""
        mixed_BSD = self.input_layernorm(x_BSD)
        if self.self_attn is not None:
            mixed_BSD = self.self_attn(mixed_BSD, cos_BSR, sin_BSR, mask_B1SS)
        elif self.linear_attn is not None:
            mixed_BSD = self.linear_attn(mixed_BSD, padding_BS, age_BS)
        x_BSD = x_BSD + mixed_BSD
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Decoder(BaseModel):
    """The model; what is in each layer is said by `Config.layers`, one config per layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        vocab_size: int
        hidden_size: int
        max_position_embeddings: int
        """The longest row that the model may be trained on."""
        embed_tokens: Embedding.Config
        rotary_emb: RoPE.Config
        layers: list[TransformerBlock.Config]
        norm: Module.Config
        lm_head: Linear.Config
        tie_word_embeddings: bool = False
        """The output projection is the embedding matrix: one parameter under two names."""
        seq_len: int | None = None
        """Tokens per row in training, filled by `update_from_config`; what FLOPs are counted for."""
        explicit_mask: bool = False
        """Build the causal mask also where kernels could do without one, for a layout in which a rank holds only some
        of the queries; filled by `update_from_config`."""

        def update_from_config(self, *, trainer_config: TrainerConfig) -> None:
            """Check the run against the model and take over its sequence length.

            Raises:
                ConfigError: rows longer than the model allows, or heads that tensor parallelism cannot share.
            """
            if faults := self.run_faults(trainer_config=trainer_config):
                raise ConfigError(faults)
            self.seq_len = trainer_config.training.seq_len
            self.explicit_mask = trainer_config.parallelism.context_parallel_degree > 1

        def run_faults(self, *, trainer_config: TrainerConfig) -> list[Fault]:
            """Rows longer than the model allows; heads, or rows, that ranks cannot share."""
            return decoder_faults(self, trainer_config)

        def get_nparams_and_flops(self, model: Module, seq_len: int | None = None) -> tuple[int, int]:
            """Parameters of the model, and floating-point operations per trained token (see `training_flops`)."""
            length = self.seq_len if seq_len is None else seq_len
            if length is None:
                raise ValueError("seq_len is not known yet: pass it, or call update_from_config first")
            # A tied parameter is listed once by parameters(), and still multiplied once, by lm_head.
            nparams = sum(parameter.numel() for parameter in model.parameters())
            return nparams, training_flops(self, model, length)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = config.embed_tokens.build()
        self.rotary_emb = config.rotary_emb.build()
        self.layers = ModuleList([layer.build() for layer in config.layers])
        self.norm = config.norm.build()
        self.lm_head = config.lm_head.build()
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        output_fn: Callable[[Module, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Logits [B, S, V] for token ids [B, S].

        Args:
            position_ids: [B, S], or [3, B, S] (time, height, width) where the model has an mrope_section, or
                [4, B, S] with the place in the text as a first row, which turns nothing. Default: counting from 0 in
                every row, and in every document where `cu_seqlens` is given. Where neither `cu_seqlens` nor
                `attention_mask` is given, text positions that do not go on by one start a document.
            attention_mask: [B, S], nonzero for tokens and zero for padding, on either side. Logits at padding
                mean nothing.
            cu_seqlens: boundaries of packed documents in the B·S tokens, row after row, as host-side ints
                (0, …, B·S); no token attends across one.
            output_fn: called with the output projection and the normed hidden states [B, S, D] in place of the
                projection; its result is returned. A loss that never builds all logits at once comes in here.

        Raises:
            ValueError: a shape or boundary that is not as said here.
        """
        check_shapes(input_ids, position_ids, attention_mask)
        batch, seq_len = input_ids.shape
        text_BS, position_ids = split_positions(position_ids)
        starts_BS = None
        if cu_seqlens is not None:
            bounds = check_cu_seqlens(cu_seqlens, batch, seq_len)
            starts_BS = document_starts(bounds, batch, seq_len, input_ids.device)
        elif text_BS is not None and attention_mask is None:
            starts_BS = starts_of_positions(text_BS)
        age_BS = None if starts_BS is None else make_position_ids(starts_BS, batch, seq_len, input_ids.device)
        if position_ids is None:
            position_ids = make_position_ids(starts_BS, batch, seq_len, input_ids.device)
        mask_B1SS = make_attention_mask(attention_mask, starts_BS)
        if mask_B1SS is None and self.config.explicit_mask:
            mask_B1SS = make_causal_mask(seq_len, input_ids.device)

        x_BSD = self.embed_tokens(input_ids)
        cos_BSR, sin_BSR = self.rotary_emb(position_ids, dtype=x_BSD.dtype)
        for layer in self.layers:
            x_BSD = layer(x_BSD, cos_BSR, sin_BSR, mask_B1SS, attention_mask, age_BS)
        x_BSD = self.norm(x_BSD)
        return self.lm_head(x_BSD) if output_fn is None else output_fn(self.lm_head, x_BSD)

    def segments(self) -> Sequence[nn.Module | Sequence[nn.Module]]:
        """The embedding, each layer, the norm with the output projection; a tied matrix has both its ends in one."""
        if self.config.tie_word_embeddings:
            return [[self.embed_tokens, self.norm, self.lm_head], *self.layers]
        return [self.embed_tokens, *self.layers, [self.norm, self.lm_head]]


def check_shapes(input_ids: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None) -> None:
    """Refuse what would broadcast into something that was not meant."""
    expected = tuple(input_ids.shape)
    if len(expected) != 2:
        raise ValueError(f"input_ids of shape {expected}: allowed is [batch, sequence]")
    if attention_mask is not None and tuple(attention_mask.shape) != expected:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)}: allowed is the padding mask {expected} "
            "(nonzero for tokens); packed documents are given by cu_seqlens"
        )
    if position_ids is not None and tuple(position_ids.shape) not in (expected, (3, *expected), (4, *expected)):
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)}: allowed are {expected}, {(3, *expected)} "
            f"(time, height, width) and {(4, *expected)} (text, time, height, width)"
        )


def decoder_faults(config: Decoder.Config, trainer_config: TrainerConfig) -> list[Fault]:
    """What of a run does not fit the model, each named by the flag that says it."""
    faults = []
    seq_len = trainer_config.training.seq_len
    if seq_len > config.max_position_embeddings:
        faults.append(
            Fault(
                "training.seq_len",
                f"{seq_len} is longer than the model's positions",
                allowed=f"at most {config.max_position_embeddings}",
            )
        )
    parallelism = trainer_config.parallelism
    tp = parallelism.tensor_parallel_degree
    if tp > 1:
        unfit = sorted({count for layer in config.layers for count in layer.mixer.heads_unfit_for(tp)})
        if unfit:
            faults.append(
                Fault(
                    "parallelism.tensor_parallel_degree",
                    f"{tp} ranks cannot share {' or '.join(map(str, unfit))} attention heads evenly",
                    allowed=", ".join(map(str, tensor_parallel_degrees(config))),
                )
            )
    ranks = parallelism.context_parallel_degree * (tp if parallelism.enable_sequence_parallel else 1)
    if seq_len % ranks:
        faults.append(
            Fault(
                "training.seq_len",
                f"{seq_len} tokens cannot be shared by {ranks} ranks (sequence and context parallelism)",
                allowed=f"a multiple of {ranks}",
            )
        )
    return faults


def tensor_parallel_degrees(config: Decoder.Config) -> list[int]:
    """The degrees of tensor parallelism at which every layer's heads can be shared."""
    mixers = [layer.mixer for layer in config.layers]
    most = max(count for mixer in mixers for count in mixer.head_counts())
    return [ranks for ranks in range(1, most + 1) if not any(mixer.heads_unfit_for(ranks) for mixer in mixers)]


def training_flops(config: Decoder.Config, model: Module, seq_len: int) -> int:
    """Floating-point operations of forward and backward per token, rows of `seq_len` tokens.

    6 per weight of a matrix multiplication (2 forward, 4 backward); the embedding look-up multiplies nothing, a
    tied output projection does. On top of that comes what each layer's attention says of itself. Norms, activations
    and recomputation are not counted.
    """
    multiplied = sum(module.weight.numel() for module in model.modules() if isinstance(module, Linear))
    return 6 * multiplied + sum(layer.mixer.core_flops(seq_len) for layer in config.layers)
