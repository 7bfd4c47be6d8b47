"""What the entry point offers, what the debug flavour is, and what is refused by name."""

import subprocess
import sys

import pytest
import torch

from hp_models.qwen3_5_v2 import debugmodel, get_model_spec, parallelize_qwen3_5_v2, qwen3_5_config
from hp_protocols.errors import ConfigError
from hp_protocols.model_spec import get_spec, list_flavors

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def test_the_installed_entry_point_offers_the_flavours():
    assert tuple(list_flavors("qwen3_5_v2")) == get_model_spec.flavors == ("debugmodel",)
    spec = get_spec("qwen3_5_v2", "debugmodel")
    assert (spec.name, spec.flavor) == ("qwen3_5_v2", "debugmodel")
    assert spec.parallelize_fn is parallelize_qwen3_5_v2
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
    assert out.strip() == "('debugmodel',) False"


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
