"""`hp version`: the installed versions, read from metadata. In: no options. Out: a table on standard output."""

from __future__ import annotations

import platform
from importlib import metadata

DISTRIBUTIONS = (
    "hp-trainer",
    "hp-config",
    "hp-components",
    "hp-models",
    "hp-protocols",
    "hp-compile",
    "torch",
    "torch-npu",
    "tyro",
    "tokenizers",
)


def main(arguments: list[str]) -> int:
    """Print one line per distribution; optional ones that are missing are said to be so."""
    if arguments:
        print("usage: hp version\n\nVersions of the hyper-parallel packages and of what they run on.")
        return 0 if arguments[0] in ("-h", "--help") else 2
    for name in DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = "not installed"
        print(f"{name:14} {version}")
    print(f"{'python':14} {platform.python_version()}")
    return 0
