"""Sibling requirements have honest ranges. In: the repository root. Out: a list of faults.

A requirement on another package of ours has a lower and an upper bound, never `==`; the version in the tree
satisfies it; its lower bound is a released version (a tag `hp-<x>-vX.Y.Z`) or the version in the tree.
"""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement


def released_versions(root: Path, name: str) -> set[str]:
    tags = subprocess.run(["git", "tag", "--list", f"{name}-v*"], cwd=root, capture_output=True, text=True, check=True)
    return {tag.removeprefix(f"{name}-v") for tag in tags.stdout.split()}


def find_faults(root: Path) -> list[str]:
    projects = {
        path.parent.name: tomllib.loads(path.read_text())["project"] for path in root.glob("packages/*/pyproject.toml")
    }
    faults = []
    for package, project in sorted(projects.items()):
        extras = project.get("optional-dependencies", {}).values()
        texts = [*project.get("dependencies", []), *(text for texts in extras for text in texts)]
        for requirement in map(Requirement, texts):
            if requirement.name not in projects:
                continue
            version = projects[requirement.name]["version"]
            where = f"packages/{package}/pyproject.toml: {requirement}"
            bounds = {specifier.operator: specifier.version for specifier in requirement.specifier}
            if set(bounds) != {">=", "<"}:
                faults.append(f"{where}: give both bounds, >= and <, and nothing else")
            elif not requirement.specifier.contains(version, prereleases=True):
                faults.append(f"{where}: the version in the tree is {version}")
            elif bounds[">="] not in {version, version.removesuffix(".0")} | released_versions(root, requirement.name):
                faults.append(f"{where}: {bounds['>=']} is neither released nor the version in the tree ({version})")
    return faults
