"""Batches of text for training.

In: `TextDataLoader.Config` (where the text is, in which order), a tokenizer, and this rank's place. Out: batches of
packed rows, endless or for some epochs, that resume exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_components.data.corpus_loader import CorpusDataLoader
from hp_components.data.sources import FileCorpus, open_corpus
from hp_protocols.errors import Fault

__all__ = ["TextDataLoader"]


class TextDataLoader(CorpusDataLoader):
    """Packed rows of a text corpus; see `PackedRows` for the fields of a batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(CorpusDataLoader.Config):
        dataset_path: str | list[str] | None = None
        """A .txt, .jsonl, .json or .parquet file (or .gz of one), a folder or a glob of them, or several of these;
        unset: the running Python's standard-library sources."""

        text_key: str = "text"
        """The field of a record (.jsonl line, .json element, .parquet row) that holds the text."""

        def open_corpus(self) -> FileCorpus:
            return open_corpus(self.dataset_path, text_key=self.text_key, on_bad_line=self.on_bad_line)

        def faults(self, path: str) -> list[Fault]:
            """What is wrong with these values, for the whole config's list of faults."""
            faults = CorpusDataLoader.Config.faults(self, path)
            if not self.text_key:
                faults.append(Fault(f"{path}.text_key", "is empty", allowed="the field that holds the text"))
            return faults
