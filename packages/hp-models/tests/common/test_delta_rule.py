"""The chunked delta rule is the token-by-token recurrence, for every length, and forgets at document starts."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from hp_models.common.delta_rule import CHUNK_SIZE, chunk_terms, gated_delta_rule, scan_chunks


def recurrence(q, k, v, g, beta, initial_state=None):
    """S ← e^g S; S ← S + β k (v - Sᵀk)ᵀ; o = Sᵀq: one token after the other, all documents one after the other."""
    q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    state = torch.zeros(*v.shape[:1], *v.shape[2:3], q.shape[-1], v.shape[-1], dtype=v.dtype)
    state = state if initial_state is None else initial_state
    outs = []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        predicted = torch.einsum("bnev,bne->bnv", state, k[:, t])
        change = beta[:, t, :, None] * (v[:, t] - predicted)
        state = state + torch.einsum("bne,bnv->bnev", k[:, t], change)
        outs.append(torch.einsum("bnev,bne->bnv", state, q[:, t]))
    return torch.stack(outs, dim=1), state


def inputs(length, *, batch=2, key_heads=2, heads=4, key_dim=8, value_dim=12, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)

    def randn(*shape):
        return torch.randn(batch, length, *shape, generator=generator, dtype=torch.float64)

    given = (
        randn(key_heads, key_dim) * 3,
        randn(key_heads, key_dim) * 3,
        randn(heads, value_dim),
        -F.softplus(randn(heads) * 2),
        torch.sigmoid(randn(heads)),
    )
    return [tensor.to(dtype).requires_grad_() for tensor in given]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 200])
def test_chunks_are_the_recurrence_in_value_state_and_every_gradient(length):
    given = inputs(length)
    first = torch.randn(2, 4, 8, 12, dtype=torch.float64, requires_grad=True)
    out, last = gated_delta_rule(*given, initial_state_BNEV=first)
    expected, expected_last = recurrence(*given, initial_state=first)
    close(out, expected)
    close(last, expected_last)
    weights = torch.randn_like(out), torch.randn_like(last)
    gradients = torch.autograd.grad((out, last), [*given, first], weights)
    for actual, reference in zip(
        gradients, torch.autograd.grad((expected, expected_last), [*given, first], weights), strict=True
    ):
        close(actual, reference)


def test_gradients_are_those_of_finite_differences():
    given = inputs(3, batch=1, key_heads=1, heads=2, key_dim=2, value_dim=3)
    age = torch.tensor([[0, 1, 0]])
    assert torch.autograd.gradcheck(lambda *args: gated_delta_rule(*args, age)[0], given, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *args: gated_delta_rule(*args, age)[0], given, fast_mode=True)


@pytest.mark.parametrize("lengths", [(70, 5, 1, 128, 40), (64, 64), (1, 1, 63, 65)])
def test_documents_in_one_row_are_what_each_is_alone(lengths):
    given = inputs(sum(lengths), batch=1)
    age = torch.cat([torch.arange(length) for length in lengths])[None]
    # A state from before means nothing where the first token starts a document.
    out, last = gated_delta_rule(*given, age, torch.randn(1, 4, 8, 12, dtype=torch.float64))
    ends = list(itertools.accumulate(lengths))
    alone = [
        gated_delta_rule(*[x[:, end - length : end] for x in given]) for end, length in zip(ends, lengths, strict=True)
    ]
    close(out, torch.cat([part for part, _ in alone], dim=1))
    close(last, alone[-1][1])
    weight = torch.randn_like(out)
    packed = torch.autograd.grad((out * weight).sum(), given)
    apart = torch.autograd.grad((torch.cat([part for part, _ in alone], dim=1) * weight).sum(), given)
    for actual, expected in zip(packed, apart, strict=True):
        close(actual, expected)


@pytest.mark.parametrize("cut", [1, 64, 100])
def test_a_row_can_be_cut_anywhere_and_go_on_from_the_state(cut):
    given = inputs(150)
    age = torch.stack((torch.arange(150), torch.cat((torch.arange(110), torch.arange(40)))))
    whole, last = gated_delta_rule(*given, age)
    left, state = gated_delta_rule(*[x[:, :cut] for x in given], age[:, :cut])
    right, end = gated_delta_rule(*[x[:, cut:] for x in given], age[:, cut:], state)
    close(torch.cat((left, right), dim=1), whole)
    close(end, last)


def test_the_state_after_a_row_is_affine_in_the_state_before_it():
    given = inputs(100)
    terms = chunk_terms(*given)
    first = torch.randn(2, 4, 8, 12, dtype=torch.float64)
    out, last = scan_chunks(terms, first)
    widened = dataclasses.replace(terms, update_CHLV=F.pad(terms.update_CHLV, (0, 8)))
    unit = F.pad(torch.eye(8, dtype=torch.float64), (12, 0)).expand(2, 4, 8, 20)
    outs, ends = scan_chunks(widened, unit)
    close(ends[..., :12] + ends[..., 12:] @ first, last)
    close(outs[..., :12] + torch.einsum("bsne,bnev->bsnv", outs[..., 12:], first), out)


def test_fp32_is_computed_in_fp32_and_bf16_too():
    given = [tensor.detach() for tensor in inputs(200)]
    exact = gated_delta_rule(*given)[0]
    single = gated_delta_rule(*[tensor.float() for tensor in given])[0]
    assert single.dtype == torch.float32
    assert (single - exact).abs().max() < 1e-5 * exact.abs().max()
    short = [tensor.bfloat16() for tensor in given[:3]] + [given[3].float(), given[4].bfloat16()]
    out, state = gated_delta_rule(*short)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    same = gated_delta_rule(*[tensor.float() for tensor in short])[0]
    assert torch.equal(out, same.bfloat16())


def test_rounding_in_one_document_reaches_no_other():
    given = [tensor.float().detach() for tensor in inputs(90, batch=1)]
    age = torch.cat((torch.arange(40), torch.arange(50)))[None]
    out = gated_delta_rule(*given, age)[0]
    # Sums that ran on through this document would be large, and round the differences in the next.
    given[3] = given[3].clone()
    given[3][:, :40] *= 1000
    assert torch.equal(gated_delta_rule(*given, age)[0][:, 40:], out[:, 40:])


def test_strong_decay_neither_overflows_nor_loses_its_gradient():
    given = [tensor.float().detach() for tensor in inputs(2 * CHUNK_SIZE)]
    given[3] = torch.full_like(given[3], -50.0)
    given = [tensor.requires_grad_() for tensor in given]
    for age in (None, torch.cat((torch.arange(40), torch.arange(2 * CHUNK_SIZE - 40)))[None].expand(2, -1)):
        out, last = gated_delta_rule(*given, age)
        assert out.isfinite().all()
        for gradient in torch.autograd.grad(out.sum() + last.sum(), given):
            assert gradient.isfinite().all()
