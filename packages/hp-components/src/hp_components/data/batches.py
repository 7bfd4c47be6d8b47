"""Items of text gathered into batches that are worth handing to the tokenizer library at once.

In: items and the length of each one's text. Out: lists of items, and a line in the log now and then on a large corpus.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["in_batches"]

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0

T = TypeVar("T")


def in_batches(
    items: Iterable[T], length_of: Callable[[T], int], batch_characters: int, total: int
) -> Iterator[list[T]]:
    """Lists of successive items, each with at least `batch_characters` of text but for the last.

    `total` is the length of all the text, about, for the line in the log.
    """
    batch, size, done, told = list[T](), 0, 0, time.monotonic()
    for item in items:
        batch.append(item)
        size += length_of(item) + 1
        if size < batch_characters:
            continue
        yield batch
        done, batch, size = done + size, [], 0
        if time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            log.info("tokenising: %.0f of about %.0f MB", done / 1e6, total / 1e6)
    if batch:
        yield batch
