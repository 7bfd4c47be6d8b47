"""Text from the library `datasets`: a dataset of the hub, files it can read, or a folder that it has saved.

In: `HuggingFaceTextDataLoader.Config`, a tokenizer, and this rank's place. Out: batches as those of `TextDataLoader`:
the dataset is tokenised once, and then one cursor over packed rows says where a run is.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_components.data.corpus_loader import CorpusDataLoader
from hp_components.data.extras import require
from hp_components.data.formats import BadLinePolicy, FaultList, Part, readable
from hp_components.data.records import Record, text_of
from hp_components.data.sources import CONTENT_HASH_LIMIT, whole_documents
from hp_protocols.errors import ConfigError, Fault, nearest

__all__ = ["DatasetCorpus", "HuggingFaceTextDataLoader"]

ROWS_AT_ONCE = 1000
# What `datasets` takes for a way to read files. Without files these read whatever lies in the working folder.
FILE_READERS = ("arrow", "csv", "json", "pandas", "parquet", "sql", "text", "webdataset", "xml")


class DatasetCorpus:
    """The documents in a column of a map-style dataset, in its order."""

    def __init__(
        self, dataset: Any, *, name: str, text_key: str = "text", on_bad_line: BadLinePolicy = "error"
    ) -> None:
        """Raises ConfigError where there is no such column of text."""
        self.dataset, self.name, self.text_key, self.on_bad_line = dataset, name, text_key, on_bad_line
        columns = list(dataset.column_names)
        if text_key not in columns:
            close = nearest(text_key, columns) or "NAME"
            problem = f"has no column {text_key!r} (its columns: {', '.join(map(repr, columns)) or 'none'})"
            raise ConfigError(Fault(name, problem, hint=f"--dataloader.text_key {close}"))

    @property
    def size(self) -> int:
        return sum(Path(file["filename"]).stat().st_size for file in self.dataset.cache_files) or len(self.dataset)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the Arrow files (by content where they are small) and what of them is in the dataset."""
        files = [Path(file["filename"]) for file in self.dataset.cache_files]
        about = [self.text_key, self.on_bad_line, str(self.dataset.split), len(self.dataset), self.dataset.features]
        digest = hashlib.sha256(f"datasets 1 {about}".encode())
        if not files:  # a dataset in memory
            for text in self.dataset[self.text_key]:
                digest.update(repr(text).encode())
        by_content = sum(file.stat().st_size for file in files) <= CONTENT_HASH_LIMIT
        for file in files:
            if by_content:
                with readable(file), open(file, "rb") as handle:
                    digest.update(hashlib.file_digest(handle, "sha256").digest())
            else:
                digest.update(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
        return digest.hexdigest()

    def records(self, faults: FaultList) -> Iterator[Record]:
        number = 0
        for rows in self.dataset.iter(batch_size=ROWS_AT_ONCE):
            for values in zip(*rows.values(), strict=True):
                number += 1
                yield Record(f"{self.name}: row {number}", dict(zip(rows, values, strict=True)))

    def parts(self, faults: FaultList) -> Iterator[Part]:
        texts = self.dataset.select_columns(self.text_key)
        number = 0
        for rows in texts.iter(batch_size=ROWS_AT_ONCE):
            for value in rows[self.text_key]:
                number += 1
                record = Record(f"{self.name}: row {number}", {self.text_key: value})
                if (text := text_of(record, self.text_key, faults)) is not None:
                    yield Part(text)

    def documents(self) -> Iterator[str]:
        return whole_documents(self)


class HuggingFaceTextDataLoader(CorpusDataLoader):
    """Packed rows of a dataset of the library `datasets` (extra `hf-datasets`)."""

    @dataclass(kw_only=True, slots=True)
    class Config(CorpusDataLoader.Config):
        dataset: str = ""
        """A dataset of the hub; or what reads `data_files` ("json", "parquet", "csv", "text", "arrow"); or a folder
        that `Dataset.save_to_disk` has written."""

        subset: str | None = None
        """The subset ("configuration") of the dataset, where it has several."""

        split: str = "train"
        """The split, also a part of it: train[:10%]."""

        data_files: str | list[str] | None = None
        """Files, or globs of them, for a `dataset` that reads files."""

        revision: str | None = None
        """The branch, tag or commit of a dataset of the hub."""

        text_key: str = "text"
        """The column that holds the text."""

        streaming: bool = False
        """Not offered: see the message that it gives."""

        def open_corpus(self) -> DatasetCorpus:
            name = self.dataset + (f"/{self.subset}" if self.subset else "") + f" ({self.split})"
            return DatasetCorpus(_load(self), name=name, text_key=self.text_key, on_bad_line=self.on_bad_line)

        def faults(self, path: str) -> list[Fault]:
            """What is wrong with these values, for the whole config's list of faults."""
            faults = CorpusDataLoader.Config.faults(self, path)
            for name in ("dataset", "split", "text_key"):
                if not getattr(self, name):
                    faults.append(Fault(f"{path}.{name}", "is empty"))
            if self.dataset in FILE_READERS and not self.data_files:
                faults.append(Fault(f"{path}.data_files", f"is not set, and {self.dataset!r} reads files"))
            if self.streaming:
                faults.append(
                    Fault(
                        f"{path}.streaming",
                        "a streamed dataset has no order of rows that goes on under another number of ranks",
                        hint="leave it off: the dataset is loaded and tokenised once, and never held in memory",
                    )
                )
            return faults


def _load(config: HuggingFaceTextDataLoader.Config) -> Any:
    """The dataset. Raises ConfigError where it cannot be had, and MissingExtraError without the library."""
    datasets = require("datasets", "hf-datasets", "HuggingFaceTextDataLoader")
    where = "dataloader.dataset"
    folder = Path(config.dataset).expanduser()
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        return _from_disk(datasets, config, folder)
    try:
        return datasets.load_dataset(
            config.dataset,
            config.subset,
            split=config.split,
            data_files=config.data_files,
            revision=config.revision,
        )
    except (OSError, ValueError, RuntimeError) as error:
        # The library and the hub's client say what is missing (a connection, a file, a split) in the error's text.
        problem = f"{config.dataset!r} cannot be loaded: {type(error).__name__}: {error}"
        hint = None
        if not os.path.exists(config.dataset) and config.data_files is None:
            hint = "a dataset of the hub needs a connection to it, or its copy in this machine's cache"
        raise ConfigError(Fault(where, problem, hint=hint)) from error
    except datasets.exceptions.DatasetsError as error:
        cause = f": {error.__cause__}" if error.__cause__ else ""
        raise ConfigError(Fault(where, f"{config.dataset!r} cannot be loaded: {error}{cause}")) from error


def _from_disk(datasets: Any, config: HuggingFaceTextDataLoader.Config, folder: Path) -> Any:
    unused = [name for name in ("subset", "data_files", "revision") if getattr(config, name) is not None]
    if unused:
        raise ConfigError(
            [Fault(f"dataloader.{name}", f"is set, but {folder} is a saved dataset, which has none") for name in unused]
        )
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise ConfigError(Fault(str(folder), f"cannot be loaded: {error}")) from error
    if not isinstance(loaded, datasets.DatasetDict):
        if config.split not in ("train", str(loaded.split)):
            raise ConfigError(Fault("dataloader.split", f"{folder} has no split {config.split!r}: it is one dataset"))
        return loaded
    if config.split not in loaded:
        allowed = ", ".join(map(str, loaded)) or None
        raise ConfigError(Fault("dataloader.split", f"{folder} has no split {config.split!r}", allowed=allowed))
    return loaded[config.split]
