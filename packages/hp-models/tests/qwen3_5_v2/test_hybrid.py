"""The hybrid model as a whole: packed documents, recomputation, compiled blocks, FLOPs, first values."""

import copy
import itertools

import pytest
import torch
from hybrid import SIZES, pair
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from hp_models.common import GatedDeltaNet, Linear
from hp_models.qwen3_5_v2 import qwen3_5_config
from hp_protocols.distributed import apply_ac, apply_compile, canonical_fqn


@pytest.fixture(scope="module")
def model():
    return pair()[0]


def gradients(model, loss):
    return dict(
        zip(
            (canonical_fqn(name) for name, _ in model.named_parameters()),
            torch.autograd.grad(loss, list(model.parameters())),
            strict=True,
        )
    )


@pytest.mark.parametrize("bounds", [[0, 5, 12, 13, 100, 200], [0, 64, 100, 164, 200]])
def test_packed_documents_are_what_each_is_alone_forward_and_backward(model, bounds):
    model = copy.deepcopy(model).double()
    ids = torch.randint(0, 101, (2, 100))
    packed = model(ids, cu_seqlens=bounds).flatten(0, 1)
    alone = torch.cat([model(ids.flatten()[None, a:b])[0] for a, b in itertools.pairwise(bounds)])
    torch.testing.assert_close(packed, alone, rtol=1e-11, atol=1e-11)
    weight = torch.randn_like(packed)
    expected = gradients(model, (alone * weight).sum())
    for name, gradient in gradients(model, (packed * weight).sum()).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-10 * expected[name].abs().max().item())


def test_what_a_document_says_changes_nothing_in_the_others(model):
    ids = torch.randint(0, 101, (1, 90))
    other = ids.clone()
    other[:, :40] = (ids[:, :40] + 1) % 101
    first, second = model(ids, cu_seqlens=[0, 40, 90]), model(other, cu_seqlens=[0, 40, 90])
    assert torch.equal(first[:, 40:], second[:, 40:])


def test_an_fp64_model_computes_in_fp64_throughout(model):
    model = copy.deepcopy(model).double()
    ids = torch.randint(0, 101, (1, 130))
    logits = model(ids)
    assert logits.dtype == torch.float64
    # With other chunks: whatever is rounded to fp32 on the way would differ by 1e-7.
    shifted = model(torch.cat((ids[:, :17], ids), dim=1), cu_seqlens=[0, 17, 147])[:, 17:]
    torch.testing.assert_close(shifted, logits, rtol=1e-12, atol=1e-12)


def recomputed(model, mode):
    model = copy.deepcopy(model)
    apply_ac(model, blocks=model.layers, mode=mode)
    ids = torch.randint(0, 101, (2, 128), generator=torch.Generator().manual_seed(0))
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        loss = model(ids).square().mean()
        loss.backward()
    peak = sum(snapshot["Activation"] for snapshot in tracker.get_tracker_snapshot("peak").values())
    return peak, {canonical_fqn(name): parameter.grad for name, parameter in model.named_parameters()}


def test_recomputation_gives_the_same_bits_and_keeps_less(model):
    plain, expected = recomputed(model, "none")
    selective, some = recomputed(model, "selective")
    full, all_ = recomputed(model, "full")
    for name, gradient in expected.items():
        assert torch.equal(some[name], gradient), name
        assert torch.equal(all_[name], gradient), name
    assert full < selective < plain
    assert full < 0.5 * plain


def test_compiled_blocks_agree_and_are_compiled_once_for_all_packings(model):
    compiled = copy.deepcopy(model)
    apply_compile(blocks=compiled.layers, backend="aot_eager")
    ids = torch.randint(0, 101, (2, 70))
    for bounds in ([0, 37, 70, 140], [0, 70, 75, 76, 140]):
        compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        logits, expected = compiled(ids, cu_seqlens=bounds), model(ids, cu_seqlens=bounds)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        reference = gradients(model, expected.square().mean())
        for name, gradient in gradients(compiled, logits.square().mean()).items():
            scale = reference[name].abs().max().item()
            torch.testing.assert_close(gradient, reference[name], rtol=1e-4, atol=1e-4 * scale)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compilations


def test_flops_are_what_torch_counts_but_for_solves_and_ends():
    rows, length = 2, 192
    config = qwen3_5_config(**SIZES, layer_types=["linear_attention"] * 2, mrope_section=(2, 1, 1))
    model = config.build()
    model.init_states(seed=0)
    _, flops = config.get_nparams_and_flops(model, length)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(rows, length, dtype=torch.int64)).sum().backward()
    layers, heads, key_dim, value_dim, chunk = 2, 4, 16, 24, 64
    # torch counts no triangular solves: one forward and one backward, half a product each.
    solves = rows * length * layers * heads * 2 * chunk * (key_dim + value_dim)
    # A row starts from a state of zeros, that needs no gradient, and nobody asks for its last state: four products.
    ends = rows * layers * heads * 4 * 2 * chunk * key_dim * value_dim
    assert counter.get_total_flops() == flops * rows * length - solves - ends
    multiplied = sum(module.weight.numel() for module in model.modules() if isinstance(module, Linear))
    assert flops == 6 * multiplied + 2 * config.layers[0].linear_attn.core_flops(length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_values_are_finite_and_in_range(dtype):
    model = qwen3_5_config(**{**SIZES, "linear_num_value_heads": 400}, layer_types=["linear_attention"] * 3).build()
    model = model.to(dtype)
    model.init_states(seed=0)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
    layers = [module for module in model.modules() if isinstance(module, GatedDeltaNet)]
    rates = torch.cat([layer.A_log.float().exp() for layer in layers])
    # A rounded logarithm moves the rate by at most a hundredth.
    assert rates.min() >= 0.0099
    assert rates.max() <= 16.2
    assert 7 < rates.mean() < 9
    for layer in layers:
        assert (layer.dt_bias == 1).all()
        assert (layer.norm.weight == 1).all()
        assert 0.015 < layer.conv_v.float().std() < 0.025
    assert model(torch.zeros(1, 5, dtype=torch.int64)).isfinite().all()


def test_value_heads_that_key_heads_cannot_share_are_refused():
    config = qwen3_5_config(**{**SIZES, "linear_num_value_heads": 3}, layer_types=["linear_attention"])
    with pytest.raises(ValueError, match="num_value_heads 3 must be a multiple of num_key_heads 2"):
        config.build()


def test_a_block_has_one_mixer():
    config = qwen3_5_config(**SIZES, layer_types=["linear_attention", "full_attention"])
    config.layers[0].self_attn = config.layers[1].self_attn
    with pytest.raises(ValueError, match="exactly one of self_attn and linear_attn"):
        config.build()
