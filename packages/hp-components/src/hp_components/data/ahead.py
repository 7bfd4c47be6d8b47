"""A generator that runs ahead in a thread: reading goes on while its reader computes.

In: an iterator. Out: the same items, in the same order; what it raises is raised where the item would have come.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar, cast

__all__ = ["run_ahead"]

T = TypeVar("T")
_END = object()


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def run_ahead(items: Iterable[T], depth: int = 2) -> Iterator[T]:
    """`items`, of which up to `depth` are worked out ahead of time. Closing the generator ends the thread."""
    waiting: queue.Queue[object] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: object) -> bool:
        while not stopped.is_set():
            try:
                waiting.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    return
        except BaseException as error:
            put(_Raised(error))
        else:
            put(_END)

    thread = threading.Thread(target=work, name="hp-data-reader", daemon=True)
    thread.start()
    try:
        while (item := waiting.get()) is not _END:
            if isinstance(item, _Raised):
                raise item.error
            yield cast(T, item)
    finally:
        stopped.set()
        thread.join()
