"""What the bare model takes from a published config.json: what transformers and the v2 model do, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

from hp_models.qwen3_5_v2 import Qwen3_5Model
from hp_protocols.errors import ConfigError
from hp_protocols.model_spec import get_spec

SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def written(folder: Path, content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return str(folder)


def read(folder: Path, content: Any, **overrides: Any) -> Any:
    with torch.device("meta"):
        return get_spec("qwen3_5").build_model_fn(weights_path=written(folder, content), **overrides).config


def faults(folder: Path, content: Any, **overrides: Any) -> dict[str, Any]:
    """By place, without the folder's."""
    with pytest.raises(ConfigError) as refused:
        read(folder, content, **overrides)
    found = {fault.where.removeprefix(f"{folder / 'config.json'}: "): fault for fault in refused.value.faults}
    assert len(found) == len(refused.value.faults)
    return found


def test_missing_fields_are_those_of_transformers_and_not_the_debug_models(tmp_path: Path) -> None:
    theirs = Qwen3_5TextConfig()
    rope = theirs.rope_parameters
    for content in ({}, {"layer_types": None}, theirs.to_dict(), {"text_config": {}}, {"model_type": "qwen3_5"}):
        ours = read(tmp_path, content)
        assert list(ours.kinds()) == theirs.layer_types
        assert (ours.rope_theta, ours.partial_rotary_factor) == (rope["rope_theta"], rope["partial_rotary_factor"])
        own = {"layer_types", "full_attention_interval", "rope_theta", "partial_rotary_factor"}
        assert [name for name in vars(ours).keys() - own if getattr(ours, name) != getattr(theirs, name)] == []
    theirs = Qwen3_5TextConfig(num_hidden_layers=6, full_attention_interval=3)
    assert list(read(tmp_path, {"num_hidden_layers": 6, "full_attention_interval": 3}).kinds()) == theirs.layer_types
    # A run's own file still wins.
    assert read(tmp_path, {"num_hidden_layers": 6}, head_dim=16, num_hidden_layers=1).head_dim == 16


def test_angles_are_read_wherever_transformers_reads_them(tmp_path: Path) -> None:
    ways: list[dict[str, Any]] = [
        {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
        {"rope_scaling": {"type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            "rope_theta": 3.0,
        },
    ]
    for way in ways:
        ours, theirs = read(tmp_path, {**SMALL, **way}), Qwen3_5TextConfig(**SMALL, **way).rope_parameters
        assert (ours.rope_theta, ours.partial_rotary_factor) == (5e5, 0.5)
        assert (theirs["rope_theta"], theirs["partial_rotary_factor"]) == (5e5, 0.5)


@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False])
def test_only_the_outer_field_ties_a_model_with_vision(outer: bool | None, inner: bool, tmp_path: Path) -> None:
    content: dict[str, Any] = {"text_config": {**SMALL, "tie_word_embeddings": inner}, "vision_config": {"depth": 1}}
    content |= {} if outer is None else {"tie_word_embeddings": outer}
    with torch.device("meta"):
        theirs = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**content))
    tied = theirs.lm_head.weight is theirs.model.language_model.embed_tokens.weight
    assert read(tmp_path, content).tie_word_embeddings is tied
    assert read(tmp_path, content["text_config"]).tie_word_embeddings is inner


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"attention_bias": True}, "attention_bias"),
    ({"attention_dropout": 0.1}, "attention_dropout"),
    ({"attn_output_gate": False}, "attn_output_gate"),
    ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
    ({"mlp_only_layers": [1]}, "mlp_only_layers"),
    ({"model_type": "qwen3_5_moe_text"}, "model_type"),
    ({"num_experts": 8}, "num_experts"),
    ({"sliding_window": 128}, "sliding_window"),
    ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval"),
    ({"num_hidden_layers": 4}, "layer_types"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type"),
    ({"rope_scaling": {"rope_type": "linear"}, "rope_parameters": None}, "rope_scaling.rope_type"),
    ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, "rope_parameters.factor"),
    ({"rope_parameters": {"mrope_interleaved": False}}, "rope_parameters.mrope_interleaved"),
]


@pytest.mark.parametrize(("changes", "where"), REFUSED)
def test_what_needs_other_maths_is_refused_as_v2_refuses_it(
    changes: dict[str, Any], where: str, tmp_path: Path
) -> None:
    content = {**Qwen3_5TextConfig(**SMALL).to_dict(), **changes}
    with pytest.raises(ConfigError) as theirs:
        Qwen3_5Model.Config.from_hf_config(content)
    assert [fault.where for fault in theirs.value.faults] == [*faults(tmp_path, content)] == [where]


def test_every_fault_of_a_file_and_of_the_run_is_told_at_once(tmp_path: Path) -> None:
    inner = {
        **SMALL,
        "hidden_act": "gelu",
        "hiden_size": 3,
        "rope_parameters": {"rope_theta": "1e4", "rope_type": "yarn"},
    }
    content = {"text_config": inner, "tie_word_embeddings": 1, "attention_bias": True}
    found = faults(tmp_path, content, head_dimm=3, vocab_size=0)
    assert {*found} == {
        *("text_config.hidden_act", "text_config.hiden_size", "tie_word_embeddings", "attention_bias"),
        *("text_config.rope_parameters.rope_theta", "text_config.rope_parameters.rope_type"),
        *("model.config_overrides.head_dimm", "model.config_overrides.vocab_size"),
    }
    act = found["text_config.hidden_act"]
    assert "'gelu'" in act.problem
    assert (act.allowed, "take it out of the file" in act.hint) == ("'silu'", True)
    assert found["text_config.hiden_size"].hint == "did you mean hidden_size?"
    # A fault of the file names the file.
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, {"head_dim": None})
    assert refused.value.faults[0].where == f"{tmp_path / 'config.json'}: head_dim"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON: Expecting property name"),
        ("[]", "holds a list; allowed: an object"),
        ({"text_config": [3]}, "text_config: [3] has no fields"),
        ({"rope_parameters": "yarn"}, "rope_parameters: 'yarn' has no fields"),
        ({"rope_parameters": {"rope_theta": 1.0}, "rope_scaling": {"rope_theta": 2.0}}, "keep rope_parameters only"),
        ({"model_type": "llama"}, "model_type: 'llama' is no dense Qwen3.5; allowed: qwen3_5, qwen3_5_text"),
    ],
)
def test_a_file_that_cannot_be_read_as_a_models_is_refused(content: Any, said: str, tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, content).values()
    assert said in str(fault)


def test_an_interval_that_listed_layers_contradict_is_not_ignored(tmp_path: Path) -> None:
    content = Qwen3_5TextConfig(**{**SMALL, "num_hidden_layers": 4}).to_dict()
    assert [*faults(tmp_path, content, full_attention_interval=2)] == ["model.config_overrides.full_attention_interval"]
    kinds = read(tmp_path, content, full_attention_interval=4).kinds()
    assert kinds == read(tmp_path, content).kinds() == ("linear_attention",) * 3 + ("full_attention",)
    assert read(tmp_path, content, full_attention_interval=2, layer_types=None).kinds().count("full_attention") == 2
