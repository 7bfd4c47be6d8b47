"""What the entry point offers, what the debug flavour is, and what is refused by name."""

import subprocess
import sys

import pytest
import torch
import transformers

from hp_models.qwen3_5_v2 import (
    Qwen3_5StateDictAdapter,
    debugmodel,
    get_model_spec,
    parallelize_qwen3_5_v2,
    qwen3_5_config,
)
from hp_protocols.errors import ConfigError
from hp_protocols.model_spec import get_spec, list_flavors

FLAVORS = ("debugmodel", "0.8B", "2B", "4B", "9B", "27B")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def test_the_installed_entry_point_offers_the_flavours():
    assert tuple(list_flavors("qwen3_5_v2")) == get_model_spec.flavors == FLAVORS
    spec = get_spec("qwen3_5_v2", "debugmodel")
    assert (spec.name, spec.flavor) == ("qwen3_5_v2", "debugmodel")
    assert spec.parallelize_fn is parallelize_qwen3_5_v2
    assert spec.state_dict_adapter is Qwen3_5StateDictAdapter
    assert spec.model == debugmodel()


def test_without_a_flavour_the_default_is_taken():
    assert get_model_spec().flavor == get_model_spec.default_flavor == "debugmodel"


def test_each_spec_has_a_config_of_its_own():
    first, second = get_model_spec("debugmodel"), get_model_spec("debugmodel")
    first.model.layers[0].mlp.gate_proj.out_features = 1
    assert second.model == debugmodel()


def test_an_unknown_flavour_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no flavor 'debugmodle'(.|\n)*did you mean debugmodel"):
        get_model_spec("debugmodle")


def test_flavours_can_be_listed_without_loading_torch():
    code = "import sys; from hp_models.qwen3_5_v2 import get_model_spec as g; print(g.flavors, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == f"{FLAVORS} False"


def test_an_unknown_layer_type_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown layer type 'full_atention'(.|\n)*did you mean full_attention"):
        qwen3_5_config(**SIZES, layer_types=["full_atention"])


def test_a_model_without_layers_is_refused():
    with pytest.raises(ConfigError, match="a model without layers"):
        qwen3_5_config(**SIZES, layer_types=[])


def test_the_config_tree_survives_being_written_and_read():
    config = debugmodel()
    assert type(config).from_dict(config.to_dict()) == config


def test_the_debug_model_is_small_and_starts_near_the_loss_of_a_uniform_guess():
    config = debugmodel()
    model = config.build()
    model.init_states(seed=0)
    nparams, _ = config.get_nparams_and_flops(model, 256)
    assert 2_000_000 < nparams < 6_000_000
    ids = torch.randint(0, config.vocab_size, (2, 64))
    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), torch.randint(0, config.vocab_size, (128,)))
    assert abs(loss.item() - torch.tensor(float(config.vocab_size)).log().item()) < 0.3


# Parameters of the text part: the published totals (0.853B …) without the vision tower.
PUBLISHED = {
    "0.8B": 752_393_024,
    "2B": 1_881_825_088,
    "4B": 4_205_751_296,
    "9B": 8_953_803_264,
    "27B": 26_895_998_464,
}


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_a_published_size_has_as_many_parameters_as_in_transformers(flavor):
    config = get_model_spec(flavor).model
    with torch.device("meta"):
        model = config.build()
        theirs = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**config.to_hf_config()))
    nparams, _ = config.get_nparams_and_flops(model, 4096)
    assert nparams == sum(parameter.numel() for parameter in theirs.parameters()) == PUBLISHED[flavor]
    assert theirs.config.tie_word_embeddings is config.tie_word_embeddings is (flavor in ("0.8B", "2B", "4B"))
    assert [layer.linear_attn is None for layer in config.layers[:4]] == [False, False, False, True]
