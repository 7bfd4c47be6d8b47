"""Import every submodule of an installed package. In: the package's folder. Out: exit code 1 and the list of failures.

`[tool.hyper-parallel.needs-extra]` in the package's pyproject names the modules that need an extra. With `--bare`
(wheel alone) each of those must raise an ImportError that names the extra, and every other module must import;
with `--extras a b` the modules of those extras must import as well.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

# Each module in a process of its own: an import must work on its own, not thanks to an earlier one.
IMPORT_ONE = "import importlib, sys; importlib.import_module(sys.argv[1])"
LIST_ALL = (
    "import importlib.util, pathlib, sys\n"
    "root = pathlib.Path(importlib.util.find_spec(sys.argv[1]).origin).parent\n"
    "print(root)\n"
    "for path in sorted(root.rglob('*.py')):\n"
    "    parts = path.relative_to(root.parent).with_suffix('').parts\n"
    "    if parts[-1] != '__main__': print('.'.join(parts[:-1] if parts[-1] == '__init__' else parts))\n"
)


def run(code: str, argument: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", "-c", code, argument], capture_output=True, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package_dir", type=Path)
    parser.add_argument("--bare", action="store_true", help="the wheel alone is installed, without extras")
    parser.add_argument("--extras", nargs="*", default=[], help="the extras that are installed")
    arguments = parser.parse_args()
    data = tomllib.loads((arguments.package_dir / "pyproject.toml").read_text())
    distribution = data["project"]["name"]
    needs = data.get("tool", {}).get("hyper-parallel", {}).get("needs-extra", {})

    listing = run(LIST_ALL, distribution.replace("-", "_"))
    if listing.returncode:
        print(listing.stderr)
        return 1
    root, *modules = listing.stdout.split()
    if arguments.package_dir.resolve() in Path(root).resolve().parents:
        print(f"{distribution} is imported from the checkout ({root}), not from its wheel")
        return 1
    faults = [f"pyproject names {name}, which does not exist" for name in needs if name not in modules]
    for module in modules:
        extra = next((value for name, value in needs.items() if module == name or module.startswith(name + ".")), None)
        result = run(IMPORT_ONE, module)
        last = (result.stderr.strip().splitlines() or [""])[-1]
        if extra is None or (extra in arguments.extras):
            if result.returncode:
                faults.append(f"{module} does not import: {last}")
        elif arguments.bare:
            wanted = f"{distribution}[{extra}]"
            if result.returncode == 0:
                faults.append(f"{module} imports without the extra {extra}; take it off the list in pyproject")
            elif wanted not in result.stderr or not ("ImportError" in result.stderr or "ModuleNotFound" in last):
                faults.append(f"{module} without its extra must raise an ImportError that names {wanted}; got: {last}")
    print("\n".join(faults) if faults else f"{len(modules)} modules of {distribution} import as declared")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
