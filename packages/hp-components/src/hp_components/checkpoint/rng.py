"""The random numbers of one rank: saved exactly, and derived anew when the number of ranks has changed.

In: the generators of this process (python, numpy, torch on cpu and device). Out: a plain dict of their states,
and the way back.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from collections.abc import Sequence
from typing import Any

from hp_protocols.platform import get_platform

__all__ = ["capture_rng", "rederive_rng", "restore_rng"]

logger = logging.getLogger(__name__)


def capture_rng(device_type: str | None = None) -> dict[str, Any]:
    """This process's generator states, in types that load without running code."""
    platform = get_platform()
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "seed": platform.initial_seed(),
        "torch": dict(platform.get_rng_state(device_type)),
        "python": [version, list(internal), gauss],
    }
    if "numpy" in sys.modules:
        import numpy as np

        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state["numpy"] = [name, np.asarray(keys).tolist(), position, has_gauss, cached]
    return state


def restore_rng(state: dict[str, Any], step: int, device_type: str | None = None) -> None:
    """Put every generator where `capture_rng` found it."""
    platform = get_platform()
    here = platform.get_rng_state(device_type)
    if here.keys() == state["torch"].keys():
        platform.set_rng_state(state["torch"], device_type)
    else:
        logger.warning(
            "random numbers: the checkpoint was saved with generators for %s, this process has %s; "
            "the device's is derived from the saved seed and the step",
            sorted(state["torch"]),
            sorted(here),
        )
        platform.manual_seed(_derived(state["seed"], step))
        platform.set_rng_state({**platform.get_rng_state(device_type), "cpu": state["torch"]["cpu"]}, device_type)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "numpy" in state:
        import numpy as np

        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def rederive_rng(seeds: Sequence[int], step: int, rank: int, world_size: int) -> None:
    """Seed every generator for another number of ranks than `seeds` has, the ranks' seeds at saving.

    Ranks that had one common seed get one common seed again; ranks with different seeds, different ones. It
    depends on the saved seeds, the step and the rank only, so that a second resume draws the same numbers.
    """
    seed = _derived(seeds[0], step) if len(set(seeds)) == 1 else _derived(seeds[0], step, world_size, rank)
    get_platform().manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(seed % 2**32)
    if rank == 0:
        logger.warning(
            "random numbers: the checkpoint was saved by %d ranks and is loaded by %d; each rank's generators are "
            "derived anew from the saved seed and step %d",
            len(seeds),
            world_size,
            step,
        )


def _derived(*parts: int) -> int:
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # a torch seed fits 63 bits
