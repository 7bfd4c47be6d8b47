"""The bare Qwen3.5 by name: its dimensions, its weights under published names, and the same logits in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from hp_models._legacy.plans import read_tp_plan
from hp_protocols.errors import ConfigError
from hp_protocols.model_spec import get_spec, list_flavors

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "layer_types": ("linear_attention", "full_attention"),
}


def filled(**sizes: Any) -> torch.nn.Module:
    model = get_spec("qwen3_5").build_model_fn(**{**SIZES, **sizes})
    torch.manual_seed(0)
    model.init_weights()
    return model


def test_the_bare_model_is_found_by_name() -> None:
    assert list_flavors("qwen3_5") == ["default"]
    assert get_spec("qwen3_5").model is None
    with pytest.raises(ConfigError, match="did you mean hidden_size"):
        get_spec("qwen3_5").build_model_fn(hiden_size=3)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden_size": "big"}, r"model\.config_overrides\.hidden_size: expected int, got 'big'"),
        ({"hidden_size": 32.0}, "expected int"),
        ({"num_attention_heads": True}, "expected int"),
        ({"rms_norm_eps": "1e-5"}, "expected float"),
        ({"tie_word_embeddings": 1}, "expected bool"),
        ({"full_attention_interval": 0}, "full_attention_interval: 0 is no size; allowed: 1 or more"),
        ({"layer_types": ["linear", "full_attention"]}, "allowed: linear_attention or full_attention"),
        ({"num_hidden_layers": 3}, "layer_types: has 2 layers, and num_hidden_layers is 3"),
    ],
)
def test_dimensions_that_no_model_could_have_are_refused_by_name(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        get_spec("qwen3_5").build_model_fn(**{**SIZES, **sizes})
    # A whole number stands for one with a fraction.
    assert get_spec("qwen3_5").build_model_fn(**SIZES, rope_theta=10_000).config.rope_theta == 10_000


@pytest.mark.parametrize("tied", [False, True])
def test_published_names_and_back_are_the_same_bits_and_transformers_computes_the_same(
    tied: bool, tmp_path: Path
) -> None:
    model = filled(tie_word_embeddings=tied)
    adapter = get_spec("qwen3_5").state_dict_adapter(model.config)
    published = adapter.to_hf(model.state_dict())
    back = adapter.from_hf(published)
    assert sorted(back) == sorted(model.state_dict())
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())
    theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**adapter.hf_config())).eval()
    missing, unexpected = theirs.load_state_dict(published, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    ids = torch.randint(97, (2, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(adapter.hf_config()))
    again = get_spec("qwen3_5").build_model_fn(weights_path=str(tmp_path), max_position_embeddings=7)
    assert again.config == type(model.config)(**{**vars(model.config), "max_position_embeddings": 7})


@pytest.mark.parametrize("count", [1, 2, 5])
def test_listed_layers_without_their_number_go_into_files_that_transformers_loads(count: int, tmp_path: Path) -> None:
    layers = [("full_attention", "linear_attention")[index % 2] for index in range(count)]
    sizes = {name: value for name, value in SIZES.items() if name != "num_hidden_layers"} | {"layer_types": layers}
    model = get_spec("qwen3_5").build_model_fn(**sizes)
    torch.manual_seed(0)
    model.init_weights()
    assert model.config.num_hidden_layers == len(model.layers) == count
    adapter = get_spec("qwen3_5").state_dict_adapter(model.config)
    (tmp_path / "config.json").write_text(json.dumps(adapter.hf_config()))
    published = {name: tensor.detach().clone() for name, tensor in adapter.to_hf(model.state_dict()).items()}
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = Qwen3_5ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert theirs.config.layer_types == layers
    ids = torch.randint(97, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)
    again = get_spec("qwen3_5").build_model_fn(weights_path=str(tmp_path))
    assert again.config == model.config


def test_of_the_users_globs_the_later_one_wins_also_over_one_that_the_model_has_too() -> None:
    whole = {"layers.*.*.*": "replicate"}
    attention = {"layers.*.self_attn.[qkv]_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}

    def words(plan: dict[str, str]) -> dict[str, str]:
        found = read_tp_plan(get_spec("qwen3_5").build_model_fn(**SIZES, tp_plan=plan)).words
        return {name: word for name, word in found.items() if name.startswith("layers.")}

    cut = {f"layers.1.self_attn.{name}_proj": "colwise" for name in "qkv"}
    assert words({**whole, **attention}) == {**cut, "layers.1.self_attn.o_proj": "rowwise"}
    assert words({**attention, **whole}) == {}


def test_plans_are_added_to_the_models_own() -> None:
    model = get_spec("qwen3_5").build_model_fn(**SIZES, tp_plan={"norm": "rowwise"}, cp_modules=("a",))
    assert model._tp_plan["norm"] == "rowwise"
    assert model._tp_plan["lm_head"] == "colwise"
    assert model._cp_modules == ("a",)
    assert "norm" not in type(model)._tp_plan
