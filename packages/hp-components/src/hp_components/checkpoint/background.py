"""One save that goes on while training does.

In: the work. Out: a `Background` that says whether it is done, waits for it, and hands back its result or error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Background"]

T = TypeVar("T")


class Background(Generic[T]):
    """Runs `work` in a thread, from now on."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._result: T | None = None
        self._error: BaseException | None = None
        self.seconds = 0.0
        # Daemon: a process that ends by an error must not wait for a rank that is gone; close() waits otherwise.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            self._result = self._work()
        except BaseException as error:  # handed to whoever asks for the result
            self._error = error
        self.seconds = time.perf_counter() - began

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def result(self) -> T:
        """Wait for it; what `work` returned, or raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]
