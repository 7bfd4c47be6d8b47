"""CrossEntropyLoss against the definition, for unequal splits, half precision and no valid token at all."""

import pytest
import torch

from hp_components import BaseLoss, CrossEntropyLoss


def by_definition(logits_BSV, labels_BS):
    """Sum of -log softmax(logits)[label], written out."""
    total = torch.zeros((), dtype=logits_BSV.dtype)
    for row, labels in zip(logits_BSV, labels_BS, strict=True):
        for logits, label in zip(row, labels, strict=True):
            if label != -100:
                total = total + torch.logsumexp(logits, 0) - logits[label]
    return total


def batch(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    logits_BSV = torch.randn(6, 5, 11, generator=generator, dtype=dtype)
    labels_BS = torch.randint(0, 11, (6, 5), generator=generator)
    labels_BS[0, :] = -100  # a row without a valid token
    labels_BS[1, 1:] = -100  # and one with a single one
    return logits_BSV.requires_grad_(), labels_BS


def test_it_is_the_sum_over_valid_tokens():
    logits_BSV, labels_BS = batch(torch.float64)
    loss = CrossEntropyLoss.Config().build()
    torch.testing.assert_close(
        loss(logits_BSV, labels_BS), by_definition(logits_BSV, labels_BS), atol=1e-12, rtol=1e-12
    )
    assert loss.count_tokens(labels_BS).item() == 21


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_any_split_into_micro_batches_adds_up_to_the_same_loss_and_gradients(dtype, tolerance):
    loss = CrossEntropyLoss.Config().build()
    whole_BSV, labels_BS = batch(dtype)
    tokens = loss.count_tokens(labels_BS)
    whole = loss(whole_BSV, labels_BS) / tokens
    whole.backward()
    split_BSV, _ = batch(dtype)
    parts = [
        loss(split_BSV[rows], labels_BS[rows]) / tokens for rows in (slice(0, 1), slice(1, 2), slice(2, 5), slice(5, 6))
    ]
    for part in parts:
        part.backward()
    torch.testing.assert_close(sum(parts), whole, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(split_BSV.grad, whole_BSV.grad, atol=tolerance, rtol=tolerance)


def test_half_precision_logits_are_summed_in_float32():
    logits_BSV, labels_BS = batch()
    half_BSV = logits_BSV.detach().to(torch.bfloat16).requires_grad_()
    result = CrossEntropyLoss.Config().build()(half_BSV, labels_BS)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, by_definition(half_BSV.detach().float(), labels_BS), atol=1e-4, rtol=1e-6)
    result.backward()
    assert half_BSV.grad.dtype == torch.bfloat16


def test_without_a_valid_token_loss_and_gradients_are_zero():
    logits_BSV, labels_BS = batch()
    loss = CrossEntropyLoss.Config().build()
    result = loss(logits_BSV, torch.full_like(labels_BS, -100))
    result.backward()
    assert result.item() == 0.0
    assert torch.equal(logits_BSV.grad, torch.zeros_like(logits_BSV))
    assert loss.count_tokens(torch.full_like(labels_BS, -100)).item() == 0


def test_the_ignored_label_can_be_chosen():
    logits_BSV, labels_BS = batch()
    loss = CrossEntropyLoss.Config(ignore_index=0).build()
    valid_BS = labels_BS.clamp(min=0)
    same_BS = torch.where(valid_BS == 0, -100, valid_BS)
    assert torch.equal(loss(logits_BSV, valid_BS), CrossEntropyLoss.Config().build()(logits_BSV, same_BS))
    assert loss.count_tokens(valid_BS) == (same_BS != -100).sum()


def test_labels_of_another_shape_are_refused_with_both_shapes():
    logits_BSV, labels_BS = batch()
    with pytest.raises(ValueError, match=r"\(6, 5, 11\) do not fit labels \(6, 4\)"):
        CrossEntropyLoss.Config().build()(logits_BSV, labels_BS[:, :4])


def test_a_loss_of_ones_own_needs_only_the_sum():
    class Squared(BaseLoss):
        def __call__(self, logits_BSV, labels_BS):
            return (logits_BSV**2)[labels_BS != self.ignore_index].sum()

    logits_BSV, labels_BS = batch()
    loss = Squared.Config(ignore_index=-100).build()
    assert isinstance(loss, Squared)
    assert loss(logits_BSV, labels_BS).ndim == 0
    assert loss.count_tokens(labels_BS) == 21
    with pytest.raises(TypeError):
        BaseLoss.Config().build()
