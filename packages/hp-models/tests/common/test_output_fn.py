"""What a decoder hands to `output_fn`: its projection and the hidden states that would have gone into it."""

import torch

from hp_models.qwen3_5_v2 import qwen3_5_config


def test_output_fn_stands_in_place_of_the_output_projection():
    torch.manual_seed(0)
    model = qwen3_5_config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["full_attention"],
        mrope_section=(1, 1, 0),
    ).build()
    model.init_states(seed=0)
    ids_BS = torch.randint(61, (2, 8))
    seen = {}

    def keep(projection, hidden_BSD):
        seen.update(projection=projection, shape=tuple(hidden_BSD.shape))
        return projection.forward(hidden_BSD)

    assert torch.equal(model(ids_BS, output_fn=keep), model(ids_BS))
    assert seen == {"projection": model.lm_head, "shape": (2, 8, 32)}
    assert model(ids_BS, output_fn=lambda projection, hidden_BSD: "whatever it returns") == "whatever it returns"
