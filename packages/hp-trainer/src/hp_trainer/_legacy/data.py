"""The older `data` section as configs of the shared dataloaders, and the two kinds of rows that only it knows.

In: a `DataConfig`. Out: a dataloader config: random tokens, text, conversations, or tensors that were prepared before.
Shape suffixes: N rows, S positions, B rows of a batch, F fields.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hp_components import BaseDataLoader, ChatDataLoader, HuggingFaceTextDataLoader, TextDataLoader
from hp_components.data.conversations import ConversationCorpus, ConversationFields
from hp_components.data.dummy import RandomRows
from hp_components.data.order import RankSlice, RowOrder
from hp_components.data.packing import FIELDS, IGNORE_INDEX, PADDING_ROW
from hp_components.data.row_loader import RowLoader
from hp_protocols.errors import ConfigError, Fault

__all__ = ["CountedRandomRows", "FirstTexts", "LegacyRows", "PresetRows", "shift_labels", "text_config"]


def shift_labels(labels_NS: torch.Tensor) -> torch.Tensor:
    """Labels of the next token: one to the left, −100 behind the last."""
    return F.pad(labels_NS, (0, 1), value=IGNORE_INDEX)[:, 1:]


class FirstTexts:
    """The first `count` documents (or records) of a corpus."""

    def __init__(self, corpus: Any, count: int) -> None:
        self.corpus, self.count = corpus, count
        self.on_bad_line = corpus.on_bad_line

    @property
    def name(self) -> str:
        return f"the first {self.count} of {self.corpus.name}"

    @property
    def size(self) -> int:
        return self.corpus.size

    @property
    def fingerprint(self) -> str:
        return f"{self.corpus.fingerprint} first {self.count}"

    def parts(self, faults: Any) -> Iterator[Any]:
        done = 0
        for part in self.corpus.parts(faults):
            yield part
            done += part.last
            if done == self.count:
                return

    def documents(self) -> Iterator[str]:
        return itertools.islice(self.corpus.documents(), self.count)

    def records(self, faults: Any) -> Iterator[Any]:
        return itertools.islice(self.corpus.records(faults), self.count)


class _Text(TextDataLoader):
    """Text of which only the first documents are used."""

    @dataclass(kw_only=True, slots=True)
    class Config(TextDataLoader.Config):
        train_size: int | None = None
        """Only the first so many documents."""

        def open_corpus(self) -> Any:
            return _first(TextDataLoader.Config.open_corpus(self), self.train_size)


class _HubText(HuggingFaceTextDataLoader):
    """Text of the library `datasets` of which only the first rows are used."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        train_size: int | None = None
        """Only the first so many rows."""

        def open_corpus(self) -> Any:
            return _first(HuggingFaceTextDataLoader.Config.open_corpus(self), self.train_size)


class _Chat(ChatDataLoader):
    """Conversations from files or from the library `datasets`, of which only the first are used."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChatDataLoader.Config):
        train_size: int | None = None
        """Only the first so many conversations."""

        hub: HuggingFaceTextDataLoader.Config | None = None
        """Where the conversations are, if not in files."""

        def open_corpus(self) -> Any:
            if self.hub is None:
                corpus = ChatDataLoader.Config.open_corpus(self)
                corpus.corpus = _first(corpus.corpus, self.train_size)
                return corpus
            try:
                records = _first(self.hub.open_corpus(), self.train_size)
            except ConfigError as error:
                # The column is called the text's there.
                hints = ((fault, (fault.hint or "").replace("text_key", "messages_key")) for fault in error.faults)
                raise ConfigError(replace(fault, hint=hint or None) for fault, hint in hints) from error
            return ConversationCorpus(records, ConversationFields("messages", self.messages_key))


def _first(corpus: Any, count: int | None) -> Any:
    return corpus if count is None else FirstTexts(corpus, count)


def text_config(data: Any, epochs: int, path: str, *, training: bool) -> BaseDataLoader.Config:
    """The dataloader config for `json_file` and `hf_datasets`.

    Args:
        path: `data.train_path`, or what is evaluated on.
        training: in the order and number of samples that the section says; otherwise all, as they are.
    """
    common: dict[str, Any] = {
        "shuffle": data.shuffle and training,
        "epochs": epochs,
        "num_workers": data.num_workers,
        "prefetch_factor": data.prefetch_factor,
        # Where there is an accelerator; elsewhere there is nothing to copy to.
        "pin_memory": None if data.pin_memory else False,
    }
    size = data.train_size if training else None
    if data.type == "json_file" and data.template == "empty":
        return _pick(TextDataLoader, _Text, size, common | {"dataset_path": path, "text_key": data.text_key})
    hub = {"dataset": path, "subset": data.subset}
    if data.template == "empty":
        return _pick(HuggingFaceTextDataLoader, _HubText, size, common | hub | {"text_key": data.text_key})
    chat = common | {
        "messages_key": data.messages_key,
        "template": "human_assistant",
        "on_too_long": "truncate",
        # The bare model sees a row as one text: so each conversation has a row of its own.
        "packing": False,
        "document_mask": False,
        "dataset_path": path,
    }
    if data.type == "hf_datasets":
        # The column that holds conversations is looked for as the other loader looks for its text.
        source = HuggingFaceTextDataLoader.Config(**hub, text_key=data.messages_key)
        return _Chat.Config(**chat, hub=source, train_size=size)
    return _pick(ChatDataLoader, _Chat, size, chat)


def _pick(plain: Any, counting: Any, size: int | None, values: dict[str, Any]) -> BaseDataLoader.Config:
    return plain.Config(**values) if size is None else counting.Config(**values, train_size=size)


class PresetRows:
    """Rows from tensors that `torch.save` has written: input_ids, and labels (not shifted) where they differ.

    A file holds a mapping with tensors [N, S], or a list of mappings with tensors [S]. Rows are cut or filled up to
    `seq_len`. An attention_mask tells what is padding, behind the text.

    Raises:
        ConfigError: no such file, or one whose rows cannot be trained on as they are.
    """

    def __init__(self, path: str, seq_len: int, vocab_size: int) -> None:
        self.path, self.seq_len = Path(path), seq_len
        input_NS, labels_NS = _read_preset(self.path, seq_len)
        faults = _range_faults(path, "input_ids", input_NS, vocab_size)
        faults += _range_faults(path, "labels", labels_NS, vocab_size, ignored=IGNORE_INDEX)
        if faults:
            raise ConfigError(faults)
        self.input_NS, self.labels_NS = input_NS, labels_NS
        self.digest = hashlib.sha256(input_NS.numpy().tobytes() + labels_NS.numpy().tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.input_NS)

    def stack(self, indices: Sequence[int]) -> torch.Tensor:
        """The fields of these rows, [F, B, S]; PADDING_ROW gives a row without labels."""
        fields_FBS = torch.zeros(len(FIELDS), len(indices), self.seq_len, dtype=torch.int64)
        fields_FBS[1] = IGNORE_INDEX
        fields_FBS[2] = torch.arange(self.seq_len)
        for place, index in enumerate(indices):
            if index != PADDING_ROW:
                fields_FBS[0, place], fields_FBS[1, place] = self.input_NS[index], self.labels_NS[index]
        return fields_FBS


def _read_preset(path: Path, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, [N, S] each."""
    allowed = "a mapping with input_ids [rows, tokens], or a list of mappings with input_ids [tokens]"
    if not path.is_file():
        raise ConfigError(Fault("data.train_path", f"there is no file {path}", allowed))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for files that are no such
        raise ConfigError(Fault(str(path), f"cannot be read by torch.load: {error}", allowed)) from error
    rows = [content] if isinstance(content, dict) else content
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) and "input_ids" in r for r in rows):
        raise ConfigError(Fault(str(path), "holds no prepared rows", allowed))
    unknown = sorted({str(key) for row in rows for key in row} - {"input_ids", "labels", "attention_mask"})
    if unknown:
        raise ConfigError(Fault(str(path), f"holds {', '.join(unknown)}", "input_ids, labels, attention_mask"))
    inputs, labels = list[torch.Tensor](), list[torch.Tensor]()
    for number, row in enumerate(rows):
        where = str(path) if rows[0] is content else f"{path}[{number}]"
        ids_NS = _whole_numbers(where, "input_ids", row["input_ids"]).long()
        if not ids_NS.numel():
            raise ConfigError(Fault(where, f"input_ids {tuple(ids_NS.shape)} have no tokens", allowed))
        own_NS = _whole_numbers(where, "labels", row.get("labels", ids_NS), like=ids_NS).long()
        if "attention_mask" in row:
            mask_NS = _whole_numbers(where, "attention_mask", row["attention_mask"], like=ids_NS)
            own_NS = own_NS.masked_fill(_checked_mask(where, mask_NS) == 0, IGNORE_INDEX)
        inputs.append(_fit(ids_NS, seq_len, 0))
        labels.append(_fit(own_NS, seq_len, IGNORE_INDEX))
    return torch.cat(inputs), torch.cat(labels)


def _whole_numbers(where: str, key: str, value: object, like: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor of whole numbers [N, S]; of the shape of `like`, if that is given."""
    allowed = "a tensor of whole numbers"
    if not isinstance(value, torch.Tensor):
        problem = f"{key} is of type {type(value).__name__}"
        raise ConfigError(Fault(where, problem, allowed, hint=f"torch.tensor({key}) before torch.save"))
    if value.is_floating_point() or value.is_complex():
        raise ConfigError(Fault(where, f"{key} has numbers of type {value.dtype}", allowed))
    if value.dim() not in (1, 2):
        raise ConfigError(Fault(where, f"{key} has the shape {tuple(value.shape)}", "[tokens] or [rows, tokens]"))
    rows_NS = torch.atleast_2d(value)
    if like is not None and rows_NS.shape != like.shape:
        problem = f"{key} {tuple(rows_NS.shape)} are not of the shape of input_ids {tuple(like.shape)}"
        raise ConfigError(Fault(where, problem, "a value for each token"))
    return rows_NS


def _checked_mask(where: str, mask_NS: torch.Tensor) -> torch.Tensor:
    """An attention mask that needs no attending to: the model is causal, so text does not see what is behind it."""
    mask_NS = mask_NS.long()
    if (others_NS := (mask_NS != 0) & (mask_NS != 1)).any():
        raise ConfigError(Fault(where, f"attention_mask has the value {int(mask_NS[others_NS][0])}", "0 and 1"))
    after_padding_N = (mask_NS[:, 1:] > mask_NS[:, :-1]).any(1)
    if after_padding_N.any():
        problem = f"attention_mask of row {int(after_padding_N.nonzero()[0])} has a 0 before a 1"
        hint = "a token sees all that comes before it: pad behind the text; labels of -100 leave tokens untrained"
        raise ConfigError(Fault(where, problem, "ones, then zeros", hint))
    return mask_NS


def _range_faults(
    path: str, key: str, ids_NS: torch.Tensor, vocab_size: int, ignored: int | None = None
) -> list[Fault]:
    """The first id that the model has no row for."""
    bad_NS = (ids_NS < 0) | (ids_NS >= vocab_size)
    if ignored is not None:
        bad_NS &= ids_NS != ignored
    if not bad_NS.any():
        return []
    row, place = bad_NS.nonzero()[0].tolist()
    found = int(ids_NS[row, place])
    problem = f"{key} has the token id {found} in row {row} at {place}, and the model has {vocab_size} ids"
    either = "" if ignored is None else f"{ignored}, or "
    hint = f"model.vocab_size: {found + 1} or more" if found > 0 else "give padding any id, and attention_mask 0"
    return [Fault(path, problem, f"{either}0 to {vocab_size - 1}", hint)]


def _fit(rows_NS: torch.Tensor, seq_len: int, fill: int) -> torch.Tensor:
    return F.pad(rows_NS[:, :seq_len], (0, max(0, seq_len - rows_NS.shape[1])), value=fill)


class CountedRandomRows:
    """The first `count` rows of random tokens, so that they have epochs."""

    def __init__(self, count: int, seq_len: int, vocab_size: int, seed: int) -> None:
        self.count, self.rows = count, RandomRows(seq_len, vocab_size, seed)
        self.digest = f"{count} {seq_len} {vocab_size} {seed}"

    def __len__(self) -> int:
        return self.count

    def stack(self, indices: Sequence[int]) -> torch.Tensor:
        fields_FBS = self.rows.stack([max(index, 0) for index in indices])
        fields_FBS[1, np.asarray(indices) == PADDING_ROW] = IGNORE_INDEX
        return fields_FBS


class LegacyRows(RowLoader):
    """A dataloader over rows that are in memory: prepared tensors, or counted random ones."""

    @dataclass(kw_only=True, slots=True)
    class Config(RowLoader.Config):
        preset_path: str | None = None
        """A file of prepared tensors; without it rows are random tokens."""

        random_rows: int | None = None
        """How many random rows there are; by default they have no end."""

        vocab_size: int
        """Tokens are below this."""

        shuffle: bool = True
        """A new order of rows in every epoch."""

        epochs: int | None = None
        """End after this many passes."""

        collate: Any = None
        """Labels of the rows → those of the next token, where they are not that already."""

        train_size: int | None = None
        """Only the first so many rows."""

    def __init__(
        self,
        config: Config,
        *,
        seq_len: int,
        local_batch_size: int,
        tokenizer: object = None,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        seed: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        rows: PresetRows | CountedRandomRows | RandomRows
        if config.preset_path is not None:
            rows = PresetRows(config.preset_path, seq_len, config.vocab_size)
            if config.collate is not None:
                rows.labels_NS = config.collate(rows.labels_NS)
        elif config.random_rows is not None:
            rows = CountedRandomRows(config.random_rows, seq_len, config.vocab_size, seed)
        else:
            rows = RandomRows(seq_len, config.vocab_size, seed)
        endless = isinstance(rows, RandomRows)
        count = None if isinstance(rows, RandomRows) else min(len(rows), config.train_size or len(rows))
        # Random rows without end are in random order already.
        shuffle, epochs = config.shuffle and not endless, None if endless else config.epochs
        digest = f"{config.vocab_size} {seed}" if isinstance(rows, RandomRows) else rows.digest
        how_many = "rows" if count is None else f"{count} rows"
        self._text = f"{config.preset_path or f'random tokens below {config.vocab_size}'}: {how_many} of {seq_len}"
        super().__init__(
            rows,
            RowOrder(rows=count, shuffle=shuffle, seed=seed, epochs=epochs),
            RankSlice(local_batch_size, dp_rank, dp_world_size),
            identity={"rows": digest, "count": count, "seq_len": seq_len, "shuffle": shuffle, "seed": seed},
            prefetch=config.prefetch(seed, dp_rank),
        )

    def __str__(self) -> str:
        return self._text
