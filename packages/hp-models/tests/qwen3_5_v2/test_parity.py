"""The same weights give the same logits and gradients as Hugging Face transformers, both kinds of layers."""

import pytest
import torch
from hybrid import LAYERS, pair, their_gradients

LENGTHS = [1, 3, 63, 64, 65, 200]


def inputs(length, case):
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 101, (2, length), generator=generator)
    mask = torch.ones(2, length, dtype=torch.int64)
    match case:
        case "causal":
            return ids, mask, {}
        case "left padding":
            mask[1, : length // 3] = 0
            return ids, mask, {"attention_mask": mask}
        case "right padding":
            mask[0, length - length // 4 :] = 0
            return ids, mask, {"attention_mask": mask}
        case "positions":
            return ids, mask, {"position_ids": torch.arange(100, 100 + length).expand(2, length)}
        case "time, height, width":
            return ids, mask, {"position_ids": torch.randint(0, 60, (3, 2, length), generator=generator)}
        case "text, time, height, width":
            text = torch.arange(length).expand(1, 2, length)
            rows = torch.randint(0, 60, (3, 2, length), generator=generator)
            return ids, mask, {"position_ids": torch.cat((text, rows))}


CASES = [(length, case) for length in LENGTHS for case in ("causal", "left padding", "right padding")]
CASES += [(37, case) for case in ("positions", "time, height, width", "text, time, height, width")]


def compare(ours, theirs, length, case):
    ids, tokens, options = inputs(length, case)
    logits, expected = ours(ids, **options), theirs(input_ids=ids, use_cache=False, **options).logits
    tokens = tokens.bool()
    assert (logits - expected)[tokens].abs().max() <= 3e-5 * max(1.0, expected.detach().abs().max().item())
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)) * tokens.unsqueeze(-1)
    for model, out in ((ours, logits), (theirs, expected)):
        model.zero_grad()
        (out * weight).sum().backward()
    references = their_gradients(ours, theirs)
    largest = max(reference.norm().item() for reference in references.values())
    # A tied matrix stands in the state dict under both names, among the parameters under the first.
    assert {name for name, _ in ours.named_parameters()} == set(references) - ({"lm_head.weight"} & tied_names(ours))
    for name, parameter in ours.named_parameters():
        reference = references[name]
        # What should be zero (what a first token's queries do) is noise on both sides.
        assert (parameter.grad - reference).norm() <= 1e-4 * reference.norm() + 1e-7 * largest, name


def tied_names(model):
    return {"lm_head.weight"} if model.config.tie_word_embeddings else set()


@pytest.fixture(scope="module")
def models():
    return pair()


@pytest.mark.parametrize(("length", "case"), CASES)
def test_fp32_logits_and_every_gradient_are_those_of_transformers(models, length, case):
    compare(*models, length, case)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 6, "linear_num_value_heads": 2},
        {"num_key_value_heads": 1, "linear_num_key_heads": 1, "linear_num_value_heads": 4},
        {"linear_conv_kernel_dim": 2, "linear_value_head_dim": 8},
        {"layer_types": ["linear_attention"] * 3},
    ],
    ids=["tied", "a key head for each", "one key head", "other widths", "no full attention"],
)
def test_other_models_agree_too(changes):
    compare(*pair(**changes), 70, "left padding")


@pytest.mark.parametrize("case", ["causal", "left padding"])
@pytest.mark.parametrize("length", [3, 64, 200])
def test_bf16_logits_are_within_two_ulps_of_transformers(length, case):
    ours, theirs = pair(torch.bfloat16)
    ids, tokens, options = inputs(length, case)
    # Their `.to(bf16)` rounds the frequencies, which a loaded checkpoint does not: give them back.
    theirs.model.rotary_emb.inv_freq = ours.rotary_emb.inv_freq
    with torch.no_grad():
        logits = ours(ids, **options)[tokens.bool()].float()
        expected = theirs(input_ids=ids, use_cache=False, **options).logits[tokens.bool()].float()
    ulp = 2.0 ** (expected.abs().max().log2().floor() - 7)
    assert (logits - expected).abs().max() <= 2 * ulp
    # Nearly all are the same bits.
    assert (logits == expected).float().mean() > 0.5


def test_text_positions_that_start_again_start_a_document():
    ours, _ = pair()
    ours = ours.double()
    ids = torch.randint(0, 101, (1, 70))
    restarting = torch.cat((torch.arange(41), torch.arange(29)))
    alone = torch.cat((ours(ids[:, :41]), ours(ids[:, 41:])), dim=1)
    for position_ids in (restarting[None], restarting.expand(4, 1, 70)):
        torch.testing.assert_close(ours(ids, position_ids=position_ids), alone, rtol=1e-11, atol=1e-11)
    # Three rows are angles only, and a padding mask says itself what belongs together.
    leaking = ours(ids, position_ids=restarting.expand(3, 1, 70))
    assert (leaking - alone)[:, 41:].abs().max() > 1e-3
    torch.testing.assert_close(
        ours(ids, position_ids=restarting[None], attention_mask=torch.ones(1, 70, dtype=torch.int64)),
        leaking,
        rtol=1e-11,
        atol=1e-11,
    )


def test_the_layers_are_the_two_kinds():
    ours, _ = pair()
    kinds = ["linear_attention" if layer.linear_attn is not None else "full_attention" for layer in ours.layers]
    assert kinds == LAYERS
