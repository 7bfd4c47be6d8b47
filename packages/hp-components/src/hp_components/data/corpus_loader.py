"""A dataloader over the tokens of a corpus: what text and conversations have in common.

In: a config that opens a corpus and tokenises it, a tokenizer, this rank's place. Out: batches of packed rows, endless
or for some epochs, that resume exactly.
"""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from hp_components.data.formats import BadLinePolicy, Skipped
from hp_components.data.order import RankSlice, RowOrder
from hp_components.data.packing import PackedRows
from hp_components.data.row_loader import RowLoader, smallest_faults
from hp_components.data.token_stream import TokenStream
from hp_components.data.tokenising import tokenise
from hp_components.tokenizer.base import BaseTokenizer
from hp_protocols.errors import ConfigError, Fault

__all__ = ["CorpusDataLoader"]

log = logging.getLogger(__name__)


class CorpusDataLoader(RowLoader):
    """Rows of a corpus; subclasses say where it comes from.

    Nothing is lost or repeated within an epoch: rows that do not fill its last global batch are completed with rows of
    padding (all labels −100).
    """

    documents_are: ClassVar[str] = "document"

    @dataclass(kw_only=True, slots=True)
    class Config(RowLoader.Config):
        on_bad_line: BadLinePolicy = "error"
        """A bad line ends the run before it begins ("error"), or is left out, counted and reported ("skip")."""

        shuffle: bool = True
        """A new order of rows in every epoch; otherwise that of the corpus."""

        shuffle_seed: int | None = None
        """Seed of the order; unset: the run's seed."""

        epochs: int | None = None
        """End after this many passes over the corpus; unset: never."""

        document_mask: bool = False
        """Documents that share a row do not see each other. The model must know how to take their boundaries."""

        @abstractmethod
        def open_corpus(self) -> Any:
            """What the rows are made of."""

        def tokenise(
            self, corpus: Any, tokenizer: BaseTokenizer, *, cache_dir: str | os.PathLike[str] | None = None
        ) -> TokenStream:
            return tokenise(corpus, tokenizer, cache_dir=cache_dir)

        def faults(self, path: str) -> list[Fault]:
            """What is wrong with these values, for the whole config's list of faults."""
            faults = RowLoader.Config.faults(self, path)
            faults += smallest_faults(self, path, {"epochs": 1, "shuffle_seed": 0})
            if self.shuffle_seed is not None and not self.shuffle:
                faults.append(
                    Fault(f"{path}.shuffle_seed", "is set, but nothing is shuffled", hint=f"--{path}.shuffle")
                )
            return faults

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
        self.config, self.stream = config, config.tokenise(corpus, tokenizer, cache_dir=cache_dir)
        self._corpus_name = corpus.name
        self._skipped = self.stream.skipped
        self.rows = self.make_rows(seq_len, pad_id=0 if tokenizer.eos_id is None else tokenizer.eos_id)
        # Once, and not by every rank.
        for note in (str(self._skipped) if self._skipped.total else "", getattr(self.rows, "note", "")):
            if note and dp_rank == 0:
                log.warning("%s: %s", corpus.name, note)
        order_seed = seed if config.shuffle_seed is None else config.shuffle_seed
        super().__init__(
            self.rows,
            RowOrder(rows=len(self.rows), shuffle=config.shuffle, seed=order_seed, epochs=config.epochs),
            RankSlice(local_batch_size, dp_rank, dp_world_size),
            identity={
                "tokens": self.stream.digest,
                "tokenizer": tokenizer.fingerprint,
                "seq_len": seq_len,
                "shuffle": config.shuffle,
                "seed": order_seed if config.shuffle else None,
                **self.row_identity(),
            },
            prefetch=config.prefetch(seed, dp_rank),
            document_mask=config.document_mask,
        )

    def make_rows(self, seq_len: int, pad_id: int) -> Any:
        """The rows of the stream."""
        return PackedRows(self.stream, seq_len, pad_id)

    def row_identity(self) -> dict[str, Any]:
        """What, beside the tokens and their order, the content of row i depends on."""
        return {}

    @property
    def skipped(self) -> Skipped:
        return self._skipped

    def __str__(self) -> str:
        documents = len(self.stream.starts)
        counts = f"{documents:,} {self.documents_are}{'s' * (documents != 1)}, {self.num_tokens:,} tokens"
        return f"{self._corpus_name}: {counts}, {self.num_rows:,} rows of {self.rows.seq_len} per epoch"

    @property
    def num_rows(self) -> int:
        """Rows in one epoch."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens in one epoch, without padding."""
        return len(self.stream.tokens)
