"""A tokenizer from a folder as Hugging Face models have them.

In: a folder with tokenizer.json (or vocab.json and merges.txt). Out: the ids that transformers gives, without
transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_components.tokenizer.base import BaseTokenizer
from hp_components.tokenizer.folder import read_folder
from hp_components.tokenizer.library import LibraryTokenizer
from hp_protocols.errors import Fault

__all__ = ["HuggingFaceTokenizer"]


class HuggingFaceTokenizer(LibraryTokenizer):
    """Reads a tokenizer folder. Text that spells out a special token (`<|endoftext|>`) becomes that token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        tokenizer_path: str
        """Folder with tokenizer.json, or with vocab.json and merges.txt; or the path of a tokenizer.json."""

        def faults(self, path: str) -> list[Fault]:
            """What is wrong with these values, for the whole config's list of faults."""
            if self.tokenizer_path:
                return []
            return [Fault(f"{path}.tokenizer_path", "is empty", allowed="a folder with tokenizer.json")]

    def __init__(self, config: Config) -> None:
        super().__init__(read_folder(config.tokenizer_path))
