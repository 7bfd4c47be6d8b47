"""Promises of the package as a whole: no backend by name, a README that runs, one version."""

import ast
import re
from importlib import metadata
from pathlib import Path

import pytest

import hp_models

PACKAGE = Path(hp_models.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def imported_outside_type_checking(tree):
    """Top-level names of the modules that the code imports when it runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").split(".")[0]
        yield from imported_outside_type_checking(node)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_imports_a_backend_by_name(source):
    names = set(imported_outside_type_checking(ast.parse(source.read_text(encoding="utf-8"))))
    assert not names & {"torch", "torch_npu", "mindspore", "numpy"}


def test_the_examples_of_the_readme_run(capsys):
    beside = Path(__file__).parents[1] / "README.md"
    # An editable install keeps the text of the day it was installed; a wheel carries the current one.
    text = beside.read_text(encoding="utf-8") if beside.exists() else metadata.metadata("hp-models").get_payload()
    names = {}
    for example in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(example, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "torch.Size([1, 12, 1000])" in printed
    assert "torch.Size([128, 64])" in printed


def test_the_version_is_the_distribution_s():
    assert hp_models.__version__ == metadata.version("hp-models")
