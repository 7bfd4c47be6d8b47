"""What every dataloader offers, whatever is behind it.

In: a config and this rank's place among the data-parallel ranks. Out: batches, and a state that resumes exactly, also
under another number of ranks.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hp_components.data.formats import Skipped
from hp_components.data.packing import Batch
from hp_components.data.sources import Corpus
from hp_components.data.token_stream import TokenStream
from hp_components.tokenizer.base import BaseTokenizer
from hp_protocols.configurable import Configurable

__all__ = ["BaseDataLoader"]


class BaseDataLoader(ABC, Configurable):
    """An iterator over this rank's batches.

    It is its own iterator: a second loop goes on where the first one stopped.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        def open_corpus(self) -> Corpus | None:
            """The text behind this loader, to train a tokenizer on; None if there is none."""
            return None

        def tokenise(
            self, corpus: Any, tokenizer: BaseTokenizer, *, cache_dir: str | os.PathLike[str] | None = None
        ) -> TokenStream | None:
            """The tokens of what `open_corpus` gave, from the cache or worked out now; None if there is no text."""
            return None

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Equal on all ranks that draw from the same rows in the same order; the trainer compares it."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    @abstractmethod
    def __next__(self) -> Batch:
        """The next batch: input, labels, positions, segment_ids, each [local batch, seq_len] int64.

        Where documents must not see each other it also has `cu_seqlens`, int32 and always on the host: where in the
        flattened batch each document begins, and the number of its tokens at the end.
        """

    @property
    def skipped(self) -> Skipped:
        """Bad places of the data that were left out, where the config says that they are to be."""
        return Skipped()

    @property
    def document_mask(self) -> bool:
        """Whether batches have `cu_seqlens`, so that documents that share a row do not see each other."""
        return False

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that was handed out. The same on every rank."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position. Raises ConfigError for the state of another dataset, naming the difference."""
