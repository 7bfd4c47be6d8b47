"""Check that the torch of this environment is the pinned one. In: the constraints file. Out: exit code 1 if not.

An environment without torch passes. Where a folder of PIP_FIND_LINKS holds a wheel of the pinned version, its
local part (`+cpu`) must match too: a CUDA build costs gigabytes and hides what the CPU build does.
"""

import importlib.metadata
import os
import re
import sys
from pathlib import Path


def main(constraints: str) -> int:
    try:
        installed = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return 0
    pinned = re.search(r"^torch==(\S+)", Path(constraints).read_text(), flags=re.MULTILINE)
    if pinned is None:
        print(f"{constraints} does not pin torch")
        return 1
    expected = {pinned[1]}
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        for wheel in Path(folder).glob(f"torch-{pinned[1]}*.whl"):
            expected = {wheel.name.split("-")[1]}
    if installed not in expected and installed.split("+")[0] not in expected:
        print(f"torch {installed} is installed, expected {' or '.join(expected)} (pinned in {constraints})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
