"""All the checks of `nox -s contracts`, each run even when an earlier one fails. Out: exit code 1 if any failed.

import-linter (layers, torch-free packages, private modules), private names, sibling version ranges, deptry
(every import declared), ruff (lint and format), mypy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import borders
import ranges
from packaging.requirements import Requirement

BIN = Path(sys.executable).parent


def run(root: Path, *command: str, **variables: str) -> list[str]:
    """Run a tool of this environment in `root`; its output is the fault if it exits with another code than 0."""
    environ = {**os.environ, **variables}
    result = subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=root, env=environ, capture_output=True, text=True
    )
    return [(result.stdout + result.stderr).strip()] if result.returncode else []


def check_imports(root: Path) -> list[str]:
    # The packages of `root`, not those that are installed, which may be another copy.
    sources = os.pathsep.join(str(path) for path in sorted(root.glob("packages/*/src")))
    return run(root, "lint-imports", "--no-cache", PYTHONPATH=sources)


def check_declared(root: Path) -> list[str]:
    """Every import of a package is declared in its own pyproject; nothing declared is unused, extras apart."""
    faults = []
    for package in sorted((root / "packages").iterdir()):
        settings = tomllib.loads((package / "pyproject.toml").read_text())
        extras = settings["project"].get("optional-dependencies", {}).values()
        unused = {Requirement(text).name for texts in extras for text in texts}
        unused |= set(settings.get("tool", {}).get("hyper-parallel", {}).get("declared-ahead", []))
        ignored = ["--per-rule-ignores", f"DEP002={'|'.join(sorted(unused))}"] if unused else []
        faults += run(package, "deptry", "src", "--no-ansi", *ignored)
    return faults


def check_lint(root: Path) -> list[str]:
    return run(root, "ruff", "check", ".") + run(root, "ruff", "format", "--check", ".")


def check_types(root: Path) -> list[str]:
    return run(root, "mypy", *[str(path) for path in sorted(root.glob("packages/*/src/hp_*"))])


CHECKS: dict[str, Callable[[Path], list[str]]] = {
    "imports": check_imports,
    "borders": borders.find_faults,
    "ranges": ranges.find_faults,
    "declared": check_declared,
    "lint": check_lint,
    "types": check_types,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", help=f"which to run (default: all): {', '.join(CHECKS)}")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    arguments = parser.parse_args()
    unknown = set(arguments.checks) - set(CHECKS)
    if unknown:
        parser.error(f"no check {', '.join(sorted(unknown))}; there are: {', '.join(CHECKS)}")
    failed = []
    for name in arguments.checks or CHECKS:
        faults = CHECKS[name](arguments.root)
        print(f"{name:10} {'✗' if faults else '✓'}", flush=True)
        if faults:
            failed.append(name)
            print("\n".join(faults), flush=True)
    print(f"{len(failed)} of {len(arguments.checks or CHECKS)} checks failed" if failed else "all contracts hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
