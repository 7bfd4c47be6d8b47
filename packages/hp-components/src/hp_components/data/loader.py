"""Batches for one data-parallel rank, cut out of one global order of rows.

In: rows by number, a seed, and this rank's place. Out: batches; the position is one cursor in the global order, so it
means the same for every number of ranks and workers.

Global batch b of an epoch is rows cursor … cursor + local_batch_size × dp_world_size of the epoch's order; rank r takes
the r-th part of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hp_components.data.base import BaseDataLoader
from hp_components.data.packing import PADDING_ROW, Batch, PackedRows
from hp_components.data.sources import Corpus, open_corpus
from hp_components.data.token_stream import tokenise
from hp_components.tokenizer.base import BaseTokenizer
from hp_protocols.errors import ConfigError, Fault

__all__ = ["Position", "RankSlice", "RowOrder", "TextDataLoader"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the global order: the epoch, and how many of its rows are done."""

    epoch: int = 0
    cursor: int = 0


@dataclass(frozen=True, slots=True)
class RankSlice:
    """Which part of every global batch a rank takes."""

    local_batch_size: int
    dp_rank: int
    dp_world_size: int

    def __post_init__(self) -> None:
        if self.local_batch_size < 1 or self.dp_world_size < 1:
            raise ValueError(f"local_batch_size and dp_world_size must be at least 1, got {self}")
        if not 0 <= self.dp_rank < self.dp_world_size:
            raise ValueError(f"dp_rank must lie in [0, dp_world_size), got {self}")

    @property
    def global_batch_size(self) -> int:
        return self.local_batch_size * self.dp_world_size


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of the rows in each epoch. `rows` None: endlessly many, in their own order, all in epoch 0."""

    rows: int | None
    shuffle: bool
    seed: int
    epochs: int | None = None

    def batches(self, position: Position, part: RankSlice) -> Iterator[list[int]]:
        """This rank's row numbers, batch by batch, from a position on."""
        while not self.is_over(position):
            order = None if self.rows is None else self._epoch(position.epoch)
            epoch = position.epoch
            while position.epoch == epoch and not self.is_over(position):
                first = position.cursor + part.dp_rank * part.local_batch_size
                wanted = range(first, first + part.local_batch_size)
                if order is None:
                    yield list(wanted)
                else:
                    yield [int(order[i]) if i < len(order) else PADDING_ROW for i in wanted]
                position = self.after(position, part)

    def after(self, position: Position, part: RankSlice) -> Position:
        """The position one global batch on."""
        cursor = position.cursor + part.global_batch_size
        if self.rows is not None and cursor >= self.rows:
            return Position(position.epoch + 1, 0)
        return Position(position.epoch, cursor)

    def is_over(self, position: Position) -> bool:
        return self.epochs is not None and position.epoch >= self.epochs

    def _epoch(self, epoch: int) -> np.ndarray | range:
        assert self.rows is not None
        if not self.shuffle:
            return range(self.rows)
        # numpy promises the raw stream of a bit generator for all versions, and that of `permutation` for none.
        keys = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.rows)
        return np.argsort(keys, kind="stable")


class RowLoader(BaseDataLoader):
    """A dataloader over numbered rows; subclasses say which rows, and what identifies them."""

    def _start(
        self,
        dataset: Dataset[Batch],
        order: RowOrder,
        part: RankSlice,
        *,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
    ) -> None:
        self._dataset, self._order, self._part = dataset, order, part
        self._num_workers, self._prefetch_factor = num_workers, prefetch_factor
        self._position = Position()
        self._batches: Iterator[Batch] | None = None

    @property
    def position(self) -> Position:
        """Where the next batch begins."""
        return self._position

    def __next__(self) -> Batch:
        if self._order.is_over(self._position):
            raise StopIteration
        if self._batches is None:
            self._batches = iter(self._engine())
        batch = next(self._batches)
        # Counted here, where a batch is handed out, and not where a worker fetches it ahead of time.
        before, self._position = self._position, self._order.after(self._position, self._part)
        if before.epoch != self._position.epoch:
            log.info("epoch %d of the data is done", before.epoch + 1)
        return batch

    def _engine(self) -> StatefulDataLoader[Batch]:
        """torchdata's loader from the current position on."""
        return StatefulDataLoader(
            self._dataset,
            batch_sampler=_Batches(self._order, self._position, self._part),
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_factor,
            # Without one of its own it would draw from torch's global generator, and a resumed run would draw once more
            # than an uninterrupted one.
            generator=torch.Generator().manual_seed(self._order.seed),
        )

    def _identity(self) -> dict[str, Any]:
        """Everything that the global order depends on; a state is only good for the same."""
        return {"rows": self._order.rows, "shuffle": self._order.shuffle, "seed": self._order.seed}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._position.epoch, "cursor": self._position.cursor, "identity": self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved, here = state_dict["identity"], self._identity()
        faults = [
            Fault(
                "dataloader",
                f"the checkpoint's data position is for {key} {saved.get(key)!r}, this run has {here.get(key)!r}",
                hint=_HINTS.get(key),
            )
            for key in sorted(saved.keys() | here.keys())
            if saved.get(key) != here.get(key)
        ]
        if faults:
            raise ConfigError(faults)
        self._position = Position(int(state_dict["epoch"]), int(state_dict["cursor"]))
        self._batches = None


_HINTS = {
    "tokens": "the text or its order differs: train on the text of the checkpoint, or start a new run folder",
    "tokenizer": "use the tokenizer that lies in the run folder, or start a new run folder",
    "seq_len": "set --training.seq_len to that of the checkpoint, or start a new run folder",
    "seed": "set the seed of the checkpoint, or start a new run folder",
}


class _Batches:
    """A batch sampler for torch: iterable of lists of row numbers."""

    def __init__(self, order: RowOrder, position: Position, part: RankSlice) -> None:
        self._order, self._position, self._part = order, position, part

    def __iter__(self) -> Iterator[list[int]]:
        return self._order.batches(self._position, self._part)


def _as_it_is(batch: Batch) -> Batch:
    return batch


class TextDataLoader(RowLoader):
    """Packed rows of a text corpus.

    Nothing is lost or repeated within an epoch: rows that do not fill its last global batch are completed with rows of
    padding (all labels −100).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        dataset_path: str | None = None
        """A .txt file, a .jsonl file or a folder of them; unset: the running Python's standard-library sources."""

        text_key: str = "text"
        """The field of a .jsonl line that holds the text."""

        shuffle: bool = True
        """A new order of rows in every epoch; otherwise that of the corpus."""

        shuffle_seed: int | None = None
        """Seed of the order; unset: the run's seed."""

        epochs: int | None = None
        """End after this many passes over the corpus; unset: never."""

        num_workers: int = 0
        """Processes that fetch batches ahead; 0: in the training process. The batches are the same."""

        prefetch_factor: int | None = None
        """Batches that each worker fetches ahead (2 if unset)."""

        def open_corpus(self) -> Corpus:
            return open_corpus(self.dataset_path, text_key=self.text_key)

        def faults(self, path: str) -> list[Fault]:
            """What is wrong with these values, for the whole config's list of faults."""
            return _faults(self, path)

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        seed: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if faults := config.faults("dataloader"):
            raise ConfigError(faults)
        self._tokenizer_fingerprint = tokenizer.fingerprint
        stream = tokenise(config.open_corpus(), tokenizer, cache_dir=cache_dir)
        pad_id = tokenizer.eos_id if tokenizer.eos_id is not None else 0
        rows = PackedRows(stream, seq_len, pad_id)
        order_seed = seed if config.shuffle_seed is None else config.shuffle_seed
        self.rows = rows
        self._start(
            rows,
            RowOrder(rows=len(rows), shuffle=config.shuffle, seed=order_seed, epochs=config.epochs),
            RankSlice(local_batch_size, dp_rank, dp_world_size),
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens in one epoch."""
        return len(self.rows.stream.tokens)

    def _identity(self) -> dict[str, Any]:
        own = {
            "tokens": self.rows.stream.digest,
            "tokenizer": self._tokenizer_fingerprint,
            "seq_len": self.rows.seq_len,
        }
        return super()._identity() | own


def _faults(config: TextDataLoader.Config, path: str) -> list[Fault]:
    faults = []
    if config.num_workers < 0:
        faults.append(Fault(f"{path}.num_workers", f"is {config.num_workers}", allowed="0 or more"))
    if config.prefetch_factor is not None and config.prefetch_factor < 1:
        faults.append(Fault(f"{path}.prefetch_factor", f"is {config.prefetch_factor}", allowed="1 or more"))
    if config.prefetch_factor is not None and config.num_workers == 0:
        faults.append(
            Fault(
                f"{path}.prefetch_factor",
                "is set, but without workers nothing is fetched ahead",
                hint=f"--{path}.num_workers 1",
            )
        )
    if config.epochs is not None and config.epochs < 1:
        faults.append(Fault(f"{path}.epochs", f"is {config.epochs}", allowed="1 or more, or unset for no end"))
    if config.shuffle_seed is not None and config.shuffle_seed < 0:
        faults.append(Fault(f"{path}.shuffle_seed", f"is {config.shuffle_seed}", allowed="0 or more"))
    if not config.text_key:
        faults.append(Fault(f"{path}.text_key", "is empty", allowed="the name of the field that holds the text"))
    return faults
