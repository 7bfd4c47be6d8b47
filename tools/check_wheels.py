"""Check the built wheels. In: the folder with wheels. Out: exit code 1 and what is wrong.

Requires-Dist and entry points of each wheel must be those of its pyproject; each wheel carries py.typed, the
licence and no tests.
"""

from __future__ import annotations

import email
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def declared_requirements(project: dict) -> set[str]:
    wanted = {str(Requirement(text)) for text in project.get("dependencies", [])}
    for extra, texts in project.get("optional-dependencies", {}).items():
        wanted |= {f"{Requirement(text)}; extra == '{extra}'" for text in texts}
    return {text.replace('"', "'") for text in wanted}


def check(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        message = email.message_from_bytes(archive.read(metadata))
        entry_points = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    project = tomllib.loads((ROOT / "packages" / message["Name"] / "pyproject.toml").read_text())["project"]
    faults = []
    built = {str(Requirement(text)).replace('"', "'") for text in message.get_all("Requires-Dist") or []}
    if built != declared_requirements(project):
        faults.append(f"Requires-Dist differs from pyproject: {sorted(built ^ declared_requirements(project))}")
    top = message["Name"].replace("-", "_")
    if f"{top}/py.typed" not in names:
        faults.append("py.typed is missing")
    if not any("licenses/LICENSE" in name for name in names):
        faults.append("the licence is missing")
    strangers = [name for name in names if not name.startswith((f"{top}/", f"{top}-"))]
    if strangers or any("/tests/" in name for name in names):
        faults.append(f"holds what does not belong in a wheel: {strangers or 'tests'}")
    for group, entries in project.get("entry-points", {}).items():
        text = "".join(entry_points)
        faults += [f"entry point {group}: {name} is missing" for name in entries if f"{name} = " not in text]
    return [f"{wheel.name}: {fault}" for fault in faults]


def main(folder: str) -> int:
    wheels = sorted(Path(folder).glob("*.whl"))
    faults = [fault for wheel in wheels for fault in check(wheel)]
    if len(wheels) != len(list((ROOT / "packages").iterdir())):
        faults.append(f"expected one wheel per package, found {[wheel.name for wheel in wheels]}")
    print("\n".join(faults) if faults else f"{len(wheels)} wheels carry what their pyproject declares")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
