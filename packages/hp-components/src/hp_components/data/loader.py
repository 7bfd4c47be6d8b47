"""Batches of text for training.

In: `TextDataLoader.Config` (where the text is, in which order), a tokenizer, and this rank's place. Out: batches of
packed rows, endless or for some epochs, that resume exactly.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from hp_components.data.base import BaseDataLoader
from hp_components.data.order import RankSlice, RowOrder
from hp_components.data.packing import PackedRows
from hp_components.data.row_loader import RowLoader
from hp_components.data.sources import Corpus, open_corpus
from hp_components.data.token_stream import tokenise
from hp_components.tokenizer.base import BaseTokenizer
from hp_protocols.errors import ConfigError, Fault

__all__ = ["TextDataLoader"]


class TextDataLoader(RowLoader):
    """Packed rows of a text corpus; see `PackedRows` for the fields of a batch.

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
            return [*_number_faults(self, path), *_combination_faults(self, path)]

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
        """Build from `config`; the corpus is tokenised now unless the cache has it.

        Args:
            local_batch_size: rows per batch of this rank.
            dp_rank, dp_world_size: this rank's place among those that take different data.
            seed: of the order, unless the config has its own.
            cache_dir: see `hp_components.data.cache.cache_root`.

        Raises:
            ConfigError: values that cannot be, or a corpus that cannot be read.
        """
        if faults := config.faults("dataloader"):
            raise ConfigError(faults)
        corpus = config.open_corpus()
        stream = tokenise(corpus, tokenizer, cache_dir=cache_dir)
        self._corpus_name = corpus.name
        self.rows = PackedRows(stream, seq_len, pad_id=0 if tokenizer.eos_id is None else tokenizer.eos_id)
        order_seed = seed if config.shuffle_seed is None else config.shuffle_seed
        super().__init__(
            self.rows,
            RowOrder(rows=len(self.rows), shuffle=config.shuffle, seed=order_seed, epochs=config.epochs),
            RankSlice(local_batch_size, dp_rank, dp_world_size),
            identity={
                "tokens": stream.digest,
                "tokenizer": tokenizer.fingerprint,
                "seq_len": seq_len,
                "shuffle": config.shuffle,
                "seed": order_seed if config.shuffle else None,
            },
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor,
        )

    def __str__(self) -> str:
        documents = len(self.rows.stream.starts)
        counts = f"{documents:,} document{'s' * (documents != 1)}, {self.num_tokens:,} tokens"
        return f"{self._corpus_name}: {counts}, {self.num_rows:,} rows of {self.rows.seq_len} per epoch"

    @property
    def num_rows(self) -> int:
        """Rows in one epoch."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens in one epoch, without padding."""
        return len(self.rows.stream.tokens)


def _number_faults(config: TextDataLoader.Config, path: str) -> list[Fault]:
    smallest = {"num_workers": 0, "prefetch_factor": 1, "epochs": 1, "shuffle_seed": 0}
    values = {name: getattr(config, name) for name in smallest}
    return [
        Fault(f"{path}.{name}", f"is {value}", allowed=f"{smallest[name]} or more")
        for name, value in values.items()
        if value is not None and value < smallest[name]
    ]


def _combination_faults(config: TextDataLoader.Config, path: str) -> list[Fault]:
    faults = []
    if config.prefetch_factor is not None and config.num_workers == 0:
        problem = "is set, but without workers nothing is fetched ahead"
        faults.append(Fault(f"{path}.prefetch_factor", problem, hint=f"--{path}.num_workers 1"))
    if config.shuffle_seed is not None and not config.shuffle:
        faults.append(Fault(f"{path}.shuffle_seed", "is set, but nothing is shuffled", hint=f"--{path}.shuffle"))
    if not config.text_key:
        faults.append(Fault(f"{path}.text_key", "is empty", allowed="the name of the field that holds the text"))
    return faults
