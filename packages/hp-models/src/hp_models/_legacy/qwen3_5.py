"""Dense Qwen3.5 as one bare file, the reference that `qwen3_5_v2` is aligned with.

In: token ids [B, S]. Out: logits [B, S, V]. Parameter names, and the order of operations, are those of the v2 model,
with q, k and v of linear attention as separate parameters; the code is its own.

The layer kinds: gated softmax attention (q_proj holds per head its query, then its gate; query and key are normed over
the head and turned by RoPE in their first channels), and Gated DeltaNet (arXiv 2412.06464) in chunks of 64 tokens.
Norms scale by 1 + weight. S below is the sequence, T the tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from hp_protocols.platform import F, init, nn, ops

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Qwen3_5", "Qwen3_5Config"]

CHUNK = 64


@dataclass(kw_only=True)
class Qwen3_5Config:
    """Names as in a checkpoint's config.json; defaults are the debug model's."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 640
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    layer_types: tuple[str, ...] | None = None
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.25
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.05
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096

    def kinds(self) -> tuple[str, ...]:
        """`full_attention` or `linear_attention` of each layer."""
        if self.layer_types is not None:
            return tuple(self.layer_types)
        every = self.full_attention_interval
        return tuple(
            "full_attention" if (index + 1) % every == 0 else "linear_attention"
            for index in range(self.num_hidden_layers)
        )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """What can be set."""
        return tuple(field.name for field in fields(cls))


class OnePlusNorm(nn.Module):
    """x / rms(x) · (1 + weight), all in fp32 or wider, rounded once."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(ops.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (unit_rms(x, self.eps) * (1.0 + self.weight.to(at_least_fp32(x)))).to(x.dtype)


class GateNorm(nn.Module):
    """weight · x / rms(x) in the input's type, then · silu(gate) in fp32 or wider."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(ops.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        scaled = self.weight * unit_rms(x, self.eps).to(x.dtype)
        return (scaled * F.silu(gate.to(at_least_fp32(x)))).to(x.dtype)


def at_least_fp32(x: Tensor) -> Any:
    return ops.promote_types(x.dtype, ops.float32)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    x = x.to(at_least_fp32(x))
    return x * ops.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Attention(nn.Module):
    """Gated softmax attention with grouped key/value heads."""

    def __init__(self, c: Qwen3_5Config) -> None:
        super().__init__()
        self.width = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim * 2, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = OnePlusNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = OnePlusNorm(c.head_dim, c.rms_norm_eps)
        self.core = AttentionCore()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        q, gate = self.q_proj(x).view(batch, length, -1, 2 * self.width).chunk(2, dim=-1)
        k = self.k_proj(x).view(batch, length, -1, self.width)
        v = self.v_proj(x).view(batch, length, -1, self.width)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        out = self.core(q, k, v, mask) * ops.sigmoid(gate)
        return self.o_proj(out.reshape(batch, length, -1))


class AttentionCore(nn.Module):
    """softmax(q kᵀ / √E) v for q, k, v [B, S, heads, E]; what context parallelism splits."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=q.shape[-1] ** -0.5,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2).contiguous()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first channels of each head; channel j goes with j + R/2, the others pass."""
    turned, rest = x.tensor_split((cos.shape[-1],), dim=-1)
    left, right = turned.chunk(2, dim=-1)
    turned = turned * cos[:, :, None] + ops.cat((-right, left), dim=-1) * sin[:, :, None]
    return ops.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class DeltaNet(nn.Module):
    """Gated DeltaNet; the kernels of the convolutions are [channels, 1, taps], as checkpoints have them."""

    def __init__(self, c: Qwen3_5Config) -> None:
        super().__init__()
        self.value_width = c.linear_value_head_dim
        keys = c.linear_num_key_heads * c.linear_key_head_dim
        values = c.linear_num_value_heads * c.linear_value_head_dim
        heads, taps = c.linear_num_value_heads, c.linear_conv_kernel_dim
        self.in_proj_q = nn.Linear(c.hidden_size, keys, bias=False)
        self.in_proj_k = nn.Linear(c.hidden_size, keys, bias=False)
        self.in_proj_v = nn.Linear(c.hidden_size, values, bias=False)
        self.in_proj_z = nn.Linear(c.hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(c.hidden_size, heads, bias=False)
        self.in_proj_a = nn.Linear(c.hidden_size, heads, bias=False)
        self.conv_q = nn.Parameter(ops.empty(keys, 1, taps))
        self.conv_k = nn.Parameter(ops.empty(keys, 1, taps))
        self.conv_v = nn.Parameter(ops.empty(values, 1, taps))
        self.A_log = nn.Parameter(ops.empty(heads))
        self.dt_bias = nn.Parameter(ops.empty(heads))
        self.core = DeltaCore(c.linear_key_head_dim, c.linear_value_head_dim)
        self.norm = GateNorm(c.linear_value_head_dim, c.rms_norm_eps)
        self.out_proj = nn.Linear(values, c.hidden_size, bias=False)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        if padding is not None:
            x = x * padding[..., None].to(x.dtype)
        q, k, v = self.in_proj_q(x), self.in_proj_k(x), self.in_proj_v(x)
        a, b = self.in_proj_a(x), self.in_proj_b(x)
        out = self.core(q, k, v, a, b, self.conv_q, self.conv_k, self.conv_v, self.A_log, self.dt_bias)
        gate = self.in_proj_z(x).unflatten(-1, (-1, self.value_width))
        return self.out_proj(self.norm(out, gate).flatten(2))


class DeltaCore(nn.Module):
    """Everything along the sequence: convolutions, decay, and the rule itself; what context parallelism splits."""

    def __init__(self, key_width: int, value_width: int) -> None:
        super().__init__()
        self.key_width, self.value_width = key_width, value_width

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, cq: Tensor, ck: Tensor, cv: Tensor,
        a_log: Tensor, dt_bias: Tensor,
    ) -> Tensor:  # fmt: skip
        wide = at_least_fp32(a)
        rows = a.shape[:2]
        # Rows and tokens as one dim: the strides of softplus's gradient then never stop a traced graph.
        pace = F.softplus((a.to(wide) + dt_bias).flatten(0, 1)).unflatten(0, rows)
        decay = -a_log.to(wide).exp() * pace
        q = self.convolve(q, cq).unflatten(-1, (-1, self.key_width))
        k = self.convolve(k, ck).unflatten(-1, (-1, self.key_width))
        v = self.convolve(v, cv).unflatten(-1, (-1, self.value_width))
        return self.scan(Chunks.make(q, k, v, decay, ops.sigmoid(b))).to(v.dtype)

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        """silu of the causal depthwise convolution."""
        return F.silu(ShortConvolution.apply(x, kernel, self.tokens_before(x, kernel.shape[-1] - 1)))

    def tokens_before(self, x: Tensor, count: int) -> Tensor | None:
        """What the convolution sees before the first token [B, count, C]; None: zeros."""
        return None

    def scan(self, chunks: Chunks) -> Tensor:
        """Out [B, S, heads, V], from a state of zeros."""
        return run_chunks(chunks, None)[0]


class ShortConvolution(ops.autograd.Function):
    """x [B, S, C], kernel [C, 1, taps], before [B, taps - 1, C] or None for zeros → [B, S, C]:
    Σ kernel[tap] · x[s - back], oldest tap first, in fp32 or wider."""

    @staticmethod
    def forward(x: Tensor, kernel: Tensor, before: Tensor | None) -> Tensor:
        weights = ShortConvolution.weights(x, kernel)
        early = ShortConvolution.with_earlier(x, before, weights)
        total = early[:, : x.shape[1]] * weights[0]
        for tap, weight in enumerate(weights[1:], start=1):
            total = ops.addcmul(total, early[:, tap : tap + x.shape[1]], weight)
        return total.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel, before = ctx.saved_tensors
        weights, behind, length = ShortConvolution.weights(x, kernel), kernel.shape[-1] - 1, x.shape[1]
        grad = grad.to(weights[0].dtype)
        early = ShortConvolution.with_earlier(x, before, weights)
        to_kernel = [(grad * early[:, tap : tap + length]).sum((0, 1)) for tap in range(behind + 1)]
        # Tokens before the first one that are not zeros have a gradient, too.
        earlier = 0 if before is None else behind
        late, reached = F.pad(grad, (0, 0, earlier, behind)), earlier + length
        to_x = late[:, :reached] * weights[behind]
        for back in range(1, behind + 1):
            to_x = ops.addcmul(to_x, late[:, back : back + reached], weights[behind - back])
        to_before = None if before is None else to_x[:, :earlier].to(before.dtype)
        return to_x[:, earlier:].to(x.dtype), ops.stack(to_kernel, dim=1).unsqueeze(1).to(kernel.dtype), to_before

    @staticmethod
    def weights(x: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:
        """The weight of each tap for all channels, oldest first."""
        return kernel[:, 0].t().to(at_least_fp32(x)).contiguous().unbind(0)

    @staticmethod
    def with_earlier(x: Tensor, before: Tensor | None, weights: tuple[Tensor, ...]) -> Tensor:
        """[B, taps - 1 + S, C]."""
        wide = x.to(weights[0].dtype)
        if before is None:
            return F.pad(wide, (0, 0, len(weights) - 1, 0))
        return ops.cat((before.to(wide.dtype), wide), dim=1)


class Unit(ops.autograd.Function):
    """scale · x / |x| over the last dim, with 1e-6 added to |x|²; keeps the result instead of x."""

    @staticmethod
    def forward(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        inverse = ops.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
        y = x * inverse
        return (y * scale if scale != 1.0 else y), inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.scale = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        y, inverse = ctx.saved_tensors
        radial = (grad * y).sum(-1, keepdim=True) * (-1.0 / ctx.scale**2)
        return ops.addcmul(grad, y, radial) * (inverse * ctx.scale), None


@dataclass(frozen=True)
class Chunks:
    """The rule within each chunk, as matrices that meet the running state M once: [chunks, B · value heads, …].

    From state M: u = gain − read M, out = ask M + mix u, next M = keep M + writeᵀ u.
    """

    gain: Tensor
    read: Tensor
    ask: Tensor
    mix: Tensor
    write: Tensor
    keep: Tensor
    rows: int
    length: int

    @classmethod
    def make(cls, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Chunks:
        rows, length, groups, key_width = q.shape
        heads, value_width = v.shape[2:]
        count = (length + CHUNK - 1) // CHUNK
        q, k, v, decay, beta = (to_chunks(t.to(at_least_fp32(v)), count) for t in (q, k, v, decay, beta))
        q, k = Unit.apply(q, key_width**-0.5)[0], Unit.apply(k, 1.0)[0]
        shared = (count, rows, groups, heads // groups, CHUNK)  # each key head serves consecutive value heads
        beta = beta.reshape(*shared, 1)
        log = decay.reshape(shared).cumsum(-1)

        place = ops.arange(CHUNK, device=v.device)
        future = place[:, None] < place[None, :]
        fade = (log[..., :, None] - log[..., None, :]).masked_fill(future, float("-inf")).exp()
        # The difference before either exponential: the parts of log's gradient are added up in this order.
        until_end = log[..., -1:] - log
        since_start, until_end = log.exp(), until_end.exp()
        k_t, k_beta = k.transpose(-1, -2), k[:, :, :, None] * beta
        coupling = (k_beta.flatten(3, 4) @ k_t).unflatten(3, shared[3:]) * fade

        def solve(right: Tensor, width: int) -> Tensor:
            solved = ops.linalg.solve_triangular(coupling, right, upper=False, unitriangular=True)
            return solved.reshape(count, rows * heads, CHUNK, width)

        flat = (count, rows * heads, CHUNK)
        return cls(
            gain=solve(v.reshape(*shared, value_width) * beta, value_width),
            read=solve(k_beta * since_start[..., None], key_width),
            ask=(q[:, :, :, None] * since_start[..., None]).reshape(*flat, key_width),
            mix=((q @ k_t)[:, :, :, None] * fade).reshape(*flat, CHUNK),
            write=(k[:, :, :, None] * until_end[..., None]).reshape(*flat, key_width),
            keep=since_start[..., -1].reshape(count, rows * heads, 1, 1),
            rows=rows,
            length=length,
        )


def to_chunks(x: Tensor, count: int) -> Tensor:
    """[B, S, heads, …] → [chunks, B, heads, T, …], filled up with zeros, which do nothing to the state."""
    if short := CHUNK * count - x.shape[1]:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, short))
    x = x.unflatten(1, (count, CHUNK))
    return x.permute(1, 0, 3, 2, *range(4, x.dim())).contiguous()


def run_chunks(chunks: Chunks, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Out [B, S, heads, V] and the state [B · heads, E, V] after the last token."""
    count, total, size, value_width = chunks.gain.shape
    if state is None:
        state = chunks.gain.new_zeros(total, chunks.write.shape[-1], value_width)
    outs = []
    parts = (chunks.gain, chunks.read, chunks.ask, chunks.mix, chunks.write, chunks.keep)
    for gain, read, ask, mix, write, keep in zip(*(part.unbind(0) for part in parts), strict=True):
        u = ops.baddbmm(gain, read, state, alpha=-1.0)
        outs.append(ops.baddbmm(ops.bmm(ask, state), mix, u))
        state = ops.baddbmm(state * keep, write.transpose(1, 2), u)
    out = ops.stack(outs).reshape(count, chunks.rows, -1, size, value_width)
    return out.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : chunks.length], state


class Layer(nn.Module):
    def __init__(self, c: Qwen3_5Config, kind: str) -> None:
        super().__init__()
        # The order of parameters is the v2 model's: the norm of all gradients is a sum in this order.
        self.input_layernorm = OnePlusNorm(c.hidden_size, c.rms_norm_eps)
        if kind == "full_attention":
            self.self_attn = Attention(c)
        else:
            self.linear_attn = DeltaNet(c)
        self.post_attention_layernorm = OnePlusNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = SwiGLU(c)
        self.kind = kind

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor:
        normed = self.input_layernorm(x)
        if self.kind == "full_attention":
            x = x + self.self_attn(normed, cos, sin, mask)
        else:
            x = x + self.linear_attn(normed, padding)
        return x + self.mlp(self.post_attention_layernorm(x))


class SwiGLU(nn.Module):
    def __init__(self, c: Qwen3_5Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Angles(nn.Module):
    """cos and sin of RoPE. Frequencies are computed when asked for, on the host, in fp32: nothing to cast or lose."""

    def __init__(self, c: Qwen3_5Config) -> None:
        super().__init__()
        self.rotary = int(c.head_dim * c.partial_rotary_factor)
        self.theta = c.rope_theta

    def forward(self, positions: Tensor, dtype: Any) -> tuple[Tensor, Tensor]:
        """[B, S] → cos, sin [B, S, R]."""
        exponent = ops.arange(0, self.rotary, 2, dtype=ops.float32, device="cpu") / self.rotary
        frequency = (1.0 / (self.theta**exponent)).to(positions.device)
        wide = ops.promote_types(dtype, ops.float32)
        angle = positions[..., None].to(wide) * frequency.to(wide)
        angle = ops.cat((angle, angle), dim=-1)
        return angle.cos().to(dtype), angle.sin().to(dtype)


class Qwen3_5(nn.Module):
    """The model. The plans name modules and parameters by globs, as the older trainer reads them."""

    _tp_plan: ClassVar[dict[str, str]] = {
        "embed_tokens": "colwise",
        "lm_head": "colwise",
        "layers.*.self_attn.[qkv]_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.linear_attn.in_proj_*": "colwise",
        "layers.*.linear_attn.conv_*": "colwise",
        "layers.*.linear_attn.A_log": "colwise",
        "layers.*.linear_attn.dt_bias": "colwise",
        "layers.*.linear_attn.out_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    _cp_modules = ("layers.*.self_attn.core", "layers.*.linear_attn.core")

    def __init__(self, config: Qwen3_5Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.angles = Angles(config)
        self.layers = nn.ModuleList([Layer(config, kind) for kind in config.kinds()])
        self.norm = OnePlusNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, S, V]. `attention_mask` [B, S] is nonzero for tokens and zero for padding."""
        batch, length = input_ids.shape
        positions = ops.arange(length, device=input_ids.device).expand(batch, length)
        mask, padding = self.masks(input_ids, attention_mask)
        x = self.embed_tokens(self.part_of_rows(input_ids))
        cos, sin = self.angles(self.part_of_rows(positions), x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, mask, padding)
        return self.lm_head(self.norm(x))

    def part_of_rows(self, rows: Tensor) -> Tensor:
        """The tokens of these rows [B, S] that this process computes: all."""
        return rows

    def masks(self, ids: Tensor, padding: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Which keys [B, 1, S, S] a query sees (None: all up to itself), and the padding [B, S] of these tokens."""
        return (None if padding is None else causal_mask(padding)), padding

    def init_weights(self) -> None:
        """Fill every parameter, from the global random numbers."""
        for name, parameter in self.named_parameters():
            self.init_parameter(name, parameter)

    def init_parameter(self, name: str, whole: Tensor) -> None:
        """Fill the parameter of this name, given whole wherever it will lie, from the global random numbers."""
        leaf = name.rpartition(".")[2]
        if leaf == "A_log":
            init.uniform_(whole, 0.01, 16.0)
            with ops.no_grad():
                whole.log_()
        elif leaf == "dt_bias" or name.endswith("linear_attn.norm.weight"):
            init.ones_(whole)
        elif whole.dim() == 1:
            init.zeros_(whole)
        else:
            init.normal_(whole, 0.0, self.config.initializer_range)


def causal_mask(padding: Tensor) -> Tensor:
    """[B, 1, S, S], true where a query sees a key; a padding token sees itself, since a row must see something."""
    place = ops.arange(padding.shape[1], device=padding.device)
    earlier, itself = place[None, :] <= place[:, None], place[None, :] == place[:, None]
    return (earlier & (padding.bool()[:, None, :] | itself))[:, None]
