"""Makes the tests' own helper modules importable, in this process and in the ranks that tests start."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
# References are computed here and compared bit for bit with ranks and examples, which run with one thread each:
# torch sums in another order with another number of threads.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "matrix: all models × modes × ranks; only with `-m matrix`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The matrix takes many minutes: it is left out unless a marker expression asks for it."""
    if "matrix" in config.option.markexpr:
        return
    matrix = [item for item in items if item.get_closest_marker("matrix")]
    if matrix:
        config.hook.pytest_deselected(items=matrix)
        items[:] = [item for item in items if item not in matrix]
