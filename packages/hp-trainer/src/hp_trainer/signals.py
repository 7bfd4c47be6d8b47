"""Turn SIGTERM, SIGUSR1 and Ctrl-C into a wish to stop that the training loop reads between two steps.

In: signals. Out: `StopRequest.name`, None until one arrived; a second Ctrl-C ends the process at once, whatever it is
in. Before training begins there is nothing to save: `EndBeforeTraining` ends the process at the first signal, until a
`StopRequest` takes its place. At no instant between them does a signal end the process by itself.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from types import FrameType, TracebackType

from hp_trainer.faults.activity import LAUNCHER_FOLDER, Status, activity

HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# One Ctrl-C reaches a rank twice, from the terminal and from the launcher; people press slower than this.
SAME_PRESS_SECONDS = 1.0
STOPPING = "stop-asked"
"""File in the launcher's folder: the signal comes from a person or a scheduler, not from a launcher that cleans up."""


class _Signals(ABC):
    """While entered, signals are taken by a thread, at once: Python's own handlers run in the main thread, which may
    be in a collective that waits for another rank, or in a write, and so only when that is over."""

    def __init__(self) -> None:
        self._previous: dict[int, object] = {}

    @abstractmethod
    def on_signal(self, number: int) -> None:
        """Called in the thread, for each signal."""

    def on_main(self, number: int, frame: FrameType | None) -> None:  # noqa: B027 (most have nothing to do there)
        """Called in the main thread, when it comes back to Python."""

    def __enter__(self) -> _Signals:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._read, name="hp-signals", daemon=True)
        self._thread.start()
        for number in HANDLED:
            self._previous[number] = signal.signal(number, self.on_main)
        _entered.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self not in _entered:
            return  # another has taken its place, or this process was forked from the one that entered
        _entered.remove(self)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_fd)
        self._end_thread()

    def _take_place_of(self, other: _Signals) -> None:
        """Put back, at the end, what was there before the other, which takes only what has arrived by now."""
        _entered.remove(other)
        self._previous, self._previous_fd = other._previous, other._previous_fd
        other._end_thread()

    def _end_thread(self) -> None:
        # For processes that were forked meanwhile too, such as data workers: they hold this end open.
        self._writer.shutdown(socket.SHUT_RDWR)  # which ends the thread
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _read(self) -> None:
        while numbers := self._reader.recv(64):
            for number in numbers:
                if number in HANDLED:
                    self.on_signal(number)


class StopRequest(_Signals):
    """While entered, the signals set `name` instead of ending the process. Takes the place of `EndBeforeTraining`."""

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None
        self._first_interrupt: float | None = None

    def __enter__(self) -> StopRequest:
        super().__enter__()
        for one in [one for one in _entered if isinstance(one, EndBeforeTraining)]:
            self._take_place_of(one)
        return self

    def on_main(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name

    def on_signal(self, number: int) -> None:
        self.name = signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._first_interrupt is None:
            self._first_interrupt = now
            _say_once("\nhp train: stopping after this step and saving; press Ctrl-C again to end at once")
        elif now - self._first_interrupt > SAME_PRESS_SECONDS:
            _say_once("\nhp train: ended at once, nothing was saved since the last checkpoint")
            activity.end(Status.QUIET)
            os._exit(130)


class EndBeforeTraining(_Signals):
    """While entered, a signal ends the process at once and says that nothing was run.

    A `StopRequest` that is entered meanwhile ends this for good.
    """

    def on_signal(self, number: int) -> None:
        folder = os.environ.get(LAUNCHER_FOLDER)
        # A launcher that stops the ranks because one of them failed says itself what has happened.
        if folder is None or os.path.exists(os.path.join(folder, STOPPING)):
            name = signal.Signals(number).name
            _say_once(f"\nhp train: ended by {name} before training began ({activity.where}); nothing was run")
        activity.end(Status.QUIET)
        os._exit(130 if number == signal.SIGINT else 1)


def _say_once(text: str) -> None:
    """All ranks get the signal; rank 0 speaks."""
    if activity.rank == 0:
        os.write(2, f"{text}\n".encode())


_entered: list[_Signals] = []


def _forget_in_child() -> None:
    """A data worker ends with its parent. What it inherited would report its own signals as the parent's."""
    if _entered:
        _entered.clear()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent goes on to its save


os.register_at_fork(after_in_child=_forget_in_child)
