"""What one package promises and only another one's presence can show."""

from __future__ import annotations

import torch

import hp_config
from hp_config import ConfigManager, dump_yaml
from hp_config.cli import show
from hp_protocols import get_spec, list_flavors


def test_the_dtype_map_covers_the_dtypes_of_the_sections() -> None:
    names = ("bfloat16", "float32", "float16")
    assert {name: hp_config.TORCH_DTYPE_MAP[name] for name in names} == {n: getattr(torch, n) for n in names}


def test_a_recipes_whole_config_reads_back_equal_from_yaml(tmp_path) -> None:
    words = ["--module", "qwen3_5_v2", "--config", "qwen3_5_v2_debugmodel", "--training.steps", "7"]
    config = ConfigManager().parse_args(words)
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    assert ConfigManager().parse_args([str(tmp_path / "run.yaml")]) == config
    assert type(config).from_dict(config.to_dict()) == config
    code, text = show(words)
    assert code == 0
    assert "steps: 7" in text


def test_the_model_is_found_by_its_entry_point() -> None:
    assert "debugmodel" in list_flavors("qwen3_5_v2")
    assert get_spec("qwen3_5_v2").flavor == "debugmodel"
    one, other = get_spec("qwen3_5_v2", "debugmodel"), get_spec("qwen3_5_v2", "debugmodel")
    one.model.layers.pop()
    assert len(other.model.layers) == len(one.model.layers) + 1
