"""One log line per run instead of one per rank. In: a logger and a message. Out: the line, from rank 0 only."""

from __future__ import annotations

import logging

from hp_protocols.platform import get_platform

__all__ = ["log"]


def log(logger: logging.Logger, level: int, message: str, *arguments: object) -> None:
    """Log on rank 0: for what every rank comes by with the same to say."""
    if get_platform().rank() == 0:
        logger.log(level, message, *arguments)
