"""The README's examples run as they stand, and its table names what exists."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import hp_protocols

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 2
    program = [sys.executable, "-c", "\n".join(blocks)]
    result = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (result.stderr, result.stdout) == ("", "torch.nn.init.normal_ (4, 8)\n")


def test_the_table_names_what_exists() -> None:
    rows = re.findall(r"^\| (`.*?) \|", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]
    assert len(names) > 25
    for name in names:
        module, _, attribute = name.rpartition(".")
        if not module:
            assert name in hp_protocols.__all__, name
        elif name.startswith("hp_protocols."):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:
                assert hasattr(importlib.import_module(module), attribute), name
    shown = set(names)
    assert set(hp_protocols.__all__) - shown == {"get_platform", "CapabilityError"}  # In the row of the platform.
