"""The frame of a subcommand: its usage, its mistakes as text, the exit code of each way to end.

In: a name, a usage text, the work. Out: an exit code: 0 fine, 1 it could not be done, 2 a mistake in the command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from hp_protocols.errors import ConfigError, MissingExtraError
from hp_trainer.cli import messages

__all__ = ["run_command"]


def run_command(name: str, usage: str, arguments: list[str], work: Callable[[list[str]], None]) -> int:
    """Run `work(arguments)`, unless the usage is asked for or nothing is said; returns the exit code.

    A `ConfigError` is a mistake in the command; an `OSError` or a `CheckpointError`, a disk that does not take what the
    command writes, is no reason for a traceback either. Every other exception is, and passes.
    """
    asked = bool({"-h", "--help"} & set(arguments))
    if asked or not arguments:
        print(usage, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        work(arguments)
    except ConfigError as error:
        messages.print_mistakes(name, error)
        return 2
    except MissingExtraError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise  # `| head` has read enough: not this command's failure
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return messages.fail(name, f"{place}{error.strerror or error}")
    except RuntimeError as error:
        from hp_components import CheckpointError

        if not isinstance(error, CheckpointError):
            raise
        return messages.fail(name, str(error))
    return 0
