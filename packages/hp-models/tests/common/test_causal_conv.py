"""The convolution is torch's own depthwise one, bit for bit, and each document's alone."""

import pytest
import torch
import torch.nn.functional as F

from hp_models.common.causal_conv import causal_conv


def reference(x, weight):
    """torch's kernel, channels first."""
    width, channels = weight.shape[-1], weight.shape[0]
    return F.conv1d(F.pad(x.transpose(1, 2), (width - 1, 0)), weight, groups=channels).transpose(1, 2)


def inputs(length=70, channels=24, width=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(2, length, channels, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(channels, 1, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return x, weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_has_the_bits_of_torch(dtype):
    x, weight = inputs(dtype=dtype)
    assert torch.equal(causal_conv(x, weight), reference(x, weight))


@pytest.mark.parametrize(("length", "width"), [(1, 4), (2, 4), (70, 4), (9, 2), (5, 1)])
def test_gradients_are_those_of_torch(length, width):
    x, weight = inputs(length, width=width)
    out, expected = causal_conv(x, weight), reference(x, weight)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    grad = torch.randn_like(out)
    for actual, known in zip(
        torch.autograd.grad(out, (x, weight), grad), torch.autograd.grad(expected, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(actual, known, rtol=1e-12, atol=1e-12)


def test_documents_are_what_each_is_alone_forward_and_backward():
    x, weight = inputs(10)
    age = torch.tensor([[0, 1, 0, 0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]])
    pieces = [[slice(0, 2), slice(2, 3), slice(3, 8), slice(8, 10)], [slice(0, 5), slice(5, 10)]]
    out = causal_conv(x, weight, age)
    alone = torch.stack(
        [
            torch.cat([reference(x[row : row + 1, piece], weight)[0] for piece in parts])
            for row, parts in enumerate(pieces)
        ]
    )
    torch.testing.assert_close(out, alone, rtol=1e-13, atol=1e-13)
    grad = torch.randn_like(out)
    for actual, known in zip(
        torch.autograd.grad(out, (x, weight), grad), torch.autograd.grad(alone, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(actual, known, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cut", [1, 2, 6])
def test_a_row_can_be_cut_where_the_tokens_before_are_given(cut):
    x, weight = inputs(10)
    age = torch.tensor([list(range(10)), [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
    whole = causal_conv(x, weight, age)
    halo = F.pad(x, (0, 0, 3, 0))[:, cut : cut + 3]
    parts = causal_conv(x[:, :cut], weight, age[:, :cut]), causal_conv(x[:, cut:], weight, age[:, cut:], halo)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-13, atol=1e-13)
    grad = torch.randn_like(whole)
    for actual, known in zip(
        torch.autograd.grad(torch.cat(parts, dim=1), (x, weight), grad),
        torch.autograd.grad(whole, (x, weight), grad),
        strict=True,
    ):
        torch.testing.assert_close(actual, known, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_finite_differences():
    x, weight = inputs(4, channels=2)
    halo = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    age = torch.tensor([[5, 6, 0, 1], [1, 2, 3, 4]])
    assert torch.autograd.gradcheck(lambda x, w, h: causal_conv(x, w, age, h), (x, weight, halo))
    assert torch.autograd.gradgradcheck(lambda x, w: causal_conv(x, w, age), (x, weight))
