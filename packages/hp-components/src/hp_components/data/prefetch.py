"""Batches fetched ahead in worker processes, on torchdata's loader; a worker that dies or hangs is an error.

In: rows, an iterable of row numbers batch by batch, how many workers. Out: the stacks of these rows, in that order.
"""

from __future__ import annotations

import logging
import multiprocessing
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hp_components.data.packing import Rows
from hp_protocols.errors import ConfigError, Fault

__all__ = ["Prefetch", "StackIterator"]

log = logging.getLogger(__name__)

# Batches of tokens are small, and a worker that is some batches ahead does not matter when it has to wait for a core.
PREFETCH_FACTOR = 8


@dataclass(frozen=True, slots=True)
class Prefetch:
    """How batches are fetched ahead. `timeout_seconds`: how long a batch may take to come from a worker."""

    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    timeout_seconds: float = 300.0
    seed: int = 0


class StackIterator:
    """An iterator over stacks of rows, [F, B, S]."""

    def __init__(self, rows: Rows, batches: Iterable[list[int]], options: Prefetch) -> None:
        self._options = options
        self._workers: list[BaseProcess] = []
        with warnings.catch_warnings():
            # torchdata 0.11 announces itself to torch in a way that torch 2.13 deprecates.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            self._stacks = iter(self._loader(rows, batches))

    def _loader(self, rows: Rows, batches: Iterable[list[int]]) -> StatefulDataLoader[Any]:
        options, ahead = self._options, dict[str, Any]()
        if options.num_workers:
            ahead = {
                "prefetch_factor": options.prefetch_factor or PREFETCH_FACTOR,
                "timeout": options.timeout_seconds,
                "multiprocessing_context": _recording_context(self._workers),
            }
        return StatefulDataLoader(
            _Fetched(rows),
            batch_sampler=batches,
            collate_fn=_as_it_is,
            num_workers=options.num_workers,
            pin_memory=options.pin_memory,
            # Without one of its own it draws from torch's global generator, and a resumed run would then have drawn
            # once more than an uninterrupted one. Worker w starts with the seed drawn from it plus w.
            generator=torch.Generator().manual_seed(options.seed),
            # A row loader's state is its own cursor; torchdata's would be sent along with every batch.
            snapshot_every_n_steps=2**31,
            **ahead,
        )

    def __iter__(self) -> StackIterator:
        return self

    def __next__(self) -> torch.Tensor:
        try:
            stack = next(self._stacks)
        except (ConnectionError, EOFError, FileNotFoundError) as error:
            # What torch runs into when a worker dies while it hands over a batch; otherwise it says so itself.
            self._kill()
            raise RuntimeError(f"a DataLoader worker died while it handed over a batch ({error!r})") from error
        except StopIteration:
            raise
        except Exception as error:
            self._kill()
            if isinstance(error, RuntimeError) and "timed out after" in str(error):
                raise RuntimeError(self._late()) from error
            raise
        if isinstance(stack, _Refused):
            self._kill()
            log.error("a DataLoader worker met this:\n%s", stack.trace)
            raise ConfigError(stack.faults)
        return stack

    def _late(self) -> str:
        options = self._options
        return (
            f"no DataLoader worker (of {options.num_workers}) has delivered the next batch within "
            f"{options.timeout_seconds:g} s: the disk hangs, or dataloader.worker_timeout_seconds is too short for it"
        )

    def _kill(self) -> None:
        """End all workers: one that hangs does not listen to anything gentler."""
        for worker in self._workers:
            try:
                worker.kill()
                worker.join(5)
            except RuntimeError:
                # torch's signal handler, which takes the worker killed here for one that died.
                continue


def _recording_context(started: list[BaseProcess]) -> BaseContext:
    """The usual way to start processes; the processes started by it are put into the list."""
    usual: Any = type(multiprocessing.get_context(multiprocessing.get_start_method()))

    class Recording(usual):
        def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:
            started.append(usual.Process(*args, **kwargs))
            return started[-1]

    return Recording()


@dataclass(frozen=True, slots=True)
class _Refused:
    """Faults on their way from a worker, where torch would only carry their text."""

    faults: Sequence[Fault]
    trace: str


class _Fetched(Dataset[Any]):
    """Rows as torch's fetcher takes them, a batch at a time."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __getitems__(self, indices: Sequence[int]) -> torch.Tensor | _Refused:
        try:
            return self._rows.stack(indices)
        except ConfigError as error:
            if torch.utils.data.get_worker_info() is None:
                raise
            return _Refused(tuple(error.faults), traceback.format_exc())


def _as_it_is(stack: Any) -> Any:
    return stack
