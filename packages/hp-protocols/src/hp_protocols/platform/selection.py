"""Which backend this process runs on.

In: the variable HYPER_PARALLEL_PLATFORM (`torch`, `mindspore`), or what is installed, torch first.
Out: `get_platform()`, one `Platform` per process. Nothing is imported before the first call.
"""

from __future__ import annotations

import importlib.util
import os
import re
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Platform

__all__ = ["PLATFORM_VARIABLE", "get_platform", "platform_name"]

PLATFORM_VARIABLE = "HYPER_PARALLEL_PLATFORM"

# In the order in which they are tried: name → how to install it.
_INSTALL = {
    "torch": 'pip install "hp-protocols[torch]"',
    "mindspore": 'pip install "hp-protocols[mindspore]"',
}

_lock = threading.RLock()
_platform: Platform | None = None
_failure: ImportError | None = None


def platform_name() -> str:
    """The name of the backend that `get_platform` loads, without importing it.

    Raises:
        ValueError: HYPER_PARALLEL_PLATFORM names no backend.
        ImportError: the variable is unset and no backend is installed.
    """
    given = os.environ.get(PLATFORM_VARIABLE)
    if given is not None:
        if given not in _INSTALL:
            allowed = ", ".join(_INSTALL)
            raise ValueError(f"{PLATFORM_VARIABLE}={given!r} names no platform; allowed: {allowed}")
        return given
    for name in _INSTALL:
        if importlib.util.find_spec(name) is not None:
            return name
    ways = " or ".join(_INSTALL.values())
    raise ImportError(f"no backend is installed: {ways}")


def get_platform() -> Platform:
    """The platform of this process: the backend's types, devices, random numbers and collectives.

    The choice is made once; a later change of HYPER_PARALLEL_PLATFORM has no effect on a running process.

    Raises:
        ValueError: HYPER_PARALLEL_PLATFORM names no backend.
        ImportError: the backend is not installed, or its import fails; the text says what to do.
    """
    # Read without the lock first: layers come here from forward, and torch.compile cannot trace a lock.
    return _platform if _platform is not None else _load()


def _load() -> Platform:
    global _platform, _failure
    with _lock:
        if _platform is not None:
            return _platform
        if _failure is not None:
            # A second `import torch` after a failed one fails with another, misleading message.
            raise _failure
        name = platform_name()
        try:
            _platform = _import_platform(name)
        except ImportError as error:
            _failure = error
            raise
        return _platform


def _import_platform(name: str) -> Platform:
    if importlib.util.find_spec(name) is None:
        raise ImportError(f"platform {name!r} is chosen, but {name} is not installed: {_INSTALL[name]}", name=name)
    if name == "mindspore":
        from .mindspore_backend import MindsporePlatform

        return MindsporePlatform()
    _import_torch()
    from .torch_backend import TorchPlatform

    return TorchPlatform()


def _import_torch() -> None:
    """Import torch, and explain the one failure whose own message does not say enough: a broken device extension.

    torch loads every installed extension at import; torch_npu without CANN takes torch down with it.
    """
    try:
        import torch  # noqa: F401
    except Exception as error:
        extension = re.search(r"Failed to load the backend extension: (\w+)", str(error))
        if extension is None:
            raise
        remedy = "install and source the CANN toolkit (ASCEND_HOME_PATH), " if extension[1] == "torch_npu" else ""
        raise ImportError(
            f"importing torch failed while it loaded the installed device extension {extension[1]} "
            f"({_root_cause(error)}): {remedy}uninstall {extension[1]}, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to run "
            "without it; then start the program again",
            name="torch",
        ) from error


def _root_cause(error: BaseException) -> str:
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"
