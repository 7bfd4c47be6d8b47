"""A dataloader over numbered rows, with a position that resumes exactly.

In: rows by number, their global order, this rank's place. Out: batches, and a state of one cursor.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hp_components.data.base import BaseDataLoader
from hp_components.data.order import Position, RankSlice, RowOrder
from hp_components.data.packing import Batch, Rows, as_batch
from hp_protocols.errors import ConfigError, Fault

__all__ = ["RowLoader"]

log = logging.getLogger(__name__)

_HINTS = {
    "kind": "use the dataloader that the checkpoint was made with, or start a new run folder",
    "tokens": "train on the text and with the tokenizer of the checkpoint, or start a new run folder",
    "tokenizer": "use the tokenizer of the checkpoint (it lies in the run folder), or start a new run folder",
    "seq_len": "set --training.seq_len to that of the checkpoint, or start a new run folder",
    "seed": "set the seed of the checkpoint, or start a new run folder",
}


class RowLoader(BaseDataLoader):
    """Subclasses say which rows, and what identifies them."""

    def __init__(
        self,
        rows: Rows,
        order: RowOrder,
        part: RankSlice,
        *,
        identity: Mapping[str, Any],
        num_workers: int = 0,
        prefetch_factor: int | None = None,
    ) -> None:
        """Start at the beginning of the order.

        Args:
            identity: plain values that name everything the rows and their order depend on; a saved position is only
                good where they are the same.
        """
        self._rows, self._order, self._part = rows, order, part
        self._identity = {"kind": type(self).__name__, **identity}
        self._num_workers, self._prefetch_factor = num_workers, prefetch_factor
        self._position = Position()
        self._stacks: Iterator[torch.Tensor] | None = None

    @property
    def position(self) -> Position:
        """Where the next batch begins."""
        return self._position

    @property
    def fingerprint(self) -> str:
        """Equal on all ranks that draw from the same rows in the same order."""
        return json.dumps(self._identity, sort_keys=True)

    def __next__(self) -> Batch:
        if self._order.is_over(self._position):
            self._stacks = None  # ends the workers
            raise StopIteration
        if self._stacks is None:
            self._stacks = iter(self._engine())
        try:
            batch = as_batch(next(self._stacks))
        except (ConnectionError, EOFError, FileNotFoundError) as error:
            # What torch runs into when a worker dies while it hands over a batch; otherwise it says so itself.
            raise RuntimeError(f"a DataLoader worker died while it handed over a batch ({error!r})") from error
        # Counted here, where a batch is handed out, and not where a worker fetches it ahead of time.
        before, self._position = self._position, self._order.after(self._position, self._part)
        if before.epoch != self._position.epoch:
            log.info("epoch %d of the data is done", before.epoch + 1)
        return batch

    def _engine(self) -> StatefulDataLoader[torch.Tensor]:
        """torchdata's loader, from the current position on."""
        with warnings.catch_warnings():
            # torchdata 0.11 announces itself to torch in a way that torch 2.13 deprecates.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            return StatefulDataLoader(
                _Fetched(self._rows),
                batch_sampler=_Batches(self._order, self._position, self._part),
                collate_fn=_as_it_is,
                num_workers=self._num_workers,
                prefetch_factor=self._prefetch_factor,
                # Without one of its own it draws from torch's global generator, and a resumed run would then have
                # drawn once more than an uninterrupted one.
                generator=torch.Generator().manual_seed(0),
            )

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._position.epoch, "cursor": self._position.cursor, "identity": dict(self._identity)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        try:
            saved = dict(state_dict["identity"])
            position = Position(int(state_dict["epoch"]), int(state_dict["cursor"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(Fault("dataloader", f"the checkpoint holds no data position ({error!r})")) from error
        if faults := _differences(saved, self._identity):
            raise ConfigError(faults)
        self._position = position
        self._stacks = None


def _differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[Fault]:
    """One fault per thing that a position depends on and that is not as it was."""
    if saved.get("kind") != here["kind"]:
        keys = ["kind"]
    elif saved.get("tokens") == here.get("tokens"):
        # The same tokens by whatever tokenizer; its files may be written differently by another version.
        keys = [key for key in here if key != "tokenizer"]
    else:
        keys = [key for key in here if key != "tokens" or saved.get("tokenizer") == here.get("tokenizer")]
    return [
        Fault(
            "dataloader",
            f"the checkpoint's data position is for {key} {saved.get(key)!r}, this run has {here[key]!r}",
            hint=_HINTS.get(key, "set it as it was for the checkpoint, or start a new run folder"),
        )
        for key in keys
        if saved.get(key) != here[key]
    ]


class _Fetched(Dataset[torch.Tensor]):
    """Rows as torch's fetcher takes them, a batch at a time."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __getitems__(self, indices: Sequence[int]) -> torch.Tensor:
        return self._rows.stack(indices)


class _Batches:
    """A batch sampler for torch: an iterable of lists of row numbers."""

    def __init__(self, order: RowOrder, position: Position, part: RankSlice) -> None:
        self._order, self._position, self._part = order, position, part

    def __iter__(self) -> Iterator[list[int]]:
        return self._order.batches(self._position, self._part)


def _as_it_is(fields_FBS: torch.Tensor) -> torch.Tensor:
    return fields_FBS
