"""Notices about a configuration that is used, but not quite as it was given.

In: a message. Out: one warning in the log, not one per rank.
"""

from __future__ import annotations

import logging
import os

__all__ = ["warn_once"]

logger = logging.getLogger("hp_config")


def warn_once(message: str, *arguments: object) -> None:
    """Log a warning, but only on the first rank: every rank of a run reads the same command."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(message, *arguments)
