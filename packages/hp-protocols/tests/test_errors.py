"""Faults read well, travel between processes, and the nearest name is found whatever its case."""

from __future__ import annotations

import pickle

import pytest

from hp_protocols.errors import ConfigError, Fault, nearest


def test_a_fault_says_what_where_what_is_allowed_and_the_next_step() -> None:
    fault = Fault("--training.steps", "-1 is too small", allowed="at least 1", hint="try 100")
    assert str(fault) == "--training.steps: -1 is too small; allowed: at least 1\n    → try 100"


def test_an_error_carries_all_faults_through_pickle() -> None:
    error = ConfigError([Fault("a", "wrong"), Fault("b", "missing")])
    again = pickle.loads(pickle.dumps(error))
    assert again.faults == error.faults
    assert str(again) == "a: wrong\nb: missing"


def test_an_error_without_faults_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ConfigError([])


@pytest.mark.parametrize(
    ("given", "found"), [("adamw", "AdamW"), ("Adamw", "AdamW"), ("step", "steps"), ("zebra", None)]
)
def test_the_nearest_name_is_found_whatever_its_case(given: str, found: str | None) -> None:
    assert nearest(given, ["Adam", "AdamW", "steps"]) == found
