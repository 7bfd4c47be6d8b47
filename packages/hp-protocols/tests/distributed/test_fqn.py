"""Canonical names: no wrapper shows in them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hp_protocols.distributed import canonical_fqn, canonical_named_parameters, canonical_state_dict


@pytest.mark.parametrize(
    ("wrapped", "canonical"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("layers.0._checkpoint_wrapped_module.attention._orig_mod.wq.weight", "layers.0.attention.wq.weight"),
        ("_orig_mod.layers._checkpoint_wrapped_module._orig_mod.weight", "layers.weight"),
        ("_fsdp_wrapped_module.weight", "weight"),
        ("layers.0._checkpoint_wrapped_module", "layers.0"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("", ""),
    ],
)
def test_wrappers_are_stripped_as_whole_parts_of_a_name(wrapped, canonical):
    assert canonical_fqn(wrapped) == canonical


def test_states_of_a_compiled_and_recomputed_model_have_the_plain_models_names():
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    names = list(plain.state_dict())
    parameters = [name for name, _ in plain.named_parameters()]
    wrapped = torch.compile(nn.Sequential(checkpoint_wrapper(plain[0]), torch.compile(plain[1])))
    assert list(wrapped.state_dict()) != names
    assert list(canonical_state_dict(wrapped)) == names
    assert [name for name, _ in canonical_named_parameters(wrapped)] == parameters
    plain.load_state_dict(canonical_state_dict(wrapped))


def test_two_entries_of_one_canonical_name_are_an_error():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1))
    model._orig_mod = nn.Module()
    model._orig_mod.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="both called 'weight'"):
        canonical_state_dict(model)
