"""Masks and positions against their definition, token by token, and what is no document boundary."""

import pytest
import torch

from hp_models.common.attention_mask import (
    check_cu_seqlens,
    document_starts,
    make_attention_mask,
    make_position_ids,
)

CPU = torch.device("cpu")


def may_attend(batch, seq_len, padding=None, bounds=None):
    """mask[b, q, k] by the definition."""
    mask = torch.zeros(batch, seq_len, seq_len, dtype=torch.bool)
    for b in range(batch):
        for q in range(seq_len):
            for k in range(q + 1):
                document = [sum(bound <= b * seq_len + t for bound in bounds or [0]) for t in (q, k)]
                token = padding is None or bool(padding[b, k]) or q == k
                mask[b, q, k] = token and document[0] == document[1]
    return mask


def test_plain_causal_attention_needs_no_mask():
    assert make_attention_mask(None, None) is None


PADDING = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]])
BOUNDS = (0, 3, 7, 8, 14)


@pytest.mark.parametrize("padding", [None, PADDING, PADDING.bool(), PADDING.float()])
@pytest.mark.parametrize("bounds", [None, BOUNDS])
def test_the_mask_is_what_padding_and_documents_allow(padding, bounds):
    if padding is None and bounds is None:
        return
    starts = None if bounds is None else document_starts(bounds, 2, 7, CPU)
    mask = make_attention_mask(padding, starts)
    assert mask.shape == (2, 1, 7, 7)
    assert torch.equal(mask[:, 0], may_attend(2, 7, padding, bounds))


def test_every_token_may_attend_to_something():
    mask = make_attention_mask(torch.zeros(1, 5), None)
    assert mask.any(-1).all()


def test_positions_count_within_rows_or_within_documents():
    assert make_position_ids(None, 2, 4, CPU).tolist() == [[0, 1, 2, 3]] * 2
    starts = document_starts(BOUNDS, 2, 7, CPU)
    assert make_position_ids(starts, 2, 7, CPU).tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("given", [[0, 3, 10], (0, 3, 10), torch.tensor([0, 3, 10], dtype=torch.int32)])
def test_boundaries_are_taken_as_ints_or_as_a_cpu_tensor(given):
    assert check_cu_seqlens(given, 1, 10) == (0, 3, 10)


@pytest.mark.parametrize("bounds", [[], [0], [1, 10], [0, 9], [0, 4, 4, 10], [0, 6, 3, 10], [0, 11]])
def test_what_is_no_list_of_boundaries_is_refused(bounds):
    with pytest.raises(ValueError, match="start at 0, rise, and end at 10"):
        check_cu_seqlens(bounds, 1, 10)


def test_a_document_across_the_end_of_a_row_is_refused():
    with pytest.raises(ValueError, match="crosses the row end at token 5"):
        check_cu_seqlens([0, 3, 10], 2, 5)


def test_boundaries_on_a_device_are_refused():
    with pytest.raises(ValueError, match="read on the host"):
        check_cu_seqlens(torch.empty(3, dtype=torch.int64, device="meta"), 1, 10)
