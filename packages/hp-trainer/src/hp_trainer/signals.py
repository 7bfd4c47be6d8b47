"""Turn SIGTERM, SIGUSR1 and Ctrl-C into a wish to stop that the training loop reads between two steps.

In: signals. Out: `StopRequest.name`, None until one arrived. A second Ctrl-C ends the process at once.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType

HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# One Ctrl-C reaches a rank twice, from the terminal and from the launcher; people press slower than this.
SAME_PRESS_SECONDS = 1.0


class StopRequest:
    """While entered, the signals set `name` instead of ending the process."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._first_interrupt: float | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in HANDLED:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._first_interrupt is None:
            self._first_interrupt = now
            os.write(2, b"\nhp train: stopping after this step and saving; press Ctrl-C again to end at once\n")
        elif now - self._first_interrupt > SAME_PRESS_SECONDS:
            os.write(2, b"\nhp train: ended at once, nothing was saved since the last checkpoint\n")
            os._exit(130)
