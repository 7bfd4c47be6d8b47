"""A small hybrid model and the same one in transformers: sizes at which a mistake shows, weights moved off their start.

In: changes of sizes. Out: the pair with equal weights. Key heads serve two value heads, query heads three to a key
head; widths of keys and values differ; MLP, model and rotary widths differ.
"""

import torch
import transformers

from hp_models.qwen3_5_v2 import Qwen3_5Model, Qwen3_5StateDictAdapter

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
SECTION = [2, 1, 1]


def hf_config(**changes):
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": SECTION}
    given = {**SIZES, "num_hidden_layers": len(LAYERS), "layer_types": LAYERS, "rope_parameters": rope, **changes}
    return transformers.Qwen3_5TextConfig(**given)


def perturb(model, seed=1):
    """Move every parameter: at its start a wrong norm, decay or bias would not show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def pair(dtype=torch.float32, **changes):
    """Our model and theirs, made from one config and one state dict."""
    torch.manual_seed(0)
    theirs = perturb(transformers.Qwen3_5ForCausalLM(hf_config(**changes)))
    config = Qwen3_5Model.Config.from_hf_config(theirs.config.to_dict())
    # Not initialised: built, loaded and used.
    ours = config.build()
    ours.load_state_dict(Qwen3_5StateDictAdapter(config).from_hf(theirs.state_dict()))
    return ours.to(dtype), theirs.to(dtype)


def their_gradients(ours, theirs):
    """The gradients of transformers under our names."""
    adapter = Qwen3_5StateDictAdapter(ours.config)
    return adapter.from_hf({name: parameter.grad for name, parameter in theirs.named_parameters()})
