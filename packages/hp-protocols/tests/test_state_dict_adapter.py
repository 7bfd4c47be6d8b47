"""BaseStateDictAdapter: what every adapter has, and the index of a published checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hp_protocols.configurable import Configurable
from hp_protocols.state_dict_adapter import BaseStateDictAdapter


class Prefixing(BaseStateDictAdapter):
    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): value for name, value in hf_state_dict.items()}


CONFIG: Any = Configurable.Config()


def test_an_adapter_must_translate_both_ways() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BaseStateDictAdapter(CONFIG)  # type: ignore[abstract]
    adapter = Prefixing(CONFIG)
    assert adapter.from_hf(adapter.to_hf({"w": 1})) == {"w": 1}
    assert (adapter.model_config, adapter.hf_assets_path, adapter.fqn_to_index_mapping) == (CONFIG, None, None)


def test_the_index_says_which_file_holds_which_weight(tmp_path: Path) -> None:
    weight_map = {"model.a": "model-00001-of-00002.safetensors", "model.b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert Prefixing(CONFIG, str(tmp_path)).fqn_to_index_mapping == {"model.a": 1, "model.b": 2}


def test_a_checkpoint_in_one_file_has_no_index(tmp_path: Path) -> None:
    assert Prefixing(CONFIG, str(tmp_path)).fqn_to_index_mapping is None


def test_a_missing_folder_and_a_broken_index_are_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        Prefixing(CONFIG, str(tmp_path / "missing"))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        Prefixing(CONFIG, str(tmp_path))
