"""Optional packages that some data needs, and what to install where one is missing.

In: a package and the extra that brings it. Out: the module, or an ImportError that names the extra.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from hp_protocols.errors import MissingExtraError

__all__ = ["require"]


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """The module `module`.

    Raises:
        MissingExtraError: it is not installed; the message says what it is for and how to get it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # it is installed, and something else is missing
        raise MissingExtraError(
            f'{purpose} needs {module.partition(".")[0]}: pip install "hp-components[{extra}]"'
        ) from error
