"""Doing something on every rank and agreeing on whether it worked.

In: the work of one rank. Out: its result on every rank, or the same error on every rank; without this, a rank
that fails alone leaves the others waiting in the next collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from hp_components.checkpoint.errors import CheckpointError
from hp_protocols.errors import ConfigError
from hp_protocols.platform import get_platform

__all__ = ["on_all_ranks", "on_rank_zero"]

T = TypeVar("T")


def on_all_ranks(what: str, work: Callable[[], T], group: Any = None) -> T:
    """Run `work` on every rank.

    Args:
        what: the work as it reads after "cannot", for the error.
        work: may raise anything; it must not leave this rank alone in a collective.
        group: the process group to agree over, of all ranks; None is the default one. A thread beside the main one
            needs a group of its own.

    Raises:
        ConfigError: some rank found the user's mistake; all faults of all ranks, each once.
        CheckpointError: it failed otherwise on some rank; names the ranks and their reasons.
    """
    result: T | None = None
    error: BaseException | None = None
    try:
        result = work()
    # torch's CheckpointException is a BaseException.
    except (Exception, CheckpointException) as caught:
        error = caught
    faults = tuple(error.faults) if isinstance(error, ConfigError) else ()
    reports = get_platform().all_gather_object((_reason(error), faults), group)
    if all_faults := dict.fromkeys(fault for _, faults in reports for fault in faults):
        raise ConfigError(all_faults) from error
    reasons: dict[str, list[int]] = {}
    for rank, (reason, _) in enumerate(reports):
        if reason is not None:
            reasons.setdefault(reason, []).append(rank)
    if reasons:
        told = "; ".join(f"{_ranks(ranks, len(reports))}{reason}" for reason, ranks in reasons.items())
        raise CheckpointError(f"cannot {what}: {told}") from error
    return result  # type: ignore[return-value]


def on_rank_zero(what: str, work: Callable[[], T], group: Any = None) -> T:
    """Run `work` on rank 0 and give its result to every rank; errors as in `on_all_ranks`."""
    platform = get_platform()
    result = on_all_ranks(what, work if platform.rank() == 0 else lambda: None, group)
    return platform.broadcast_object(result, group=group)


def _reason(error: BaseException | None) -> str | None:
    if error is None:
        return None
    if isinstance(error, CheckpointException):
        # torch has gathered the ranks' own errors already; the same text then comes from every rank.
        return "; ".join(f"rank {rank}: {_plain(cause)}" for rank, (cause, _) in sorted(error.failures.items()))
    return _plain(error)


def _plain(error: BaseException) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def _ranks(ranks: list[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
