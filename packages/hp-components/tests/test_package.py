"""The package as a whole: its names, and what importing it does not load."""

import importlib.metadata
import subprocess
import sys

import pytest

import hp_components

LIGHT = """
import sys
import hp_components
import hp_components.checkpoint
import hp_components.metrics
from hp_components import RunLock
from hp_components.checkpoint import CheckpointError, list_checkpoints
from hp_components.metrics import read_records
heavy = sorted({"torch", "matplotlib", "rich", "tokenizers", "numpy"} & sys.modules.keys())
assert not heavy, heavy
"""


def test_every_exported_name_is_there():
    for name in hp_components.__all__:
        assert getattr(hp_components, name).__name__ == name
        assert name in dir(hp_components)


def test_the_version_is_that_of_the_distribution():
    assert hp_components.__version__ == importlib.metadata.version("hp-components")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Optimizer'"):
        _ = hp_components.Optimizer


def test_looking_at_folders_locks_and_records_loads_nothing_heavy():
    subprocess.run([sys.executable, "-c", LIGHT], check=True)
