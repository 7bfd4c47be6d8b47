"""What every tokenizer offers, whatever is behind it.

In: text. Out: token ids, with BOS and EOS as asked for and never doubled, and text again.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hp_protocols.configurable import Configurable

__all__ = ["BaseTokenizer"]


class BaseTokenizer(ABC, Configurable):
    """Text to token ids and back.

    `bos_id` and `eos_id` are None where the tokenizer has no such token. Every id is below `vocab_size`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        trains_on_corpus: ClassVar[bool] = False
        """Whether `build` takes a `corpus` (and a `cache_dir`) to train on."""

    bos_id: int | None
    eos_id: int | None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id, so that an embedding with that many rows holds every token."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Two tokenizers with the same fingerprint give the same ids for every text."""

    @abstractmethod
    def encode(self, text: str, *, add_bos: bool | None = None, add_eos: bool | None = None) -> list[int]:
        """Token ids of `text`.

        `add_bos` and `add_eos`: True puts the token there (once, also if the text spells it out), False does not,
        None does what the tokenizer's own files say.

        Raises:
            ValueError: True for a token that this tokenizer does not have; text with half a surrogate pair.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Raises ValueError for an id outside [0, vocab_size)."""

    @abstractmethod
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write files from which HuggingFaceTokenizer (and transformers) make the same tokenizer."""

    def encode_batch(
        self, texts: Sequence[str], *, add_bos: bool | None = None, add_eos: bool | None = None
    ) -> list[list[int]]:
        """`encode` for many texts, in their order."""
        return [self.encode(text, add_bos=add_bos, add_eos=add_eos) for text in texts]

    def pieces(self, text: str, length: int) -> list[str]:
        """Cut `text` into pieces of about `length` characters whose ids, one after the other, are the ids of `text`.

        Memory for encoding grows with the longest text, so a corpus in one file needs this. A tokenizer that cannot
        promise it returns the text whole.
        """
        return [text]

    def get_vocab_size(self) -> int:
        """`vocab_size`, by the name that torchtitan gives it."""
        return self.vocab_size
