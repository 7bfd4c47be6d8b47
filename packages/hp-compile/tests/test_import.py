"""The package without torch, its version, and the README's example."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import metadata, version
from pathlib import Path

import pytest

import hp_compile

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # every import of torch fails
from hp_compile import (
    DP_MODES, PP_SCHEDULES, FSDPModuleConfig, PassConfig, PassPlan,
    build_pass_config_from_trainer_config, create_sharding_plan_from_yaml, normalize_dp_mode,
)
assert PassConfig(dp_mode=" Replicate ").dp_mode == "ddp"
try:
    PassConfig(tp_size=0)
except ValueError as error:
    assert "tp_size" in str(error)
else:
    raise SystemExit("a wrong value passed")
plan = create_sharding_plan_from_yaml({"fsdp": {"patterns": [{"pattern": "layers.*"}]}})
assert plan.resolve(["layers.0"], ["layers.0.w"]).unit_of == {"layers.0.w": "layers.0"}
"""


def test_configuration_imports_and_validates_without_torch():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_does_not_import_torch():
    code = "import sys, hp_compile; hp_compile.PassConfig; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_public_name_resolves_and_an_unknown_one_does_not():
    for name in hp_compile.__all__:
        assert getattr(hp_compile, name) is not None
        assert name in dir(hp_compile)
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        hp_compile.Nope  # noqa: B018


def test_the_version_is_that_of_the_distribution():
    assert hp_compile.__version__ == version("hp-compile")


def test_the_readme_examples_run_as_pasted():
    beside = Path(__file__).parents[1] / "README.md"
    # Away from the source tree the wheel's own copy is read; an editable install's copy may be stale.
    readme = beside.read_text(encoding="utf-8") if beside.exists() else metadata("hp-compile").get_payload()
    examples = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert examples
    pasted: dict[str, object] = {"__name__": "pasted"}
    for example in examples:
        exec(compile(example, "README.md", "exec"), pasted)
