"""Import every submodule of an installed package. In: the package's folder. Out: exit code 1 and the list of failures.

`[tool.hyper-parallel.needs-extra]` in the package's pyproject names the modules that need an extra. With `--bare`
(wheel alone) each of those must raise an ImportError that names the extra, and every other module must import;
with `--extras a b` the modules of those extras must import as well.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path

# Runs isolated, outside the checkout. Each module is imported in a process of its own, since an import must work on
# its own, not thanks to an earlier one; torch is loaded once before the processes fork, to save minutes.
IMPORT_EACH = """
import importlib, importlib.util, json, os, pathlib, sys, tempfile, traceback
if importlib.util.find_spec("torch"):
    import torch
root = pathlib.Path(importlib.util.find_spec(sys.argv[1]).origin).parent
errors = {}
for path in sorted(root.rglob("*.py")):
    parts = path.relative_to(root.parent).with_suffix("").parts
    if parts[-1] == "__main__":
        continue
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    with tempfile.TemporaryFile("w+") as said:
        pid = os.fork()
        if pid == 0:
            code = 0
            try:
                importlib.import_module(name)
            except BaseException:
                traceback.print_exc(file=said)
                said.flush()
                code = 1
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.seek(0)
        errors[name] = (said.read() or f"ended with code {code}") if code else None
print(json.dumps({"root": str(root), "errors": errors}))
"""


def find_faults(
    distribution: str, errors: dict[str, str | None], needs: dict[str, str], extras: list[str]
) -> list[str]:
    """`errors` holds each module and the traceback of its import, if it failed; `extras` are those installed."""
    faults = [f"pyproject names {name}, which does not exist" for name in needs if name not in errors]
    for module, error in errors.items():
        extra = next((value for name, value in needs.items() if module == name or module.startswith(name + ".")), None)
        last = error.strip().splitlines()[-1] if error else ""
        if extra is None or extra in extras:
            if error:
                faults.append(f"{module} does not import: {last}")
            continue
        wanted = f"{distribution}[{extra}]"
        if not error:
            faults.append(f"{module} imports without the extra {extra}; take it off the list in pyproject")
        elif wanted not in error or not ("ImportError" in error or "ModuleNotFoundError" in last):
            faults.append(f"{module} without its extra must raise an ImportError that names {wanted}; got: {last}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package_dir", type=Path)
    installed = parser.add_mutually_exclusive_group(required=True)
    installed.add_argument("--bare", action="store_true", help="the wheel alone is installed, without extras")
    installed.add_argument("--extras", nargs="+", default=[], help="the extras that are installed")
    arguments = parser.parse_args()
    data = tomllib.loads((arguments.package_dir / "pyproject.toml").read_text())
    distribution = data["project"]["name"]
    needs = data.get("tool", {}).get("hyper-parallel", {}).get("needs-extra", {})
    command = [sys.executable, "-I", "-c", IMPORT_EACH, distribution.replace("-", "_")]
    listing = subprocess.run(command, capture_output=True, text=True)
    if listing.returncode:
        print(listing.stderr)
        return 1
    found = json.loads(listing.stdout.splitlines()[-1])
    if arguments.package_dir.resolve() in Path(found["root"]).resolve().parents:
        print(f"{distribution} is imported from the checkout ({found['root']}), not from its wheel")
        return 1
    faults = find_faults(distribution, found["errors"], needs, arguments.extras)
    print("\n".join(faults) if faults else f"{len(found['errors'])} modules of {distribution} import as declared")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
