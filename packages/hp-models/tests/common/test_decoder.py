"""A whole decoder: packing and padding change nothing, states are declared, tied, initialised and restored."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hp_models.qwen3_5_v2 import qwen3_5_config
from hp_protocols.errors import ConfigError


def tiny_config(**changes):
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ["full_attention"] * 2,
        "partial_rotary_factor": 0.5,
        "mrope_section": (2, 1, 1),
        "max_position_embeddings": 64,
    }
    return qwen3_5_config(**{**sizes, **changes})


def perturbed(model):
    """The model with weights of a size at which every part of it matters."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def trainer_config(*, seq_len=32, tp=1, enable_sp=True):
    return SimpleNamespace(
        training=SimpleNamespace(seq_len=seq_len),
        parallelism=SimpleNamespace(
            tensor_parallel_degree=tp,
            enable_sequence_parallel=enable_sp,
            disable_loss_parallel=False,
            context_parallel_degree=1,
        ),
    )


def gradients(model, logits, weight):
    return torch.autograd.grad((logits * weight).sum(), list(model.parameters()))


def test_packed_documents_are_what_each_is_alone_forward_and_backward():
    model = perturbed(tiny_config().build()).double()
    ids = torch.randint(0, 61, (2, 12))
    bounds = [0, 5, 12, 13, 24]
    packed = model(ids, cu_seqlens=bounds)
    flat = ids.flatten()
    alone = torch.cat([model(flat[None, a:b])[0] for a, b in itertools.pairwise(bounds)])
    torch.testing.assert_close(packed.flatten(0, 1), alone, rtol=1e-11, atol=1e-11)
    weight = torch.randn(24, 61, dtype=torch.float64)
    for mine, reference in zip(
        gradients(model, packed.flatten(0, 1), weight), gradients(model, alone, weight), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-10)


def test_positions_restart_in_every_packed_document():
    model, ids = perturbed(tiny_config().build()), torch.randint(0, 61, (1, 9))
    packed = model(ids, cu_seqlens=[0, 4, 9])
    restarting = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    # Equal bits: positions that count on turn by other angles, with the same result but for rounding.
    assert torch.equal(packed, model(ids, cu_seqlens=[0, 4, 9], position_ids=restarting))
    assert not torch.equal(packed, model(ids, cu_seqlens=[0, 4, 9], position_ids=torch.arange(9)[None]))


def test_packed_documents_stay_apart_when_positions_are_given_too():
    model = perturbed(tiny_config().build()).double()
    ids = torch.randint(0, 61, (1, 9))
    together = model(ids, cu_seqlens=[0, 4, 9], position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]))
    torch.testing.assert_close(together[0, 4:], model(ids[:, 4:])[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_token_and_no_gradient(side):
    model = perturbed(tiny_config().build()).double()
    ids = torch.randint(0, 61, (1, 7))
    pad = torch.randint(0, 61, (1, 4))
    mask = torch.ones(1, 7), torch.zeros(1, 4)
    order = (1, 0) if side == "left" else (0, 1)
    padded, attention_mask = (torch.cat([pair[i] for i in order], dim=1) for pair in ((ids, pad), mask))
    tokens = slice(4, None) if side == "left" else slice(0, 7)
    logits = model(padded, attention_mask=attention_mask)
    torch.testing.assert_close(logits[:, tokens], model(ids), rtol=1e-10, atol=1e-10)
    assert logits.isfinite().all()
    weight = torch.randn(1, 7, 61, dtype=torch.float64)
    for mine, reference in zip(
        gradients(model, logits[:, tokens], weight), gradients(model, model(ids), weight), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-10)


def test_an_fp64_model_computes_in_fp64_throughout():
    # The same model in fp32 differs by fp32 rounding; were anything inside rounded to fp32, so would this one.
    model = perturbed(tiny_config().build()).double()
    ids = torch.randint(0, 61, (1, 16))
    whole, shifted = model(ids), model(ids, position_ids=torch.arange(1000, 1016)[None])
    torch.testing.assert_close(whole, shifted, rtol=1e-9, atol=1e-9)


def test_without_positions_they_count_from_zero():
    model, ids = perturbed(tiny_config().build()), torch.randint(0, 61, (2, 5))
    assert torch.equal(model(ids), model(ids, position_ids=torch.arange(5).expand(2, 5)))


def test_a_later_token_changes_no_earlier_logits():
    model, ids = perturbed(tiny_config().build()), torch.randint(0, 61, (1, 8))
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 61
    one, other = model(ids), model(changed)
    assert torch.equal(one[:, :5], other[:, :5])
    assert not torch.equal(one[:, 5:], other[:, 5:])


def test_token_ids_without_a_batch_are_refused():
    with pytest.raises(ValueError, match=r"input_ids of shape \(5,\)"):
        tiny_config().build()(torch.zeros(5, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(5,), (2, 1, 5), (2, 4), (2, 1, 5, 5)])
def test_an_attention_mask_that_is_no_padding_mask_is_refused(shape):
    with pytest.raises(ValueError, match=r"attention_mask of shape .*packed documents are given by cu_seqlens"):
        tiny_config().build()(torch.zeros(2, 5, dtype=torch.int64), attention_mask=torch.ones(shape))


@pytest.mark.parametrize("shape", [(5,), (1, 5), (5, 2, 5), (2, 6)])
def test_positions_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="position_ids of shape"):
        tiny_config().build()(torch.zeros(2, 5, dtype=torch.int64), position_ids=torch.zeros(shape, dtype=torch.int64))


def test_every_parameter_has_an_initialiser_of_the_declared_spread():
    model = tiny_config(vocab_size=4096, hidden_size=64, initializer_range=0.05).build()
    model.init_states(seed=3)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert not parameter.any(), name
        else:
            assert abs(parameter.std().item() / 0.05 - 1) < 0.1, name
            assert abs(parameter.mean().item()) < 0.005, name


def test_a_model_from_the_meta_device_is_the_same_model():
    config = tiny_config()
    direct = config.build()
    direct.init_states(seed=3)
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    model.init_states(seed=3)
    ids = torch.randint(0, 61, (1, 6))
    assert torch.equal(model(ids), direct(ids))


def test_a_model_from_the_meta_device_works_after_loading_without_init_states():
    config = tiny_config(tie_word_embeddings=True)
    source = perturbed(config.build())
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    ids = torch.randint(0, 61, (1, 6))
    assert torch.equal(model(ids), source(ids))


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_output_projection_is_the_embedding_before_and_after_materialising(tied):
    with torch.device("meta"):
        model = tiny_config(tie_word_embeddings=tied).build()
    for _ in range(2):
        assert (model.lm_head.weight is model.embed_tokens.weight) == tied
        model.to_empty(device="cpu")
    model.init_states(seed=0)
    assert (model.lm_head.weight is model.embed_tokens.weight) == tied


@pytest.mark.parametrize("packed", [False, True])
def test_the_whole_model_is_one_graph_whether_or_not_documents_are_packed(packed):
    model, ids = perturbed(tiny_config().build()), torch.randint(0, 61, (2, 6))
    options = {"cu_seqlens": [0, 2, 6, 12], "attention_mask": torch.ones(2, 6)} if packed else {}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(ids, **options), model(ids, **options))


def test_every_module_follows_the_protocol():
    tiny_config().build().verify_module_protocol()


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_what_torch_counts(tied):
    config = tiny_config(tie_word_embeddings=tied)
    model, seq_len = config.build(), 24
    nparams, flops = config.get_nparams_and_flops(model, seq_len)
    assert nparams == sum(p.numel() for p in set(model.parameters()))
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        model(torch.zeros(2, seq_len, dtype=torch.int64)).sum().backward()
    assert counter.get_total_flops() == flops * 2 * seq_len


def test_the_run_s_length_is_taken_over_and_is_what_flops_are_counted_for():
    config = tiny_config()
    model = config.build()
    with pytest.raises(ValueError, match="seq_len is not known yet"):
        config.get_nparams_and_flops(model)
    config.update_from_config(trainer_config=trainer_config(seq_len=48))
    assert config.seq_len == 48
    assert config.get_nparams_and_flops(model) == config.get_nparams_and_flops(model, 48)


def test_an_explicit_mask_changes_nothing_and_comes_with_context_parallelism():
    config = tiny_config()
    run = trainer_config()
    run.parallelism.context_parallel_degree = 2
    assert not config.explicit_mask
    config.update_from_config(trainer_config=run)
    assert config.explicit_mask
    implicit, explicit = tiny_config().build(), config.build()
    explicit.load_state_dict(perturbed(implicit).state_dict())
    ids = torch.randint(0, 61, (2, 12))
    torch.testing.assert_close(explicit(ids), implicit(ids))


def test_rows_longer_than_the_model_are_refused():
    with pytest.raises(ConfigError, match=r"training.seq_len: 65 is longer .* at most 64"):
        tiny_config().update_from_config(trainer_config=trainer_config(seq_len=65))


def test_degrees_that_cannot_share_the_heads_or_the_sequence_are_refused_together():
    with pytest.raises(ConfigError) as error:
        tiny_config().update_from_config(trainer_config=trainer_config(seq_len=33, tp=8))
    text = str(error.value)
    assert "8 ranks cannot share 4 attention heads evenly; allowed: 1, 2, 4" in text
    assert "33 tokens cannot be shared by 8 ranks" in text
    assert [fault.where for fault in error.value.faults] == ["parallelism.tensor_parallel_degree", "training.seq_len"]


def test_without_sequence_parallelism_any_length_can_be_shared():
    tiny_config().update_from_config(trainer_config=trainer_config(seq_len=33, tp=2, enable_sp=False))
