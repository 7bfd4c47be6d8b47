"""The same weights give the same logits and gradients as Hugging Face transformers, full-attention layers."""

import pytest
import torch
import transformers

from hp_models.qwen3_5_v2 import qwen3_5_config

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LAYERS = ["full_attention"] * 3
SECTION = [2, 1, 1]


def pair(*, tied=False, dtype=torch.float32):
    """Our model and theirs, with equal weights; norms moved off zero, where mistakes would not show."""
    theirs = transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(
            **SIZES,
            num_hidden_layers=3,
            layer_types=LAYERS,
            tie_word_embeddings=tied,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": SECTION,
            },
        )
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    ours = qwen3_5_config(**SIZES, layer_types=LAYERS, tie_word_embeddings=tied, mrope_section=tuple(SECTION)).build()
    # The only difference in names is their prefix.
    ours.load_state_dict({name.removeprefix("model."): value for name, value in theirs.state_dict().items()})
    return ours.to(dtype), theirs.to(dtype)


def inputs(case):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 101, (2, 37), generator=generator)
    mask = torch.ones(2, 37, dtype=torch.int64)
    match case:
        case "causal":
            return ids, mask, {}
        case "left padding":
            mask[1, :9] = 0
            return ids, mask, {"attention_mask": mask}
        case "right padding":
            mask[0, 30:] = 0
            return ids, mask, {"attention_mask": mask}
        case "positions":
            return ids, mask, {"position_ids": torch.arange(100, 137).expand(2, 37)}
        case "time, height, width":
            return ids, mask, {"position_ids": torch.randint(0, 60, (3, 2, 37), generator=generator)}


CASES = ["causal", "left padding", "right padding", "positions", "time, height, width"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_fp32_logits_and_every_gradient_are_those_of_transformers(case, tied):
    ours, theirs = pair(tied=tied)
    ids, tokens, options = inputs(case)
    logits, expected = ours(ids, **options), theirs(input_ids=ids, **options).logits
    tokens = tokens.bool()
    assert (logits - expected)[tokens].abs().max() <= 3e-5 * max(1.0, expected.abs().max().item())
    weight = torch.randn_like(logits) * tokens.unsqueeze(-1)
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    their_gradients = {name.removeprefix("model."): p.grad for name, p in theirs.named_parameters()}
    assert set(their_gradients) == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        reference = their_gradients[name]
        assert (parameter.grad - reference).norm() <= 1e-5 * reference.norm(), name


@pytest.mark.parametrize("case", ["causal", "left padding"])
def test_bf16_logits_are_within_two_ulps_of_transformers(case):
    ours, theirs = pair(dtype=torch.bfloat16)
    ids, tokens, options = inputs(case)
    # Their `.to(bf16)` rounds the frequencies, which a loaded checkpoint does not: give them back.
    theirs.model.rotary_emb.inv_freq = ours.rotary_emb.inv_freq
    logits, expected = ours(ids, **options), theirs(input_ids=ids, **options).logits
    ulp = 2.0 ** (expected.float().abs().clamp_min(2**-6).log2().floor() - 7)
    assert ((logits.float() - expected.float()).abs() <= 2 * ulp)[tokens.bool()].all()
