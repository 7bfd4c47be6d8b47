"""Are the lowest versions that a package allows the ones that are installed here?

In: the folder of a package, and extras. Out: exit code 1 and the differences, if a requirement is installed in
another version than its lower bound. `nox -s lowest` asks before it tests, so that it does not test the newest.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


def main() -> int:
    folder, extras = Path(sys.argv[1]), sys.argv[2:]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    texts = list(project.get("dependencies", []))
    for extra in extras:
        texts += project["optional-dependencies"][extra]
    wrong = []
    for requirement in map(Requirement, texts):
        lower = [Version(spec.version) for spec in requirement.specifier if spec.operator in (">=", "==", "~=")]
        installed = Version(metadata.version(requirement.name))
        if not lower:
            wrong.append(f"{requirement.name} has no lower bound")
        # Registries do not keep every patch release of a minor version: 2.0 may be served as 2.0.0.
        elif installed.release[: len(max(lower).release)] != max(lower).release:
            wrong.append(f"{requirement} is installed as {installed}")
        else:
            print(f"{requirement.name} {installed}")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
