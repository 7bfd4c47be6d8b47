"""hp-config without torch and without tyro, each in a process of its own where the other cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import toy_trainer

import hp_config
from hp_config import dump_yaml

BLOCK = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def run(code: str, site: Path, *blocked: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(names=list(blocked)) + code],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )


def test_recipes_files_and_help_work_without_torch(site: Path) -> None:
    code = (
        "import hp_config\n"
        "for name in hp_config.__all__: getattr(hp_config, name)\n"
        "from hp_config import *\n"
        "from hp_config import cli\n"
        "recipe = ['--module', 'toy', '--config', 'small']\n"
        "assert cli.diff([*recipe, '--training.steps=5'])[0] == 0\n"
        "assert load_yaml  # star imports are torch-free too\n"
        "ConfigManager().parse_args([*recipe, '--help'])\n"
    )
    result = run(code, site, "torch")
    assert result.returncode == 0, result.stderr
    assert "--training.steps INT" in result.stdout


@pytest.mark.parametrize("options", [[], ["--training.steps=3"], ["--help"]])
def test_a_recipe_without_tyro_says_what_to_install(site: Path, options: list[str]) -> None:
    words = ["--module", "toy", "--config", "small", *options]
    code = f"from hp_config import ConfigManager\nConfigManager().parse_args({words})"
    result = run(code, site, "tyro")
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("hp_config.command_line.MissingExtraError: ")
    assert 'pip install "hp-config[cli]"' in result.stderr


def test_a_missing_extra_is_an_import_error() -> None:
    assert issubclass(hp_config.MissingExtraError, ImportError)


def test_a_file_with_options_works_without_tyro(site: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(dump_yaml(toy_trainer.small().replace(recipe="toy.small")))
    code = (
        "from hp_config import ConfigManager, cli\n"
        f"words = [{str(tmp_path / 'run.yaml')!r}, '--training.steps=3', '--no-debug.deterministic']\n"
        "print(ConfigManager().parse_args(words).training.steps)\n"
        "print(cli.diff(words))\n"
        "print(cli.show(['--module', 'toy', '--config', 'small']))\n"
    )
    result = run(code, site, "tyro", "torch")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "3"
    assert lines[1].startswith("(0, 'recipe toy.small → ")
    assert "lr_scheduler.warmup_steps: 4 → 3" in lines[1]
    assert lines[2].startswith("(2, ")
    assert "hp-config[cli]" in lines[2]


def test_importing_the_package_loads_next_to_nothing(site: Path) -> None:
    code = "import hp_config; assert not {'yaml', 'hp_config.manager', 'hp_protocols'} & set(sys.modules)"
    result = run(code, site)
    assert result.returncode == 0, result.stderr


def test_an_unknown_name_is_an_attribute_error_and_the_version_is_the_installed_one() -> None:
    assert hp_config.__version__ == version("hp-config")
    assert set(hp_config.__all__) <= set(dir(hp_config))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hp_config.nothing


def test_function_builds_the_callable_itself() -> None:
    assert hp_config.Function.Config(fn="toy_trainer.scale").build() is toy_trainer.scale
    assert hp_config.Function.Config(fn=toy_trainer.scale, kwargs={"by": 3.0}).build()(2.0) == 6.0
