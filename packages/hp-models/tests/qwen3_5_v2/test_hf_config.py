"""A published config.json becomes the config of what transformers builds of it, or is refused by name."""

import json

import pytest
import torch
import transformers
from hybrid import hf_config

from hp_models.qwen3_5_v2 import Qwen3_5Model, get_model_spec
from hp_protocols.errors import ConfigError

from_hf = Qwen3_5Model.Config.from_hf_config

# As published files have it: a text and a vision config, token ids, and keys that no config class knows.
PUBLISHED = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "tie_word_embeddings": True,
    "transformers_version": "5.0.0",
    "vision_config": {"depth": 12, "hidden_size": 768, "model_type": "qwen3_5"},
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3584,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    },
}


def text(**changes):
    """A small text config; a change of None leaves the field out."""
    fields = {**hf_config().to_dict(), **changes}
    return {name: value for name, value in fields.items() if name not in changes or value is not None}


def test_a_published_file_is_the_flavour(tmp_path):
    assert from_hf(PUBLISHED) == get_model_spec("0.8B").model
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED), encoding="utf-8")
    assert from_hf(tmp_path) == from_hf(str(tmp_path / "config.json")) == from_hf(PUBLISHED)


@pytest.mark.parametrize("flavor", get_model_spec.flavors)
def test_there_and_back_is_the_same_config_also_through_transformers(flavor):
    config = get_model_spec(flavor).model
    written = json.loads(json.dumps(config.to_hf_config()))
    assert from_hf(written) == config
    assert from_hf(transformers.Qwen3_5TextConfig(**written).to_dict()) == config


def test_what_is_missing_has_the_defaults_of_transformers():
    config = from_hf({"num_hidden_layers": 4})
    assert config == from_hf(transformers.Qwen3_5TextConfig(num_hidden_layers=4).to_dict())
    assert (config.hidden_size, config.rotary_emb.theta, config.max_position_embeddings) == (4096, 10_000.0, 32768)
    assert config.rotary_emb.mrope_section == (11, 11, 10)


def test_only_the_outer_field_ties_a_composite_model():
    inner = {**PUBLISHED, "tie_word_embeddings": False}
    inner["text_config"] = {**PUBLISHED["text_config"], "tie_word_embeddings": True}
    assert from_hf(inner).tie_word_embeddings is False
    assert from_hf(PUBLISHED).tie_word_embeddings is True
    with torch.device("meta"):
        theirs = transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(**inner))
    assert theirs.lm_head.weight is not theirs.model.language_model.embed_tokens.weight


def test_the_interval_counts_only_without_layer_types():
    interval = text(layer_types=None, full_attention_interval=2, num_hidden_layers=4)
    kinds = [layer.linear_attn is not None for layer in from_hf(interval).layers]
    assert kinds == [True, False, True, False]
    both = text(full_attention_interval=1)
    assert from_hf(both) == from_hf(text())


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"model_type": "qwen3_5_moe_text"}, "model_type"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, r"layer_types\[1\]"),
        ({"num_hidden_layers": 4}, "layer_types"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, r"rope_parameters\.rope_type"),
        ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, r"rope_parameters\.factor"),
        ({"rope_parameters": {"mrope_interleaved": False}}, r"rope_parameters\.mrope_interleaved"),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, r"rope_parameters\.mrope_section"),
        ({"num_experts": 8}, "num_experts"),
        ({"sliding_window": 128}, "sliding_window"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes, where):
    with pytest.raises(ConfigError, match=rf"(?m)^\s*-?\s*{where}"):
        from_hf(text(**changes))


def test_all_faults_of_a_composite_file_are_told_at_once():
    faulty = {**PUBLISHED, "text_config": {**PUBLISHED["text_config"], "hidden_act": "relu", "qk_norm": False}}
    with pytest.raises(ConfigError) as error:
        from_hf(faulty)
    assert {fault.where for fault in error.value.faults} == {"text_config.hidden_act", "text_config.qk_norm"}


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no config\.json"):
        from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="is no JSON"):
        from_hf(tmp_path)


def test_layers_that_differ_cannot_be_written():
    config = get_model_spec("debugmodel").model
    config.layers[0].linear_attn.conv_kernel_size = 2
    with pytest.raises(ConfigError, match="layers of one type differ"):
        config.to_hf_config()
