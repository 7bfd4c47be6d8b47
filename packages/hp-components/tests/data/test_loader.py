"""TextDataLoader: the same global order for every layout, and exact resume under any other."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_components.data import DummyDataLoader, TextDataLoader
from hp_components.data.packing import PackedRows, as_batch
from hp_components.data.prefetch import Prefetch, StackIterator
from hp_components.data.tokenising import tokenise
from hp_components.tokenizer import BaseTokenizer
from hp_protocols.errors import ConfigError, Fault

S = 8
KEYS = ["input", "labels", "positions", "segment_ids"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """About 1,400 tokens in 60 documents: 170 rows of 8 and a bit."""
    rng = random.Random(0)
    lines = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(1, 40))) for _ in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    return tmp_path / "text.jsonl"


def build(text: Path, tokenizer: BaseTokenizer, *, local: int = 4, rank: int = 0, dp: int = 1, **config: Any):
    runtime = {key: config.pop(key) for key in ("seed", "seq_len") if key in config}
    return TextDataLoader.Config(dataset_path=str(text), **config).build(
        tokenizer=tokenizer,
        local_batch_size=local,
        dp_rank=rank,
        dp_world_size=dp,
        **{"seq_len": S, "seed": 5, **runtime},
    )


def world(text: Path, tokenizer: BaseTokenizer, dp: int, local: int, state: Any = None, **config: Any):
    """A loader per rank, from a state if given."""
    loaders = [build(text, tokenizer, rank=rank, dp=dp, local=local, **config) for rank in range(dp)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return loaders


def take(loaders: list[TextDataLoader], count: int) -> torch.Tensor:
    """The next global batches, put together from the ranks: [count × global batch, 4, S]."""
    batches = [torch.cat([as_rows(next(loader)) for loader in loaders]) for _ in range(count)]
    return torch.cat(batches) if batches else torch.empty((0, 4, S), dtype=torch.int64)


def as_rows(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    assert list(batch) == KEYS
    return torch.stack([batch[key] for key in KEYS], dim=1)


def all_rows(text: Path, tokenizer: BaseTokenizer) -> torch.Tensor:
    """Every row in the order of the corpus."""
    corpus = TextDataLoader.Config(dataset_path=str(text)).open_corpus()
    rows = PackedRows(tokenise(corpus, tokenizer), S, pad_id=1)
    return as_rows(as_batch(rows.stack(range(len(rows)))))


def test_without_shuffling_it_is_the_corpus_in_order(text: Path, letters: BaseTokenizer) -> None:
    expected = all_rows(text, letters)
    assert len(expected) % 4 != 0
    loader = build(text, letters, shuffle=False, epochs=1)
    rows = torch.cat([as_rows(batch) for batch in loader])
    assert torch.equal(rows[: len(expected)], expected)
    assert (rows[len(expected) :, 1] == -100).all()
    assert len(rows) == -(-len(expected) // 4) * 4
    assert (loader.num_rows, loader.num_tokens) == (len(expected), len(loader.rows.stream.tokens))
    assert rows.dtype == torch.int64


@pytest.mark.parametrize(("dp", "local"), [(1, 24), (2, 12), (3, 8), (8, 3)])
def test_an_epoch_has_every_row_once_for_any_number_of_ranks(
    text: Path, letters: BaseTokenizer, dp: int, local: int
) -> None:
    expected = all_rows(text, letters)
    rows = take(world(text, letters, dp, local, epochs=1), -(-len(expected) // 24))
    padding = rows[(rows[:, 1] == -100).all(dim=1)]
    assert len(padding) == -len(expected) % 24
    real = rows[: len(expected)].tolist()
    assert real != expected.tolist()
    assert sorted(real) == sorted(expected.tolist())


@pytest.mark.parametrize(("dp", "local"), [(2, 12), (3, 8), (8, 3)])
def test_ranks_together_take_what_one_process_takes(text: Path, letters: BaseTokenizer, dp: int, local: int) -> None:
    one = take(world(text, letters, 1, 24), 20)  # over two ends of an epoch
    assert torch.equal(take(world(text, letters, dp, local), 20), one)


@pytest.mark.parametrize("done", [0, 3, 7, 8, 11])
@pytest.mark.parametrize("dp", [1, 2, 3, 8])
def test_a_state_goes_on_under_another_number_of_ranks(text: Path, letters: BaseTokenizer, done: int, dp: int) -> None:
    uninterrupted = take(world(text, letters, 1, 24), 20)
    loaders = world(text, letters, 8, 3)
    take(loaders, done)
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    resumed = take(world(text, letters, dp, 24 // dp, state=states[0]), 20 - done)
    assert torch.equal(resumed, uninterrupted[24 * done :])


def test_a_state_goes_on_under_another_batch_size(text: Path, letters: BaseTokenizer) -> None:
    one = world(text, letters, 1, 24, epochs=1)
    take(one, 2)
    rest = torch.cat([as_rows(batch) for batch in one[0]])
    one[0].load_state_dict({**one[0].state_dict(), "epoch": 0, "cursor": 48})
    (other,) = world(text, letters, 1, 5, state=one[0].state_dict(), epochs=1)
    again = torch.cat([as_rows(batch) for batch in other])
    rows = one[0].num_rows - 48
    assert torch.equal(again[:rows], rest[:rows])


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing_and_only_batches_handed_out_count(
    text: Path, letters: BaseTokenizer, workers: int
) -> None:
    expected = take([build(text, letters)], 60)
    loader = build(text, letters, num_workers=workers, prefetch_factor=4)
    first = take([loader], 50)
    time.sleep(0.2)  # they fetch ahead
    state = loader.state_dict()
    assert (state["epoch"], state["cursor"]) == (1, 4 * 50 - 4 * -(-loader.num_rows // 4))
    assert torch.equal(torch.cat([first, take([loader], 10)]), expected)
    resumed = build(text, letters, num_workers=3 - workers)
    resumed.load_state_dict(state)
    assert torch.equal(take([resumed], 10), expected[200:])


def test_a_loader_that_has_run_can_be_set_back(text: Path, letters: BaseTokenizer) -> None:
    loader = build(text, letters)
    start = loader.state_dict()
    first = take([loader], 5)
    later = loader.state_dict()
    rest = take([loader], 5)
    loader.load_state_dict(later)
    assert torch.equal(take([loader], 5), rest)
    loader.load_state_dict(start)
    assert torch.equal(take([loader], 5), first)


def test_a_second_loop_goes_on_where_the_first_stopped(text: Path, letters: BaseTokenizer) -> None:
    expected = take([build(text, letters)], 6)
    loader = build(text, letters)
    rows = [as_rows(batch) for batch in itertools.islice(loader, 2)] + [
        as_rows(batch) for batch in itertools.islice(loader, 4)
    ]
    assert torch.equal(torch.cat(rows), expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_it_ends_after_the_epochs_asked_for(
    text: Path, letters: BaseTokenizer, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loader = build(text, letters, epochs=2, num_workers=workers)
    assert len(list(loader)) == 2 * -(-loader.num_rows // 4)
    assert "epoch 1 of the data is done" in caplog.text
    assert "epoch 2 of the data is done" in caplog.text
    assert list(loader) == []
    with pytest.raises(StopIteration):
        next(loader)
    more = build(text, letters, epochs=3)
    more.load_state_dict(loader.state_dict())
    assert len(list(more)) == -(-loader.num_rows // 4)


def test_it_says_what_it_trains_on(tmp_path: Path, letters: BaseTokenizer) -> None:
    (tmp_path / "a.txt").write_text("abc" * 1000)
    loader = build(tmp_path / "a.txt", letters)
    assert str(loader) == f"{tmp_path}/a.txt: 1 document, 3,002 tokens, 376 rows of 8 per epoch"


def test_a_corpus_smaller_than_a_batch_is_completed_with_padding(tmp_path: Path, letters: BaseTokenizer) -> None:
    (tmp_path / "a.txt").write_text("abc")
    ranks = world(tmp_path / "a.txt", letters, 3, 2)
    rows = take(ranks, 2)
    assert [int((row[1] != -100).sum()) for row in rows] == [4, 0, 0, 0, 0, 0] * 2
    assert ranks[0].state_dict()["epoch"] == 2


def test_the_global_random_state_is_left_alone(text: Path, letters: BaseTokenizer) -> None:
    before = torch.get_rng_state()
    for workers in (0, 1):
        take([build(text, letters, num_workers=workers)], 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_of_the_config_goes_before_that_of_the_run(text: Path, letters: BaseTokenizer) -> None:
    expected = take([build(text, letters, seed=5)], 3)
    assert not torch.equal(take([build(text, letters, seed=6)], 3), expected)
    assert torch.equal(take([build(text, letters, seed=6, shuffle_seed=5)], 3), expected)


# ---- states of something else ----


def refusal(loader: TextDataLoader, state: dict[str, Any]) -> str:
    position = loader.position
    with pytest.raises(ConfigError) as error:
        loader.load_state_dict(state)
    assert loader.position == position
    return str(error.value)


def test_a_state_of_something_else_says_what_differs(
    text: Path, letters: BaseTokenizer, letters_config: type[BaseTokenizer.Config], tmp_path: Path
) -> None:
    state = build(text, letters).state_dict()
    assert "is for seq_len 8, this run has 16" in refusal(build(text, letters, seq_len=16), state)
    assert "--training.seq_len" in refusal(build(text, letters, seq_len=16), state)
    assert "is for seed 5, this run has 6" in refusal(build(text, letters, seed=6), state)
    assert "is for shuffle True, this run has False" in refusal(build(text, letters, shuffle=False), state)
    (tmp_path / "other.txt").write_text("other text")
    message = refusal(build(tmp_path / "other.txt", letters), state)
    assert "is for tokens" in message
    assert "train on the text and with the tokenizer of the checkpoint" in message
    message = refusal(build(text, letters_config(with_bos=False).build()), state)
    assert "is for tokenizer" in message
    assert "is for tokens" not in message
    message = refusal(build(tmp_path / "other.txt", letters, seq_len=16, seed=6), state)
    assert message.count("the checkpoint's data position is for") == 3


def test_a_state_that_is_none_is_refused(text: Path, letters: BaseTokenizer) -> None:
    for state in ({}, {"epoch": 0}, {"epoch": "x", "cursor": 0, "identity": {}}):
        assert "holds no data position" in refusal(build(text, letters), state)


def test_moving_the_text_or_naming_the_same_tokens_otherwise_is_no_difference(
    text: Path, letters: BaseTokenizer, letters_config: type[BaseTokenizer.Config]
) -> None:
    loader = build(text, letters, shuffle=False, seed=1)
    take([loader], 3)
    moved = text.rename(text.with_name("moved.jsonl"))
    os.utime(moved, (1, 1))
    other = build(moved, letters_config(size=29).build(), shuffle=False, seed=2)
    other.load_state_dict(loader.state_dict())
    assert other.position == loader.position


def test_ranks_with_the_same_data_have_the_same_fingerprint(text: Path, letters: BaseTokenizer) -> None:
    same = {loader.fingerprint for loader in world(text, letters, 2, 4)}
    assert len(same) == 1
    assert build(text, letters, seed=6).fingerprint not in same


# ---- bad values, dead workers ----


def test_configs_come_back_from_plain_data() -> None:
    for config in (TextDataLoader.Config(dataset_path="a", epochs=2), DummyDataLoader.Config(vocab_size=3)):
        plain = json.loads(json.dumps(config.to_dict()))
        assert type(config).from_dict(plain) == config


def test_all_faults_of_a_config_are_told_at_once(letters: BaseTokenizer) -> None:
    config = TextDataLoader.Config(num_workers=-1, prefetch_factor=0, epochs=0, shuffle_seed=-2, text_key="")
    places = [fault.where for fault in config.faults("dataloader")]
    assert places == [
        f"dataloader.{n}" for n in ("num_workers", "prefetch_factor", "epochs", "shuffle_seed", "text_key")
    ]
    with pytest.raises(ConfigError, match="epochs: is 0; allowed: 1 or more"):
        config.build(tokenizer=letters, seq_len=S, local_batch_size=1)
    assert not TextDataLoader.Config(num_workers=2, prefetch_factor=3, epochs=1, shuffle_seed=0).faults("dataloader")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"prefetch_factor": 2}, "prefetch_factor: is set, but without workers nothing is fetched ahead"),
        ({"shuffle_seed": 2, "shuffle": False}, "shuffle_seed: is set, but nothing is shuffled"),
    ],
)
def test_a_value_without_effect_is_a_fault(config: dict[str, Any], message: str) -> None:
    (fault,) = TextDataLoader.Config(**config).faults("dataloader")
    assert message in str(fault)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_or_repeated_for_any_ranks_workers_batches_and_lengths(
    text: Path, letters: BaseTokenizer, seed: int
) -> None:
    """Two epochs, interrupted anywhere and gone on with under another layout: every token twice, in one order."""
    rng = random.Random(seed)
    seq_len = rng.choice([1, 3, 8, 33, 500])
    layouts = [(rng.randint(1, 8), rng.randint(1, 5)) for _ in range(2)]
    workers = rng.choice([0, 0, 1])
    options = {"seq_len": seq_len, "epochs": 2, "shuffle": seed % 2 == 0}
    whole = [as_batch_rows(batch) for batch in build(text, letters, local=7, **options)]
    rows = [row for batch in whole for row in batch if set(row[1]) != {-100}]
    (dp, local), (dp_after, local_after) = layouts
    loaders = world(text, letters, dp, local, num_workers=workers if dp < 3 else 0, **options)
    per_epoch = -(-loaders[0].num_rows // (dp * local))
    done = rng.randint(0, 2 * per_epoch)
    found = [row for _ in range(done) for loader in loaders for row in as_batch_rows(next(loader))]
    after = world(text, letters, dp_after, local_after, loaders[-1].state_dict(), **options)
    left = [list(loader) for loader in after]
    assert len({len(batches) for batches in left}) == 1
    found += [row for step in zip(*left, strict=True) for batch in step for row in as_batch_rows(batch)]
    assert [row for row in found if set(row[1]) != {-100}] == rows
    per_pass = len(rows) // 2
    assert sorted(rows[:per_pass]) == sorted(rows[per_pass:])


def as_batch_rows(batch: dict[str, torch.Tensor]) -> list[list[list[int]]]:
    return torch.stack([batch["input"], batch["labels"]], dim=1).tolist()


def test_worker_seeds_differ_between_ranks_and_stay_from_run_to_run(text: Path) -> None:
    config = TextDataLoader.Config(dataset_path=str(text), num_workers=2)
    seeds = [config.prefetch(seed, rank).seed for seed in (0, 1) for rank in (0, 1)]
    assert len(set(seeds)) == 4
    assert seeds == [config.prefetch(seed, rank).seed for seed in (0, 1) for rank in (0, 1)]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_memory_is_pinned_where_an_accelerator_is_and_refused_where_none_is(text: Path, letters: BaseTokenizer) -> None:
    config = TextDataLoader.Config(dataset_path=str(text))
    accelerated = torch.accelerator.is_available()
    assert config.prefetch(0, 0).pin_memory == accelerated
    config.pin_memory = True
    assert [fault.where for fault in config.faults("data")] == ([] if accelerated else ["data.pin_memory"])
    for workers in (0, 1):
        pinned = next(build(text, letters, num_workers=workers))["input"].is_pinned()
        assert pinned == accelerated


# ---- workers that fail ----


class Rows:
    """Rows that do something else in a worker than rows do."""

    def __init__(self, what: str) -> None:
        self.what = what

    def stack(self, indices: Sequence[int]) -> torch.Tensor:
        if 5 in indices and self.what == "hang":
            time.sleep(1000)
        if 5 in indices and self.what == "fault":
            raise ConfigError(Fault("corpus.jsonl:17", "is not JSON", hint="mend it"))
        if 5 in indices and self.what == "error":
            raise KeyError("the row at corpus.jsonl:17")
        return torch.zeros((4, len(indices), 3), dtype=torch.int64)


def failing(what: str, workers: int = 1, timeout: float = 60) -> StackIterator:
    options = Prefetch(num_workers=workers, prefetch_factor=1, timeout_seconds=timeout)
    return StackIterator(Rows(what), [[number] for number in range(9)], options)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_hangs_is_an_error_that_names_the_knob() -> None:
    stacks = failing("hang", timeout=2)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"within 2 s: .*dataloader.worker_timeout_seconds is too short"):
        list(stacks)
    assert time.monotonic() - started < 20
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_worker_meets_keeps_its_text_and_place(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError) as error:
        list(failing("fault", workers))
    assert [str(fault) for fault in error.value.faults] == ["corpus.jsonl:17: is not JSON\n    → mend it"]
    assert ("in stack" in caplog.text) == (workers == 1)
    with pytest.raises(KeyError, match=r"the row at corpus\.jsonl:17"):
        list(failing("error", workers))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its clean-up meets the dead, too
@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_worker_is_an_error_and_no_hang(text: Path, letters: BaseTokenizer, stopped: bool) -> None:
    loader = build(text, letters, num_workers=2)
    next(loader)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    if stopped:  # killed with nothing delivered ahead
        os.kill(workers[0].pid, signal.SIGSTOP)
    os.kill(workers[0].pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(itertools.islice(loader, 1000))
    assert time.monotonic() - started < 20
