"""The torch backend for cpu, cuda and npu.

In: an installed torch. Out: `TorchPlatform`; its parts are cut along devices, random numbers and collectives.
"""

from .platform import TorchPlatform

__all__ = ["TorchPlatform"]
