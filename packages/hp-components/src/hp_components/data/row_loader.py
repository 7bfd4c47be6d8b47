"""A dataloader over numbered rows, with a position that resumes exactly.

In: rows by number, their global order, this rank's place. Out: batches, and a state of one cursor.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hp_components.data.base import BaseDataLoader
from hp_components.data.order import Position, RankSlice, RowOrder
from hp_components.data.packing import Batch, Rows, as_batch, document_bounds
from hp_components.data.prefetch import Prefetch, StackIterator
from hp_protocols.errors import ConfigError, Fault

__all__ = ["RowLoader", "smallest_faults"]

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

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        num_workers: int = 0
        """Processes that fetch batches ahead; 0: in the training process. The batches are the same."""

        prefetch_factor: int | None = None
        """Batches that each worker fetches ahead (8 if unset)."""

        pin_memory: bool | None = None
        """Batches in page-locked memory, which an accelerator copies from while it computes; unset: if there is one."""

        worker_timeout_seconds: float = 300.0
        """How long a worker may take for a batch before the run fails."""

        def faults(self, path: str) -> list[Fault]:
            """What is wrong with these values, for the whole config's list of faults."""
            faults = smallest_faults(self, path, {"num_workers": 0, "prefetch_factor": 1})
            if self.prefetch_factor is not None and self.num_workers == 0:
                problem = "is set, but without workers nothing is fetched ahead"
                faults.append(Fault(f"{path}.prefetch_factor", problem, hint=f"--{path}.num_workers 1"))
            if not self.worker_timeout_seconds > 0:
                problem = f"is {self.worker_timeout_seconds:g}"
                faults.append(Fault(f"{path}.worker_timeout_seconds", problem, allowed="more than 0"))
            if self.pin_memory and not torch.accelerator.is_available():
                problem = "is set, but there is no accelerator here to pin memory for"
                faults.append(
                    Fault(f"{path}.pin_memory", problem, hint="leave it unset: it is then used where it helps")
                )
            return faults

        def prefetch(self, seed: int, dp_rank: int) -> Prefetch:
            """How this config fetches ahead; worker seeds differ between ranks."""
            return Prefetch(
                num_workers=self.num_workers,
                prefetch_factor=self.prefetch_factor,
                pin_memory=torch.accelerator.is_available() if self.pin_memory is None else self.pin_memory,
                timeout_seconds=self.worker_timeout_seconds,
                seed=int(np.random.SeedSequence([seed, dp_rank]).generate_state(1)[0]),
            )

    def __init__(
        self,
        rows: Rows,
        order: RowOrder,
        part: RankSlice,
        *,
        identity: Mapping[str, Any],
        prefetch: Prefetch | None = None,
        document_mask: bool = False,
    ) -> None:
        """Start at the beginning of the order.

        Args:
            identity: plain values that name everything the rows and their order depend on; a saved position is only
                good where they are the same.
            document_mask: batches say where documents begin, so that they need not see each other.
        """
        self._rows, self._order, self._part = rows, order, part
        self._identity = {"kind": type(self).__name__, **identity}
        self._prefetch, self._document_mask = prefetch or Prefetch(), document_mask
        self._position = Position()
        self._stacks: StackIterator | None = None

    @property
    def position(self) -> Position:
        """Where the next batch begins."""
        return self._position

    @property
    def document_mask(self) -> bool:
        return self._document_mask

    @property
    def fingerprint(self) -> str:
        """Equal on all ranks that draw from the same rows in the same order."""
        return json.dumps(self._identity, sort_keys=True)

    def __next__(self) -> Batch:
        if self._order.is_over(self._position):
            self._stacks = None  # ends the workers
            raise StopIteration
        if self._stacks is None:
            batches = _Batches(self._order, self._position, self._part)
            self._stacks = StackIterator(self._rows, batches, self._prefetch)
        batch = as_batch(next(self._stacks))
        if self._document_mask:
            batch["cu_seqlens"] = document_bounds(batch["segment_ids"])
        # Counted here, where a batch is handed out, and not where a worker fetches it ahead of time.
        before, self._position = self._position, self._order.after(self._position, self._part)
        if before.epoch != self._position.epoch:
            log.info("epoch %d of the data is done", before.epoch + 1)
        return batch

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


def smallest_faults(config: object, path: str, smallest: Mapping[str, int]) -> list[Fault]:
    """A fault for each of these fields that is set and below its smallest value."""
    values = {name: getattr(config, name) for name in smallest}
    return [
        Fault(f"{path}.{name}", f"is {value}", allowed=f"{smallest[name]} or more")
        for name, value in values.items()
        if value is not None and value < smallest[name]
    ]


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


class _Batches:
    """A batch sampler for torch: an iterable of lists of row numbers."""

    def __init__(self, order: RowOrder, position: Position, part: RankSlice) -> None:
        self._order, self._position, self._part = order, position, part

    def __iter__(self) -> Iterator[list[int]]:
        return self._order.batches(self._position, self._part)
