"""The two norm conventions against torch's own rms_norm and against the order of casts that each prescribes."""

import pytest
import torch
import torch.nn.functional as F

from hp_models.common import Qwen3_5RMSNorm, RMSNorm


def make(cls, dim, dtype=torch.float32):
    norm = cls.Config(dim=dim, eps=1e-5).build()
    torch.nn.init.normal_(norm.weight, std=0.5)
    return norm.to(dtype)


def test_a_plain_norm_is_torchs_rms_norm():
    norm, x = make(RMSNorm, 48), torch.randn(3, 5, 48)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (48,), norm.weight, 1e-5), rtol=1e-6, atol=1e-6)


def test_a_qwen_norm_scales_by_one_plus_its_weight():
    norm, x = make(Qwen3_5RMSNorm, 48), torch.randn(3, 5, 48)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (48,), 1 + norm.weight, 1e-5), rtol=1e-6, atol=1e-6)


def test_an_untrained_norm_of_either_kind_scales_by_one():
    x = torch.randn(4, 32)
    for cls in (RMSNorm, Qwen3_5RMSNorm):
        torch.testing.assert_close(cls.Config(dim=32).build()(x), F.rms_norm(x, (32,), eps=1e-6), rtol=1e-6, atol=1e-6)


def test_in_bf16_the_qwen_norm_multiplies_in_fp32_and_casts_once():
    norm, x = make(Qwen3_5RMSNorm, 64, torch.bfloat16), torch.randn(64, 64).bfloat16()
    exact = F.rms_norm(x.float(), (64,), 1.0 + norm.weight.float(), 1e-5)
    assert torch.equal(norm(x), exact.bfloat16())


def test_in_bf16_the_plain_norm_casts_before_the_weight():
    norm, x = make(RMSNorm, 64, torch.bfloat16), torch.randn(64, 64).bfloat16()
    assert torch.equal(norm(x), norm.weight * F.rms_norm(x.float(), (64,), eps=1e-5).bfloat16())


@pytest.mark.parametrize("cls", [RMSNorm, Qwen3_5RMSNorm])
def test_an_fp64_norm_computes_in_fp64(cls):
    norm, x = make(cls, 48, torch.float64), torch.randn(3, 48, dtype=torch.float64)
    weight = norm.weight if cls is RMSNorm else 1 + norm.weight
    exact = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(norm(x), exact, rtol=1e-13, atol=1e-13)
