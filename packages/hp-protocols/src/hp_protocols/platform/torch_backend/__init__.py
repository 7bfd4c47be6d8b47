"""The torch backend for cpu, cuda and npu.

In: an installed torch. Out: `TorchPlatform`; its parts are cut along devices, random numbers, collectives, meshes, data
parallelism and modules.
"""

import importlib.util

if importlib.util.find_spec("torch") is None:
    raise ImportError('the torch backend needs torch: pip install "hp-protocols[torch]"', name="torch")

from .platform import TorchPlatform

__all__ = ["TorchPlatform"]
