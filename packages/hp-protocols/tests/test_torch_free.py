"""What imports without torch, in a process where torch cannot be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK_TORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "mindspore"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCK_TORCH + code], capture_output=True, text=True, check=False)


MODULES = [
    "hp_protocols",
    "hp_protocols.configurable",
    "hp_protocols.errors",
    "hp_protocols.function",
    "hp_protocols.model_spec",
    "hp_protocols.override",
    "hp_protocols.platform",
    "hp_protocols.references",
    "hp_protocols.sharding",
    "hp_protocols.state_dict_adapter",
    "hp_protocols.trainer_sections",
    "hp_protocols.traversal",
    "hp_protocols.types",
]


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_without_torch(module: str) -> None:
    result = run(f"import {module}")
    assert result.returncode == 0, result.stderr


def test_configs_are_built_saved_and_read_without_torch() -> None:
    result = run(
        """
from dataclasses import dataclass, field
from hp_protocols import Configurable, Function, MeshAxisName, ModelSpec, ShardingConfig, register_spec, get_spec

class Thing(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        init: Function.Config = field(default_factory=lambda: Function.Config(fn="torch.nn.init.zeros_"))
        sharding: ShardingConfig | None = field(default_factory=ShardingConfig)
    def __init__(self, config):
        self.config = config

config = Thing.Config()
assert Thing.Config.from_dict(config.to_dict()) == config
assert config.build().config == config
assert "torch" not in sys.modules
"""
    )
    assert result.returncode == 0, result.stderr


def test_importing_the_package_and_its_torch_free_names_does_not_load_an_installed_torch() -> None:
    code = "import sys, hp_protocols\n"
    code += "".join(f"import {module}\n" for module in MODULES)
    code += "from hp_protocols import Configurable, ModelSpec, ShardingConfig\n"
    code += "assert hp_protocols.__version__\n"
    code += "assert not [name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy')]\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_module_says_what_to_install_when_no_backend_is_there() -> None:
    code = (
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name in ('torch', 'mindspore') else real(name, *a)\n"
        "import hp_protocols.module\n"
    )
    result = run(code)
    assert result.returncode != 0
    assert 'pip install "hp-protocols[torch]"' in result.stderr


def test_every_public_name_can_be_reached_and_unknown_ones_raise() -> None:
    import hp_protocols

    for name in hp_protocols.__all__:
        assert getattr(hp_protocols, name) is not None
    assert set(hp_protocols.__all__) <= set(dir(hp_protocols))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hp_protocols.nothing  # noqa: B018
