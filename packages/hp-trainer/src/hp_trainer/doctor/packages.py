"""Are the hyper-parallel packages and what they require installed, in versions that fit?

In: the metadata of installed distributions. Out: one finding per package, and one per extra that is not complete.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hp_trainer.doctor.findings import Finding, Level

__all__ = ["PACKAGES", "examine_packages"]

PACKAGES = ("hp-trainer", "hp-config", "hp-components", "hp-models", "hp-protocols", "hp-compile")

# Extras that bring a device; whether one is missed depends on the machine (see accelerators).
_DEVICE_EXTRAS = {"npu", "mindspore", "torch", "all"}


def examine_packages() -> list[Finding]:
    """Python, each package with its requirements, and the extras that are not installed."""
    findings = [Finding("python", Level.OK, f"{platform.python_version()} ({sys.executable})")]
    extras: list[Finding] = []
    for name in PACKAGES:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            findings.append(_not_installed(name))
            continue
        findings.append(_examine_requirements(name, distribution))
        extras += _examine_extras(name, distribution)
    return findings + extras


def _not_installed(name: str) -> Finding:
    if name == "hp-compile":
        return Finding(name, Level.OPTIONAL, "not installed: no compile.mode=graph", 'pip install "hp-trainer[graph]"')
    return Finding(name, Level.BROKEN, "not installed", f"pip install {name}")


def _examine_requirements(name: str, distribution: metadata.Distribution) -> Finding:
    wrong = [problem for requirement in _required(distribution, "") if (problem := _problem(requirement))]
    if not wrong:
        return Finding(name, Level.OK, distribution.version)
    found = f"{distribution.version}, but " + "; ".join(wrong)
    return Finding(name, Level.BROKEN, found, f"pip install --upgrade {name}")


def _examine_extras(name: str, distribution: metadata.Distribution) -> Iterator[Finding]:
    for extra in distribution.metadata.get_all("Provides-Extra") or []:
        if extra in _DEVICE_EXTRAS:
            continue
        own = [requirement for requirement in _required(distribution, extra) if requirement.marker]
        wrong = [problem for requirement in own if (problem := _problem(requirement))]
        if wrong:
            yield Finding(f"{name}[{extra}]", Level.OPTIONAL, "; ".join(wrong), f'pip install "{name}[{extra}]"')


def _required(distribution: metadata.Distribution, extra: str) -> Iterator[Requirement]:
    """The requirements that count with one extra; with an empty one, those that always count."""
    for text in distribution.requires or []:
        requirement = Requirement(text)
        always = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        chosen = requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
        if (always and not extra) or (chosen and not always):
            yield requirement


def _problem(requirement: Requirement) -> str | None:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{canonicalize_name(requirement.name)} is not installed"
    # A local part such as +cpu, and pre-releases, satisfy a range that names the release.
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"{canonicalize_name(requirement.name)} {version} is outside {requirement.specifier}"
