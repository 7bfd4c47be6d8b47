"""The README keeps its word: its code runs as pasted, and it names what there is."""

from __future__ import annotations

from dataclasses import fields

import pytest
import readme_jobs
import yaml
from graph_world import run_world

import hp_compile
from hp_compile import PassConfig, create_sharding_plan_from_yaml

TEXT = readme_jobs.README.read_text(encoding="utf-8")


def test_the_first_example_has_ten_lines_and_learns():
    first = readme_jobs.blocks()[0]
    assert len(first.splitlines()) <= 11
    losses = readme_jobs.pasted(1)["losses"]
    assert len(losses) == 50
    assert losses[-1] < losses[0] / 2


def test_a_users_own_pass_has_fifteen_lines_and_acts():
    own = next(block for block in readme_jobs.blocks() if "class ClampGradients" in block)
    assert len([line for line in own.splitlines() if line.strip()]) <= 15
    names = readme_jobs.pasted()
    passes = names["trainer"].pipeline.names()
    assert passes.index("clamp_gradients") == passes.index("fsdp") + 1
    clamps = [node for node in names["trainer"].graph_module.graph.nodes if "clamp" in str(node.target)]
    assert len(clamps) == 2, "one for each of weight and bias"


def test_everything_pasted_on_two_ranks_shards_and_clamps_there_too():
    found = run_world(readme_jobs.on_a_rank, 2)
    for rank in found:
        assert rank["passes"][2:] == ["fsdp", "clamp_gradients", "auto_overlap"]
        assert rank["collectives"] > 0
    # Linear(8, 1): one row for two ranks. The rank that has it has the clamped gradient.
    assert [rank["rows"] for rank in found] == [[1, 1], [0, 0]]
    assert [rank["largest"] for rank in found] == [0.25, 0.0]


def test_the_plan_in_yaml_is_the_plan_in_python():
    (text,) = readme_jobs.blocks("yaml")
    names = readme_jobs.pasted()
    assert create_sharding_plan_from_yaml(yaml.safe_load(text)) == names["plan"]


@pytest.mark.parametrize("name", [*hp_compile.__all__, *(field.name for field in fields(PassConfig))])
def test_every_public_name_and_every_field_is_there(name):
    assert f"`{name}`" in TEXT


@pytest.mark.parametrize("member", [name for name in vars(hp_compile.GraphTrainer) if not name.startswith("_")])
def test_every_member_of_the_trainer_is_there(member):
    assert f"`{member}`" in TEXT or f"`{member}(" in TEXT or f", {member}(" in TEXT or f"`, `{member}`" in TEXT
