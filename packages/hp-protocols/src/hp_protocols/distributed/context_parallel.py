"""Context parallelism: several ranks share one sequence. Not available yet; refused by name.

In: what a parallelize function will pass. Out: `ConfigError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from hp_protocols.errors import ConfigError, Fault

if TYPE_CHECKING:
    from hp_protocols.platform import DeviceMesh, Module

__all__ = ["apply_cp"]


def apply_cp(model: Module, *, mesh: DeviceMesh, **options: Any) -> NoReturn:
    """Refuse: models cannot share a sequence between ranks yet.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        Fault(
            "parallelism.context_parallel_degree",
            f"context parallelism of {type(model).__name__} is not available yet",
            allowed="1",
            hint="use data_parallel_shard_degree instead, or a shorter training.seq_len",
        )
    )
