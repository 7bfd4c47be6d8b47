"""Rotary embedding against rotation of complex numbers, and the precision of its frequencies in every dtype."""

import pytest
import torch

from hp_models.common import RoPE
from hp_models.common.rope import apply_rotary, mrope_axes


def rope(**changes):
    return RoPE.Config(**{"head_dim": 32, "theta": 1e7, "partial_rotary_factor": 0.5, **changes}).build()


def stored_frequencies(rotary_dim, theta):
    return 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))


def test_the_angles_turn_pairs_of_channels_as_complex_numbers():
    x = torch.randn(2, 7, 3, 32, dtype=torch.float64)
    positions = torch.randint(0, 100, (2, 7))
    cos, sin = rope()(positions, dtype=torch.float64)
    turned = apply_rotary(x, cos, sin)
    angle = positions[:, :, None, None].double() * stored_frequencies(16, 1e7).double()
    expected = torch.complex(x[..., :8], x[..., 8:16]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(turned[..., :8], expected.real, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(turned[..., 8:16], expected.imag, rtol=1e-12, atol=1e-12)
    assert torch.equal(turned[..., 16:], x[..., 16:])


def test_a_fully_rotated_head_keeps_its_width():
    x = torch.randn(1, 4, 2, 32)
    cos, sin = rope(partial_rotary_factor=1.0)(torch.arange(4)[None], dtype=torch.float32)
    assert apply_rotary(x, cos, sin).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casting_a_model_leaves_the_frequencies_at_their_fp32_values(dtype):
    module = rope().to(dtype)
    assert module.inv_freq.dtype == torch.float32
    assert torch.equal(module.inv_freq, stored_frequencies(16, 1e7))


def test_building_under_another_default_dtype_leaves_the_frequencies_at_their_fp32_values():
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = rope()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(module.inv_freq, stored_frequencies(16, 1e7))


def test_a_module_from_the_meta_device_has_its_frequencies_once_it_is_given_memory():
    with torch.device("meta"):
        module = rope(mrope_section=(3, 3, 2))
    assert module.inv_freq.is_meta
    module.to_empty(device="cpu")
    assert torch.equal(module.inv_freq, stored_frequencies(16, 1e7))
    assert module.axis_of_slot.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_the_frequencies_are_no_part_of_the_state_dict():
    assert rope().state_dict() == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cos_and_sin_are_computed_in_fp32_and_cast_once(dtype):
    positions = torch.tensor([[0, 1, 1000, 30000]])
    cos, sin = rope()(positions, dtype=dtype)
    angle = positions[..., None].float() * stored_frequencies(16, 1e7)
    assert torch.equal(cos, torch.cat((angle, angle), -1).cos().to(dtype))
    assert torch.equal(sin, torch.cat((angle, angle), -1).sin().to(dtype))


def test_each_slot_turns_by_time_height_or_width_in_turn():
    assert mrope_axes(8, (3, 3, 2)) == [0, 1, 2, 0, 1, 2, 0, 1]
    # Height and width end at 3 · section; what is left belongs to time.
    assert mrope_axes(8, (6, 1, 1)) == [0, 1, 2, 0, 0, 0, 0, 0]
    # A section for 32 slots, cut to 8.
    assert mrope_axes(8, (11, 11, 10)) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_three_rows_of_positions_turn_their_own_slots():
    module = rope(mrope_section=(3, 3, 2))
    positions = torch.randint(0, 50, (3, 2, 5))
    cos, _ = module(positions, dtype=torch.float32)
    for slot, axis in enumerate([0, 1, 2, 0, 1, 2, 0, 1]):
        alone, _ = module(positions[axis], dtype=torch.float32)
        assert torch.equal(cos[..., slot], alone[..., slot])
        assert torch.equal(cos[..., slot + 8], alone[..., slot])


def test_three_equal_rows_are_ordinary_positions():
    module, positions = rope(mrope_section=(3, 3, 2)), torch.randint(0, 50, (2, 5))
    for one, three in zip(
        module(positions, dtype=torch.float32), module(positions.expand(3, 2, 5), dtype=torch.float32), strict=True
    ):
        assert torch.equal(one, three)


def test_three_rows_are_refused_without_sections():
    with pytest.raises(ValueError, match="no mrope_section"):
        rope()(torch.zeros(3, 2, 5, dtype=torch.int64), dtype=torch.float32)


@pytest.mark.parametrize("factor", [0.0, 3 / 32, 2.0])
def test_a_rotary_width_that_is_no_even_part_of_the_head_is_refused(factor):
    with pytest.raises(ValueError, match="even number"):
        rope(partial_rotary_factor=factor)
