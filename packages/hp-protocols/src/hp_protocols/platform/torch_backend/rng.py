"""Random numbers on the cpu and on the device, seeded, saved and forked together.

In: a seed or a saved state. Out: `TorchRandom`, the random half of the platform.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from hp_protocols.platform.base import Platform

__all__ = ["TorchRandom"]


class TorchRandom(Platform):
    """torch's default generators: the cpu's, and that of the current device where there is one."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    @contextmanager
    def fork_rng(self, seed: int | None = None, device: str | None = None) -> Iterator[None]:
        state = self.get_rng_state(device)
        try:
            # torch.manual_seed reaches every device, and only the states that were saved are put back.
            if seed is not None and set(state) == {"cpu"}:
                torch.default_generator.manual_seed(seed)
            elif seed is not None:
                torch.manual_seed(seed)
            yield
        finally:
            self.set_rng_state(state, device)

    def get_rng_state(self, device: str | None = None) -> dict[str, torch.Tensor]:
        kind = self.device_type(device)
        state = {"cpu": torch.get_rng_state()}
        if kind != "cpu":
            state[kind] = torch.get_device_module(kind).get_rng_state()
        return state

    def set_rng_state(self, state: Mapping[str, torch.Tensor], device: str | None = None) -> None:
        kind = self.device_type(device)
        if set(state) != {"cpu", kind}:
            raise ValueError(
                f"the random state is of {sorted(state)}, but this process runs on {sorted({'cpu', kind})}"
            )
        torch.set_rng_state(state["cpu"])
        if kind != "cpu":
            torch.get_device_module(kind).set_rng_state(state[kind])
