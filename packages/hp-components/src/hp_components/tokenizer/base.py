"""What every tokenizer offers, whatever is behind it.

In: text. Out: token ids, with BOS and EOS as asked for and never doubled, and text again.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hp_protocols.configurable import Configurable

if TYPE_CHECKING:
    from hp_components.tokenizer.chat_template import ChatTemplate

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
    def chat_template(self) -> ChatTemplate | None:
        """How this tokenizer's model wants conversations written; None if it has never seen any."""
        return None

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

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[list[int], list[bool]]]:
        """For each text its ids, without BOS and EOS, and which of them lie in its spans (start, end), even partly.

        This one encodes what lies between two borders by itself; a tokenizer that knows which characters a token
        stands for encodes each text whole.
        """
        encoded = []
        for text, inside in zip(texts, spans, strict=True):
            ids, marks, done = list[int](), list[bool](), 0
            for start, end in [*inside, (len(text), len(text))]:
                for stretch, mark in ((text[done:start], False), (text[start:end], True)):
                    found = self.encode(stretch, add_bos=False, add_eos=False) if stretch else []
                    ids += found
                    marks += [mark] * len(found)
                done = end
            encoded.append((ids, marks))
        return encoded

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, by the chat template of the tokenizer's folder.

        Args:
            messages: objects with `role` and `content`.
            add_generation_prompt: end with what comes before an answer.
            variables: whatever else the template reads (`enable_thinking`, for example).

        Raises:
            ValueError: there is no template, or it refuses these messages.
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template (its folder has no chat_template.jinja)")
        options = {"add_generation_prompt": add_generation_prompt, "tools": tools, **variables}
        return self.chat_template.render(messages, **options)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of `apply_chat_template`: BOS and EOS are what the template writes, and nothing is added."""
        return self.encode_spans([self.apply_chat_template(messages, **options)], [()])[0][0]

    def pieces(self, text: str, length: int) -> list[str]:
        """Cut `text` into pieces of about `length` characters whose ids, one after the other, are the ids of `text`.

        Memory for encoding grows with the longest text, so a corpus in one file needs this. A tokenizer that cannot
        promise it returns the text whole.
        """
        return [text]

    def get_vocab_size(self) -> int:
        """`vocab_size`, by the name that torchtitan gives it."""
        return self.vocab_size
