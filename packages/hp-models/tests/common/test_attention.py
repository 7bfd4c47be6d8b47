"""Gated grouped-query attention against one head at a time in fp64, and what cannot be built."""

import pytest
import torch
import torch.nn.functional as F

from hp_models.common import GQAttention, Linear, Qwen3_5RMSNorm, RoPE, ScaledDotProductAttention
from hp_models.common.rope import apply_rotary

D, N, K, E = 40, 4, 2, 16


def attention_config(*, output_gate=True, qk_norm=True, num_heads=N, num_kv_heads=K, **changes):
    def linear(inputs, outputs):
        return Linear.Config(in_features=inputs, out_features=outputs)

    norm = Qwen3_5RMSNorm.Config(dim=E) if qk_norm else None
    sizes = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": E,
        "q_proj": linear(D, num_heads * E * (2 if output_gate else 1)),
        "k_proj": linear(D, num_kv_heads * E),
        "v_proj": linear(D, num_kv_heads * E),
        "o_proj": linear(num_heads * E, D),
        "q_norm": norm,
        "k_norm": norm,
        "output_gate": output_gate,
        "inner_attention": ScaledDotProductAttention.Config(),
    }
    return GQAttention.Config(**{**sizes, **changes})


def attention(**options):
    return attention_config(**options).build()


def head_by_head(module, x, cos, sin, allowed, *, gate):
    """The definition, one query head at a time, without any tensor of heads."""
    outputs = []
    for n in range(N):
        width = 2 * E if gate else E
        rows = module.q_proj.weight[n * width : n * width + E]
        k_rows = slice((n // (N // K)) * E, (n // (N // K) + 1) * E)
        q, k, v = x @ rows.T, x @ module.k_proj.weight[k_rows].T, x @ module.v_proj.weight[k_rows].T
        if module.q_norm is not None:
            q = F.rms_norm(q, (E,), 1 + module.q_norm.weight, 1e-6)
            k = F.rms_norm(k, (E,), 1 + module.k_norm.weight, 1e-6)
        q, k = (apply_rotary(t.unsqueeze(2), cos, sin).squeeze(2) for t in (q, k))
        scores = (q @ k.transpose(1, 2) / E**0.5).masked_fill(~allowed, -torch.inf)
        out = scores.softmax(-1) @ v
        if gate:
            out = out * torch.sigmoid(x @ module.q_proj.weight[n * width + E : (n + 1) * width].T)
        outputs.append(out)
    return torch.cat(outputs, -1) @ module.o_proj.weight.T


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_its_definition_head_by_head(gate, qk_norm, masked):
    module = attention(output_gate=gate, qk_norm=qk_norm).double()
    if qk_norm:
        torch.nn.init.normal_(module.q_norm.weight, std=0.3)
        torch.nn.init.normal_(module.k_norm.weight, std=0.3)
    x = torch.randn(2, 9, D, dtype=torch.float64, requires_grad=True)
    cos, sin = RoPE.Config(head_dim=E, partial_rotary_factor=0.5).build()(torch.arange(9)[None], dtype=x.dtype)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    allowed = (
        causal & ((torch.rand(2, 9, 9) > 0.4) | torch.eye(9, dtype=torch.bool)) if masked else causal.expand(2, 9, 9)
    )
    out = module(x, cos, sin, allowed.unsqueeze(1) if masked else None)
    expected = head_by_head(module, x, cos, sin, allowed, gate=gate)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(out)
    parameters = [x, *module.parameters()]
    for mine, reference in zip(
        torch.autograd.grad((out * weight).sum(), parameters),
        torch.autograd.grad((expected * weight).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("copies", [2, 4])
def test_copies_of_key_value_heads_change_nothing(copies):
    plain, copied = attention(num_kv_heads=N // copies), attention(num_kv_heads=N // copies, kv_copies=copies)
    copied.load_state_dict(plain.state_dict())
    x, (cos, sin) = torch.randn(2, 9, D), RoPE.Config(head_dim=E).build()(torch.arange(9)[None], dtype=torch.float32)
    torch.testing.assert_close(copied(x, cos, sin), plain(x, cos, sin))


@pytest.mark.parametrize(("ranks", "unfit"), [(1, ()), (2, ()), (4, ()), (8, (12,)), (3, (2,)), (5, (12, 2)), (6, ())])
def test_ranks_share_query_heads_evenly_and_key_value_heads_evenly_or_in_copies(ranks, unfit):
    assert attention_config(num_heads=12, num_kv_heads=2).heads_unfit_for(ranks) == unfit


def test_other_numbers_of_queries_and_keys_need_a_mask():
    inner = ScaledDotProductAttention.Config().build()
    q, kv = torch.randn(1, 3, N, E), torch.randn(1, 6, K, E)
    with pytest.raises(ValueError, match="3 queries and 6 keys need an explicit mask"):
        inner(q, kv, kv)
    assert inner(q, kv, kv, torch.ones(1, 1, 3, 6, dtype=torch.bool)).shape == q.shape


def test_heads_that_cannot_be_grouped_are_refused():
    with pytest.raises(ValueError, match="num_heads 4 must be a multiple of num_kv_heads 3"):
        attention(num_kv_heads=3)


def test_a_query_norm_without_a_key_norm_is_refused():
    with pytest.raises(ValueError, match="go together"):
        attention(k_norm=None)
