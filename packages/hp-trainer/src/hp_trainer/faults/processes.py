"""What the system and the interpreter know of processes and threads.

In: a pid, an exception, a thread. Out: whether it lives, whether it lost the other ranks, where in the code it stands.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType, TracebackType

import torch.distributed as dist

__all__ = ["error_place", "is_gone", "is_stopped", "lost_others", "main_stack", "main_waits", "place_of_main"]

# What the backends say when another rank is gone or late (gloo by its source files, the others by name).
_LOST = re.compile(
    r"gloo/|\bgloo\b.*(fail|timed? ?out)|NCCL|HCCL|Connection (closed|reset) by peer|Broken pipe|Socket Timeout"
    r"|Timed out waiting|collective operation timeout|Watchdog caught",
    re.IGNORECASE,
)
_TORCH = os.sep + "torch" + os.sep
# Where a thread stands that waits for other ranks: in a collective, or in the wait for one that runs beside it.
_COMMUNICATION = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_WAITS = ("wait_tensor", "synchronize", "barrier", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def lost_others(error: BaseException) -> bool:
    """Whether an error says that a message to or from other ranks failed, or took too long."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, dist.DistError) or (isinstance(found, RuntimeError) and _LOST.search(str(found))):
            return True
        found = found.__cause__ or found.__context__
    return False


def is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended; one that its parent has not yet looked after has."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _state(pid) in ("Z", "X")


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped by a signal or a debugger."""
    return _state(pid) in ("T", "t")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""  # no such file system: nobody knows


def place_of_main() -> str:
    """`file.py:12 in function`: the innermost line of the main thread that is not torch's."""
    frame = _main_frame()
    return _place([(frame, frame.f_lineno) for frame in _frames(frame)])


def error_place(trace: TracebackType | None) -> str:
    """The same for an error."""
    return _place([(frame, line) for frame, line in traceback.walk_tb(trace)][::-1])


def main_waits() -> bool:
    """Whether the main thread is in a call that waits for other ranks, as far as its innermost lines show."""
    for frame in _frames(_main_frame())[:3]:
        code = frame.f_code
        if code.co_filename.replace(os.sep, "/").endswith(_COMMUNICATION) or code.co_name in _WAITS:
            return True
        # An operator of torch; the line that calls it says which.
        if not code.co_filename.endswith("torch" + os.sep + "_ops.py"):
            return False
    return False


def main_stack() -> str:
    """The main thread's whole stack, as in a traceback."""
    return "".join(traceback.format_stack(_main_frame()))


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _frames(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _place(frames: list[tuple[FrameType, int]]) -> str:
    """Of frames, innermost first."""
    own = next((pair for pair in frames if _TORCH not in pair[0].f_code.co_filename), None)
    if own is None:
        return ""
    frame, line = own
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{line} in {frame.f_code.co_name}"
