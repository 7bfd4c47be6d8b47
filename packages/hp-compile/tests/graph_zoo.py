"""Small models that between them have what goes wrong in captures: one builder per case.

In: a name. Out: a `Case`: a fresh seeded model, its train_fn, and a batch for each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Case:
    model: nn.Module
    train_fn: Callable[[nn.Module, Any, Any], torch.Tensor]
    batch: Callable[[int], tuple[Any, Any]]


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def _tokens(vocab: int, rows: int = 2, length: int = 6) -> Callable[[int], tuple[Any, Any]]:
    def batch(step: int) -> tuple[Any, Any]:
        generator = _generator(step)
        ids = torch.randint(vocab, (rows, length + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return batch


def _vectors(width: int, classes: int, rows: int = 6) -> Callable[[int], tuple[Any, Any]]:
    def batch(step: int) -> tuple[Any, Any]:
        generator = _generator(step)
        return torch.randn(rows, width, generator=generator), torch.randint(classes, (rows,), generator=generator)

    return batch


def token_loss(model: nn.Module, input: Any, label: Any) -> torch.Tensor:
    logits = model(input)
    return F.cross_entropy(logits.flatten(0, -2), label.flatten())


def class_loss(model: nn.Module, input: Any, label: Any) -> torch.Tensor:
    return F.cross_entropy(model(input), label)


def square_loss(model: nn.Module, input: Any, label: Any) -> torch.Tensor:
    return model(input).square().mean()


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        attention = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out((attention @ v).transpose(1, 2).reshape(rows, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, vocab: int = 32, width: int = 16, layers: int = 3, heads: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class NormDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3)) for _ in range(2)
        )
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)])
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.layers[0](x))
        x = F.elu(self.norm(self.layers[1](x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList([nn.LSTM(8, 8, batch_first=True), nn.LSTM(8, 8, batch_first=True)])
        self.head = nn.Linear(8, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


class SometimesUnused(nn.Module):
    """The second expert takes part where `use` is True; the third never does."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y = self.experts[0](x).relu()
        if use:
            y = y + self.experts[1](x)
        return self.head(y)


class Uneven(nn.Module):
    """Rows that no world size divides, fewer rows than ranks, an empty shard, maybe a scalar."""

    def __init__(self, scalar: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 3), nn.Linear(3, 5)])
        self.temperature = nn.Parameter(torch.tensor(0.7) if scalar else torch.tensor([0.7]))
        self.row = nn.Parameter(torch.randn(1, 5))
        self.head = nn.Linear(5, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.row
        x = self.layers[1](F.softplus(self.layers[0](x))) * self.temperature
        return self.head(x)


class Shared(nn.Module):
    """One submodule under two names, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.again = self.first
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(self.again(x))


def _half_frozen() -> nn.Module:
    model = Decoder()
    for parameter in [*model.embed.parameters(), *model.layers[0].parameters(), *model.layers[1].norm1.parameters()]:
        parameter.requires_grad_(False)
    return model


def _llama(attention: str = "eager") -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation=attention,
            use_cache=False,
        )
    )


def _qwen(attention: str = "eager") -> nn.Module:
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        attn_implementation=attention,
        use_cache=False,
    )
    return Qwen3_5ForCausalLM(config)


def logits_loss(model: nn.Module, input: Any, label: Any) -> torch.Tensor:
    return F.cross_entropy(model(input_ids=input).logits.flatten(0, 1).float(), label.flatten())


def _images(step: int) -> tuple[Any, Any]:
    generator = _generator(step)
    return torch.randn(4, 3, 6, 6, generator=generator), torch.randint(5, (4,), generator=generator)


def _sometimes(step: int) -> tuple[Any, Any]:
    input, label = _vectors(8, 5)(step)
    return {"x": input, "use": step % 2 == 0}, label


def _sometimes_loss(model: nn.Module, input: Any, label: Any) -> torch.Tensor:
    return F.cross_entropy(model(input["x"], input["use"]), label)


_BUILDERS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "decoder": lambda: (Decoder(), token_loss, _tokens(32)),
    "norm_dropout": lambda: (NormDropout(), class_loss, _vectors(12, 5)),
    "convolution": lambda: (Convolution(), class_loss, _images),
    "recurrent": lambda: (Recurrent(), token_loss, _tokens(32)),
    "tied": lambda: (Decoder(tied=True), token_loss, _tokens(32)),
    "half_frozen": lambda: (_half_frozen(), token_loss, _tokens(32)),
    "sometimes_unused": lambda: (SometimesUnused(), _sometimes_loss, _sometimes),
    "uneven": lambda: (Uneven(), token_loss, _tokens(11)),
    "uneven_rows": lambda: (Uneven(scalar=False), token_loss, _tokens(11)),
    "shared": lambda: (Shared(), class_loss, _vectors(8, 5)),
    "bfloat16": lambda: (Decoder().bfloat16(), token_loss, _tokens(32)),
    "llama": lambda: (_llama(), logits_loss, _tokens(64)),
    "qwen3_5": lambda: (_qwen(), logits_loss, _tokens(64, length=20)),
    "llama_sdpa": lambda: (_llama("sdpa"), logits_loss, _tokens(64)),
    "qwen3_5_sdpa": lambda: (_qwen("sdpa"), logits_loss, _tokens(64, length=20)),
}

OWN = ["decoder", "norm_dropout", "convolution", "recurrent", "tied", "half_frozen", "sometimes_unused", "uneven"]
OWN += ["shared", "bfloat16"]
TRANSFORMERS = ["llama", "qwen3_5"]


def build(name: str, seed: int = 0) -> Case:
    torch.manual_seed(seed)
    return Case(*_BUILDERS[name]())
