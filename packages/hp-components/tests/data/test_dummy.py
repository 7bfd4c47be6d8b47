"""DummyDataLoader: random tokens that depend on the row's number alone."""

from __future__ import annotations

import pytest
import torch

from hp_components.data import DummyDataLoader
from hp_components.tokenizer import BaseTokenizer
from hp_protocols.errors import ConfigError


def build(*, rank: int = 0, dp: int = 1, local: int = 6, vocab_size: int | None = 50, seed: int = 1, seq_len: int = 16):
    return DummyDataLoader.Config(vocab_size=vocab_size).build(
        seq_len=seq_len, local_batch_size=local, dp_rank=rank, dp_world_size=dp, seed=seed
    )


def test_a_batch_is_one_document_per_row_with_next_tokens_as_labels() -> None:
    batch = next(build())
    assert set(batch) == {"input", "labels", "positions", "segment_ids"}
    for values in batch.values():
        assert (values.dtype, tuple(values.shape)) == (torch.int64, (6, 16))
    assert torch.equal(batch["labels"][:, :-1], batch["input"][:, 1:])
    assert torch.equal(batch["positions"], torch.arange(16).expand(6, 16))
    assert not batch["segment_ids"].any()
    assert 0 <= batch["input"].min() <= batch["input"].max() < 50


def test_all_tokens_are_drawn_about_equally_often() -> None:
    loader = build(vocab_size=4, seq_len=1000)
    counts = torch.bincount(torch.cat([next(loader)["input"].flatten() for _ in range(10)]), minlength=4)
    assert ((counts / counts.sum() - 0.25).abs() < 0.01).all()


@pytest.mark.parametrize("dp", [2, 3])
def test_ranks_together_take_what_one_process_takes(dp: int) -> None:
    one, ranks = build(), [build(rank=rank, dp=dp, local=6 // dp) for rank in range(dp)]
    for _ in range(4):
        assert torch.equal(torch.cat([next(rank)["input"] for rank in ranks]), next(one)["input"])


def test_it_resumes_under_another_number_of_ranks() -> None:
    one = build()
    batches = [next(one)["input"] for _ in range(6)]
    interrupted = build()
    for _ in range(3):
        next(interrupted)
    ranks = [build(rank=rank, dp=2, local=3) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(interrupted.state_dict())
    for expected in batches[3:]:
        assert torch.equal(torch.cat([next(rank)["input"] for rank in ranks]), expected)


def test_a_state_of_something_else_says_what_differs() -> None:
    state = build().state_dict()
    with pytest.raises(ConfigError, match="vocab_size 50, this run has 51"):
        build(vocab_size=51).load_state_dict(state)
    with pytest.raises(ConfigError, match="seed 1, this run has 2"):
        build(seed=2).load_state_dict(state)
    with pytest.raises(ConfigError, match="kind 'TextDataLoader', this run has 'DummyDataLoader'"):
        build().load_state_dict({**state, "identity": {"kind": "TextDataLoader", "tokens": "x"}})


def test_the_vocabulary_is_the_tokenizers_unless_given(letters: BaseTokenizer) -> None:
    loader = DummyDataLoader.Config().build(tokenizer=letters, seq_len=500, local_batch_size=8)
    assert int(next(loader)["input"].max()) == 27
    with pytest.raises(ValueError, match="needs vocab_size in its config, or a tokenizer"):
        build(vocab_size=None)
    with pytest.raises(ConfigError, match=r"dataloader\.vocab_size: is 0"):
        build(vocab_size=0)
    with pytest.raises(ValueError, match="seq_len must be at least 1"):
        build(seq_len=0)


def test_it_has_no_text_to_train_a_tokenizer_on() -> None:
    assert DummyDataLoader.Config().open_corpus() is None


def test_it_says_what_it_is() -> None:
    assert str(build()) == "random tokens below 50, rows of 16"
