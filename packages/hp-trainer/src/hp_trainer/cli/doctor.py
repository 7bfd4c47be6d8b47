"""`hp doctor`: versions, devices, what is missing and how to install it.

In: `--json` or nothing. Out: a report; exit code 1 if training cannot work here.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from hp_trainer.doctor import (
    Finding,
    Level,
    examine_accelerators,
    examine_machine,
    examine_packages,
    examine_torch,
)

USAGE = """\
usage: hp doctor [--json]

Look at the packages, torch, the accelerators and the machine; say what is missing and what to do about it.

exit codes: 0 training can work here, 1 it cannot, 2 a mistake in the command"""

MARKS = {Level.OK: "✓", Level.OPTIONAL: "·", Level.WARNING: "!", Level.BROKEN: "✗"}
PLAIN_MARKS = {Level.OK: "ok", Level.OPTIONAL: "--", Level.WARNING: "!!", Level.BROKEN: "NO"}


def main(arguments: list[str]) -> int:
    """Examine everything and print it, section by section."""
    if arguments not in ([], ["--json"]):
        print(USAGE)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    torch_findings, report = examine_torch()
    sections = {
        "packages": examine_packages(),
        "torch": torch_findings,
        "accelerators": examine_accelerators(report),
        "machine": examine_machine(),
    }
    broken = [finding for findings in sections.values() for finding in findings if finding.level is Level.BROKEN]
    if arguments:
        print(
            json.dumps(
                {name: [dataclasses.asdict(item) for item in found] for name, found in sections.items()}, indent=2
            )
        )
    else:
        print(_render(sections, broken))
    return 1 if broken else 0


def _render(sections: dict[str, list[Finding]], broken: list[Finding]) -> str:
    marks = MARKS if "utf" in (sys.stdout.encoding or "").lower() else PLAIN_MARKS
    arrow = "→" if marks is MARKS else "->"
    width = max(len(finding.subject) for findings in sections.values() for finding in findings)
    lines: list[str] = []
    for name, findings in sections.items():
        lines += ["", name]
        for finding in findings:
            lines.append(f"  {marks[finding.level]} {finding.subject:{width}}  {finding.found}")
            if finding.remedy:
                lines.append(f"    {'':{width}}  {arrow} {finding.remedy}")
    verdict = "Training can work here."
    if broken:
        verdict = "Training cannot work here: " + ", ".join(dict.fromkeys(finding.subject for finding in broken))
    return "\n".join([*lines[1:], "", verdict])
