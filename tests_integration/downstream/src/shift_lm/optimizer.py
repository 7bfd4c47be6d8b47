"""Optimizers that clip every element of the gradients. In: what `OptimizersContainer` takes. Out: its handle."""

from __future__ import annotations

from dataclasses import dataclass

from hp_components import OptimizersContainer
from hp_protocols import Fault


class ValueClippedOptimizers(OptimizersContainer):
    """Element by element, so that it is the same on shards; beside clipping by the global norm."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        clip_value: float = 0.5
        """No element of a gradient is larger than this, in either direction."""

        def faults(self, path: str) -> list[Fault]:
            faults = OptimizersContainer.Config.faults(self, path)
            if not self.clip_value > 0:
                faults.append(Fault(f"{path}.clip_value", f"{self.clip_value} would erase gradients", "above 0"))
            return faults

    def step(self) -> None:
        limit = self.config.clip_value
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-limit, limit)
        super().step()
