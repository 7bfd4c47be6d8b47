"""Extras of this package. In: a module's name and the extra that installs it. Out: the fault, if it is missing."""

from __future__ import annotations

import importlib.util

from hp_protocols.errors import Fault

__all__ = ["missing_extra_fault"]


def missing_extra_fault(where: str, module: str, extra: str) -> Fault | None:
    """A fault with the command that installs the extra, unless the module can be imported."""
    spec = importlib.util.find_spec(module)
    # A folder of that name in the working folder (W&B leaves one in each run folder) is no package.
    if spec is not None and spec.origin is not None:
        return None
    return Fault(where, f"needs {module}, which is not installed", hint=f'pip install "hp-components[{extra}]"')
