"""What differs between two configs, path by path."""

from __future__ import annotations

import toy_trainer

from hp_config import Difference, diff_configs
from hp_config.difference import ABSENT


def test_equal_configs_do_not_differ() -> None:
    assert diff_configs(toy_trainer.small(), toy_trainer.small()) == []


def test_every_changed_value_is_named_with_both_sides() -> None:
    assert diff_configs(toy_trainer.small(), toy_trainer.wide()) == [
        Difference("training.steps", 10, 20),
        Difference("training.seq_len", 16, 32),
        Difference("training.local_batch_size", 2, 4),
    ]


def test_another_class_in_a_section_shows_its_class_and_its_fields() -> None:
    found = diff_configs(toy_trainer.small(), toy_trainer.plain_optimizer())
    assert Difference("optimizer._type", "toy_trainer.Adam.Config", "toy_trainer.Optimizer.Config") in found
    assert Difference("optimizer.betas", [0.9, 0.95], ABSENT) in found
    assert Difference("optimizer.lr", 0.001, 0.5) in found


def test_nodes_in_lists_are_compared_one_by_one_and_plain_lists_as_a_whole() -> None:
    left, right = toy_trainer.small(), toy_trainer.small()
    right.model_spec.model.layers[1].dim = 9
    right.model_spec.model.layers.pop()
    right.optimizer.decay_keywords = ["bias"]
    assert [str(difference) for difference in diff_configs(left, right)] == [
        "model_spec.model.layers.1.dim: 8 → 9",
        "model_spec.model.layers.3: toy_trainer.Layer.Config → (absent)",
        "optimizer.decay_keywords: ['bias', 'norm'] → ['bias']",
    ]


def test_true_is_not_one_and_null_is_written_as_yaml_does() -> None:
    left, right = toy_trainer.small(), toy_trainer.small()
    left.dataloader.extra, right.dataloader.extra = True, 1
    left.debug.seed, right.debug.seed = None, 0
    left.validation, right.validation = None, toy_trainer.Loader.Config()
    assert [str(difference) for difference in diff_configs(left, right)] == [
        "dataloader.extra: true → 1",
        "validation: null → toy_trainer.Loader.Config",
        "debug.seed: null → 0",
    ]
