"""A model whose blocks are recomputed through torch's wrapper is saved under its own names, in true shapes (G19)."""

from __future__ import annotations

from graph_world import run_world
from wrapped_jobs import build, saved


def test_wrapped_blocks_are_saved_and_loaded_under_their_own_names():
    names = {name: tuple(value.shape) for name, value in build(wrap=False).state_dict().items()}
    for state in run_world(saved, 2):
        assert state == names
