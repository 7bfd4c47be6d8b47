"""How a process of `hp` ends. In: an exit code. Out: nothing, the process is gone."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import NoReturn

__all__ = ["end_process"]


def end_process(code: int) -> NoReturn:
    """End this process; where torch.distributed was in use, without unwinding the interpreter.

    Everything of the run is closed by now, and what libraries have registered for the end is called. Unwinding after
    that was seen to abort now and then in a communication thread of torch (SIGABRT, "terminate called without an
    active exception"), which a launcher or a script takes for a failure.
    """
    if "torch.distributed.distributed_c10d" not in sys.modules:
        sys.exit(code)
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
