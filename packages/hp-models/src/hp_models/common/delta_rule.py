"""The gated delta rule, computed chunk by chunk.

In: queries, keys [B, S, K, E], values [B, S, N, V], log decay and learning rate [B, S, N], ages of tokens in their
documents. Out: [B, S, N, V], and the state [B, N, E, V] after the last token. Inner precision is at least fp32.

Per head, with S the state (E x V), the rule is: S ← e^g S; S ← S + β k (v - Sᵀk)ᵀ; o = Sᵀq (Yang, Kautz, Hatamizadeh,
"Gated Delta Networks", arXiv 2412.06464). Within a chunk of L tokens the updates are the solution u of a unit
triangular system, so a chunk takes matrix products only, and the loop over tokens becomes one over chunks.

Shapes: B batch, S sequence, K key heads, N value heads (each key head serves N/K consecutive ones), E channels of a
key, V channels of a value, C chunks, L tokens of a chunk, H = B·N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hp_protocols.platform import F, ops

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["CHUNK_SIZE", "ChunkTerms", "chunk_terms", "gated_delta_rule", "scan_chunks"]

CHUNK_SIZE = 64
"""Tokens per chunk: long enough for matrix products, short enough that the L² terms stay small beside E·V."""

NORM_EPS = 1e-6
"""Added to the squared length of a query or key under the root."""


@dataclass(frozen=True)
class ChunkTerms:
    """All that does not depend on the state between chunks; the scan needs no other input.

    Within a chunk that starts from state S: u = update - reading S; o = query S + attention u; and the next state is
    carry S + keyᵀ u. Decays, learning rates and document starts are in these terms already.
    """

    update_CHLV: Tensor
    reading_CHLE: Tensor
    query_CHLE: Tensor
    attention_CHLL: Tensor
    key_CHLE: Tensor
    carry_CH11: Tensor
    batch: int
    seq_len: int


def gated_delta_rule(
    q_BSKE: Tensor,
    k_BSKE: Tensor,
    v_BSNV: Tensor,
    g_BSN: Tensor,
    beta_BSN: Tensor,
    age_BS: Tensor | None = None,
    initial_state_BNEV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rule over whole rows: output [B, S, N, V] in the input's dtype, and the state after the last token.

    Args:
        q_BSKE, k_BSKE: normalised here, to length E^-½ and 1.
        g_BSN: logarithm of the decay, at most 0.
        age_BS: how many tokens of its document come before each token; the state starts anew at age 0. Default: one
            document, which goes on from `initial_state_BNEV`.
        initial_state_BNEV: the state before the first token; default zeros.
    """
    terms = chunk_terms(q_BSKE, k_BSKE, v_BSNV, g_BSN, beta_BSN, age_BS)
    out_BSNV, state_BNEV = scan_chunks(terms, initial_state_BNEV)
    return out_BSNV.to(v_BSNV.dtype), state_BNEV


def chunk_terms(
    q_BSKE: Tensor, k_BSKE: Tensor, v_BSNV: Tensor, g_BSN: Tensor, beta_BSN: Tensor, age_BS: Tensor | None = None
) -> ChunkTerms:
    """The part that every chunk computes by itself; arguments as for `gated_delta_rule`."""
    batch, seq_len, key_heads, key_dim = q_BSKE.shape
    heads, value_dim = v_BSNV.shape[2:]
    wide = ops.promote_types(v_BSNV.dtype, ops.float32)
    length = CHUNK_SIZE
    chunks = -(-seq_len // length)

    def by_chunk(x_BSHX: Tensor) -> Tensor:
        return _by_chunk(x_BSHX.to(wide), length, chunks)

    q_CBKLE, k_CBKLE, v_CBNLV = by_chunk(q_BSKE), by_chunk(k_BSKE), by_chunk(v_BSNV)
    q_CBKLE, k_CBKLE = _UnitLength.apply(q_CBKLE, key_dim**-0.5)[0], _UnitLength.apply(k_CBKLE, 1.0)[0]
    # What differs between the R value heads of a key head has a dim for them; what is common broadcasts along it.
    group = (chunks, batch, key_heads, heads // key_heads, length)
    beta_CBKRL1 = by_chunk(beta_BSN).reshape(*group, 1)
    log_CBKRL = by_chunk(g_BSN).reshape(group)
    sees = _document_masks(age_BS, batch, length, chunks, device=v_BSNV.device)
    log_CBKRL = log_CBKRL.cumsum(-1) if sees.across is None else _sums_within(log_CBKRL, sees.across.age)
    pair_CBKRLL = log_CBKRL.unsqueeze(-1) - log_CBKRL.unsqueeze(-2)
    # Filled before the exponential: what is masked would overflow, and its gradient would be NaN.
    pair_CBKRLL = pair_CBKRLL.masked_fill(~sees.each_other, float("-inf")).exp()
    from_start_CBKRL, to_end_CBKRL = log_CBKRL, log_CBKRL[..., -1:] - log_CBKRL
    if sees.across is not None:
        from_start_CBKRL = from_start_CBKRL.masked_fill(~sees.across.chunk_start, float("-inf"))
        to_end_CBKRL = to_end_CBKRL.masked_fill(~sees.across.chunk_end, float("-inf"))
    from_start_CBKRL, to_end_CBKRL = from_start_CBKRL.exp(), to_end_CBKRL.exp()

    kT_CBKEL = k_CBKLE.transpose(-1, -2)
    written_CBKRLE = k_CBKLE.unsqueeze(3) * beta_CBKRL1
    coupling_CBKRLL = (written_CBKRLE.flatten(3, 4) @ kT_CBKEL).unflatten(3, group[3:]) * pair_CBKRLL
    flat = (chunks, batch * heads, length)
    return ChunkTerms(
        update_CHLV=_solve(coupling_CBKRLL, v_CBNLV.reshape(*group, value_dim) * beta_CBKRL1).reshape(*flat, value_dim),
        reading_CHLE=_solve(coupling_CBKRLL, written_CBKRLE * from_start_CBKRL.unsqueeze(-1)).reshape(*flat, key_dim),
        query_CHLE=(q_CBKLE.unsqueeze(3) * from_start_CBKRL.unsqueeze(-1)).reshape(*flat, key_dim),
        attention_CHLL=((q_CBKLE @ kT_CBKEL).unsqueeze(3) * pair_CBKRLL).reshape(*flat, length),
        key_CHLE=(k_CBKLE.unsqueeze(3) * to_end_CBKRL.unsqueeze(-1)).reshape(*flat, key_dim),
        carry_CH11=from_start_CBKRL[..., -1].reshape(chunks, batch * heads, 1, 1),
        batch=batch,
        seq_len=seq_len,
    )


def scan_chunks(terms: ChunkTerms, initial_state_BNEV: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pass the state through the chunks: output [B, S, N, V] and last state [B, N, E, V], in the inner precision."""
    chunks, rows, length, value_dim = terms.update_CHLV.shape
    key_dim = terms.key_CHLE.shape[-1]
    if initial_state_BNEV is None:
        state_HEV = terms.update_CHLV.new_zeros(rows, key_dim, value_dim)
    else:
        state_HEV = initial_state_BNEV.reshape(rows, key_dim, value_dim).to(terms.update_CHLV.dtype)
    outs = []
    # unbind and stack: their backward passes are one copy each, those of indexing are one copy per chunk.
    for update_HLV, reading_HLE, query_HLE, attention_HLL, key_HLE, carry_H11 in zip(
        terms.update_CHLV.unbind(0),
        terms.reading_CHLE.unbind(0),
        terms.query_CHLE.unbind(0),
        terms.attention_CHLL.unbind(0),
        terms.key_CHLE.unbind(0),
        terms.carry_CH11.unbind(0),
        strict=True,
    ):
        update_HLV = ops.baddbmm(update_HLV, reading_HLE, state_HEV, alpha=-1.0)
        outs.append(ops.baddbmm(ops.bmm(query_HLE, state_HEV), attention_HLL, update_HLV))
        state_HEV = ops.baddbmm(state_HEV * carry_H11, key_HLE.transpose(1, 2), update_HLV)
    out_CBNLV = ops.stack(outs).reshape(chunks, terms.batch, -1, length, value_dim)
    out_BSNV = out_CBNLV.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : terms.seq_len]
    return out_BSNV, state_HEV.reshape(terms.batch, -1, key_dim, value_dim)


def _by_chunk(x_BSHX: Tensor, length: int, chunks: int) -> Tensor:
    """[B, S, heads, …] → [C, B, heads, L, …], the end filled with zeros, which change no state and no output."""
    missing = chunks * length - x_BSHX.shape[1]
    if missing:
        x_BSHX = F.pad(x_BSHX, (0, 0) * (x_BSHX.dim() - 2) + (0, missing))
    x_BCLHX = x_BSHX.unflatten(1, (chunks, length))
    # One matrix of a batched product has to be contiguous; copied once here rather than in each product.
    return x_BCLHX.permute(1, 0, 3, 2, *range(4, x_BCLHX.dim())).contiguous()


class _UnitLength(ops.autograd.Function):
    """scale · x / |x| over the last dim, and 1 / |x|.

    By hand: autograd would keep, and pass over, twice as many tensors of this size.
    """

    @staticmethod
    def forward(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        inverse = ops.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
        unit = x * inverse
        return (unit if scale == 1.0 else unit * scale), inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_inverse: Tensor) -> tuple[Tensor, None]:
        # What is kept are outputs, so that a second derivative finds its way through them.
        unit, inverse = ctx.saved_tensors
        along = (grad * unit).sum(-1, keepdim=True) + grad_inverse * inverse
        return ops.addcmul(grad, unit, along * (-1.0 / ctx.scale**2)) * (inverse * ctx.scale), None


def _sums_within(x: Tensor, age: Tensor) -> Tensor:
    """Running sums over the last dim that start anew with each document: no document's rounding reaches another's.

    Each step doubles how far back a sum reaches (Hillis, Steele, "Data parallel algorithms", 1986).
    """
    reach = 1
    while reach < x.shape[-1]:
        before = F.pad(x, (reach, 0))[..., : x.shape[-1]]
        x = x + before.masked_fill(age < reach, 0.0)
        reach *= 2
    return x


def _solve(coupling: Tensor, right: Tensor) -> Tensor:
    """x of (I + A) x = right, with A the strictly lower triangle of `coupling` [..., L, L]."""
    return ops.linalg.solve_triangular(coupling, right, upper=False, unitriangular=True)


@dataclass(frozen=True)
class _AcrossChunks:
    """Which of a chunk's tokens share a document with tokens outside the chunk, each [C, B, 1, 1, L].

    `age` as given; `chunk_start`: the token's document was there before the chunk (for the last token: one document
    fills the chunk); `chunk_end`: it is that of the chunk's last token.
    """

    age: Tensor
    chunk_start: Tensor
    chunk_end: Tensor


@dataclass(frozen=True)
class _DocumentMasks:
    """Which tokens of a chunk see each other: causal, [L, L] or [C, B, 1, 1, L, L]. `across` None: one document."""

    each_other: Tensor
    across: _AcrossChunks | None = None


def _document_masks(
    age_BS: Tensor | None, batch: int, length: int, chunks: int, *, device: torch.device
) -> _DocumentMasks:
    place_L = ops.arange(length, device=device)
    distance_LL = place_L.unsqueeze(1) - place_L.unsqueeze(0)
    causal_LL = distance_LL >= 0
    if age_BS is None:
        return _DocumentMasks(each_other=causal_LL)
    missing = chunks * length - age_BS.shape[1]
    if missing:
        # Fill tokens belong to the row's last document, so that its state is what remains at the end.
        later_1T = ops.arange(1, missing + 1, device=device).unsqueeze(0)
        age_BS = ops.cat((age_BS, age_BS[:, -1:] + later_1T), dim=1)
    age_CB11L = age_BS.view(batch, chunks, length).transpose(0, 1)[:, :, None, None]
    last_CB111 = age_CB11L[..., -1:]
    return _DocumentMasks(
        each_other=causal_LL & (distance_LL <= age_CB11L.unsqueeze(-1)),
        across=_AcrossChunks(
            age=age_CB11L,
            chunk_start=age_CB11L > place_L,
            chunk_end=place_L >= length - 1 - last_CB111,
        ),
    )
