"""Rows against a packing written by hand, and against a slow and plain packing of random corpora."""

from __future__ import annotations

import pickle
import random

import pytest
import torch

from hp_components.data.packing import PADDING_ROW, PackedRows, as_batch
from hp_components.data.sources import MemoryCorpus
from hp_components.data.tokenising import tokenise
from hp_components.tokenizer import BaseTokenizer

X = -100


def rows(documents: list[str], tokenizer: BaseTokenizer, seq_len: int) -> PackedRows:
    stream = tokenise(MemoryCorpus(lambda: documents), tokenizer)
    return PackedRows(stream, seq_len, pad_id=1)


def fields(packed: PackedRows, indices: list[int]) -> dict[str, list[list[int]]]:
    return {name: values.tolist() for name, values in as_batch(packed.stack(indices)).items()}


def test_documents_are_packed_as_by_hand(letters: BaseTokenizer) -> None:
    # a=2, b=3 …; BOS 0, EOS 1. Stream: 0 2 3 4 1 | 0 5 1 | 0 6 7 8 9 10 11 1  (16 tokens)
    packed = rows(["abc", "d", "efghij"], letters, 6)
    assert len(packed) == 3
    assert fields(packed, [0, 1, 2]) == {
        "input": [[0, 2, 3, 4, 1, 0], [5, 1, 0, 6, 7, 8], [9, 10, 11, 1, 1, 1]],
        "labels": [[2, 3, 4, 1, X, 5], [1, X, 6, 7, 8, 9], [10, 11, 1, X, X, X]],
        "positions": [[0, 1, 2, 3, 4, 0], [0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1]],
        "segment_ids": [[0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]],
    }


def test_a_document_that_ends_with_its_row_has_no_label_behind_it(letters: BaseTokenizer) -> None:
    # 0 2 3 1 | 0 4 1
    packed = rows(["ab", "c"], letters, 4)
    assert fields(packed, [0, 1]) == {
        "input": [[0, 2, 3, 1], [0, 4, 1, 1]],
        "labels": [[2, 3, 1, X], [4, 1, X, X]],
        "positions": [[0, 1, 2, 3], [0, 1, 2, 0]],
        "segment_ids": [[0, 0, 0, 0], [0, 0, 0, 1]],
    }


def test_a_row_of_padding_teaches_nothing(letters: BaseTokenizer) -> None:
    packed = rows(["abc"], letters, 4)
    assert fields(packed, [PADDING_ROW]) == {
        "input": [[1, 1, 1, 1]],
        "labels": [[X, X, X, X]],
        "positions": [[0, 1, 2, 3]],
        "segment_ids": [[0, 0, 0, 0]],
    }


@pytest.mark.parametrize("seq_len", [1, 2, 7, 64, 1000])
def test_any_corpus_is_packed_as_token_by_token(letters: BaseTokenizer, seq_len: int) -> None:
    rng = random.Random(seq_len)
    documents = ["".join(rng.choices("abcdefgh", k=rng.choice([0, 1, 1, 2, 5, 30, 200]))) for _ in range(60)]
    expected = []  # one (token, label, document) after the other
    for number, document in enumerate(filter(None, documents)):
        ids = [0, *(ord(letter) - 95 for letter in document), 1]
        expected += [(token, label, number) for token, label in zip(ids, [*ids[1:], X], strict=True)]
    padding = -len(expected) % seq_len
    expected += [(1, X, -1)] * padding
    batch = as_batch(rows(documents, letters, seq_len).stack(range(len(expected) // seq_len)))
    assert batch["input"].flatten().tolist() == [token for token, _, _ in expected]
    assert batch["labels"].flatten().tolist() == [label for _, label, _ in expected]
    for index in range(len(expected) // seq_len):
        owners = [owner for _, _, owner in expected[index * seq_len : (index + 1) * seq_len]]
        segments = [sorted(set(owners), key=owners.index).index(owner) for owner in owners]
        positions = [place - owners.index(owner) for place, owner in enumerate(owners)]
        assert batch["segment_ids"][index].tolist() == segments
        assert batch["positions"][index].tolist() == positions


def test_fields_are_int64_and_of_their_own(letters: BaseTokenizer) -> None:
    batch = as_batch(rows(["abc", "d"], letters, 4).stack([0, 1, PADDING_ROW]))
    for values in batch.values():
        assert (values.dtype, tuple(values.shape), values.is_contiguous()) == (torch.int64, (3, 4), True)


@pytest.mark.parametrize(
    ("bos", "eos", "expected"),
    [(True, False, [0, 2, 3, 0, 4]), (False, True, [2, 3, 1, 4, 1]), (False, False, [2, 3, 4])],
)
def test_a_tokenizer_without_bos_or_eos_is_packed_without(
    letters_config: type[BaseTokenizer.Config], bos: bool, eos: bool, expected: list[int]
) -> None:
    tokenizer = letters_config(with_bos=bos, with_eos=eos).build()
    packed = rows(["ab", "c"], tokenizer, len(expected))
    batch = fields(packed, [0])
    assert batch["input"] == [expected]
    assert batch["labels"][0].count(X) == 2


def test_rows_out_of_range_and_empty_rows_are_errors(letters: BaseTokenizer) -> None:
    packed = rows(["abc"], letters, 4)
    for index in (2, -2):
        with pytest.raises(IndexError, match=f"row {index} of 2"):
            packed.stack([index])
    with pytest.raises(ValueError, match="seq_len must be at least 1"):
        PackedRows(packed.stream, 0, pad_id=1)


def test_rows_travel_to_another_process_without_their_tokens(letters: BaseTokenizer) -> None:
    packed = rows(["abc" * 10_000], letters, 4)
    sent = pickle.dumps(packed)
    assert len(sent) < 2000
    assert torch.equal(pickle.loads(sent).stack([0, 5]), packed.stack([0, 5]))
