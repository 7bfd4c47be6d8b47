"""What a backend can do, by name, and the error for what it cannot.

In: nothing. Out: `Capability` (one member per group of platform functions) and `CapabilityError`, which
names the feature and the backend, so that a missing feature is never mistaken for a bug.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Capability", "CapabilityError"]


class Capability(StrEnum):
    """One group of `Platform` members that a backend offers completely or not at all."""

    NN = "nn"
    """`Module`, `Parameter`, `Tensor`, `Linear`, `Embedding`, `nn`, `F`, `ops`, `init`."""

    DTYPES = "dtypes"
    """`dtype_map`."""

    DEVICES = "devices"
    """Device probing, device objects, `synchronize`, `empty_cache`, memory figures."""

    RNG = "rng"
    """Seeding, saved and forked random states."""

    INIT_ON_DEVICE = "init_on_device"
    """Building a model on a chosen device, the meta device among them."""

    COLLECTIVES = "collectives"
    """Process groups and collectives."""

    DTENSOR = "dtensor"
    """Device meshes, placements, distributed tensors, `local_map`."""

    FSDP = "fsdp"
    """Sharded and replicated data parallelism."""

    GRAD_CLIPPING = "grad_clipping"
    """Clipping by the global gradient norm."""

    ACTIVATION_CHECKPOINT = "activation_checkpoint"
    """Recomputing activations in backward."""

    COMPILE = "compile"
    """Compiling modules."""

    PROFILING = "profiling"
    """The device's profiler and the history of its memory."""


class CapabilityError(NotImplementedError):
    """The chosen backend does not offer a feature.

    Attributes:
        feature: what was asked for, as the caller wrote it (`all_reduce`).
        capability: the group that the feature belongs to.
        backend: the name of the platform that was asked.
    """

    def __init__(self, feature: str, capability: Capability, backend: str, hint: str | None = None) -> None:
        self.feature = feature
        self.capability = capability
        self.backend = backend
        self.hint = hint
        text = f"platform {backend!r} does not offer {feature!r} (capability {capability.value!r})"
        super().__init__(f"{text}; {hint}" if hint else text)

    def __reduce__(self) -> tuple[type[CapabilityError], tuple[str, Capability, str, str | None]]:
        return type(self), (self.feature, self.capability, self.backend, self.hint)
