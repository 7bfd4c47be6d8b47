"""Initialisers fill in place, and their declarations are plain data that builds into them."""

import torch

from hp_models.common import Embedding, RMSNorm
from hp_models.common.param_init import normal, ones, zeros


def test_declarations_build_into_initialisers_that_fill_in_place():
    torch.manual_seed(0)
    tensor = torch.empty(200, 200)
    normal(0.3).build()(tensor)
    assert abs(tensor.std() - 0.3) < 0.01
    assert abs(tensor.mean()) < 0.01
    ones().build()(tensor)
    assert torch.equal(tensor, torch.ones(200, 200))
    zeros().build()(tensor)
    assert not tensor.any()


def test_a_layer_starts_as_its_config_declares():
    norm = RMSNorm.Config(dim=4, param_init={"weight": zeros()}).build()
    norm.init_states(seed=0)
    assert not norm.weight.any()


def test_a_declaration_survives_being_written_and_read():
    config = Embedding.Config(num_embeddings=3, embedding_dim=2, param_init={"weight": normal(0.1)})
    assert Embedding.Config.from_dict(config.to_dict()) == config
