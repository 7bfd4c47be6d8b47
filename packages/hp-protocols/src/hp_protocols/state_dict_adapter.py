"""Translating a model's state dict from and to the layout that Hugging Face publishes.

In: a model config, and the folder with the published files if there is one. Out: `BaseStateDictAdapter`, whose
`to_hf` and `from_hf` a model's package implements as exact inverses. Torch-free.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import BaseModel

__all__ = ["BaseStateDictAdapter"]

_INDEX_FILE = "model.safetensors.index.json"


class BaseStateDictAdapter(ABC):
    """Base of the adapters: one per model, made with the model's config.

    Attributes:
        model_config: the config of the model whose states are translated.
        hf_assets_path: the folder with the published files, or None.
        fqn_to_index_mapping: which file of a published checkpoint holds which Hugging Face name (counted from 1), from
            the folder's index; None without a folder, or for a checkpoint in one file.
    """

    def __init__(self, model_config: BaseModel.Config, hf_assets_path: str | None = None) -> None:
        self.model_config = model_config
        self.hf_assets_path = hf_assets_path
        self.fqn_to_index_mapping = None if hf_assets_path is None else _read_index(Path(hf_assets_path))

    @abstractmethod
    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict with Hugging Face's names and shapes; the inverse of `from_hf`, bit for bit."""

    @abstractmethod
    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict with this model's names and shapes."""

    def hf_config(self) -> dict[str, Any]:
        """What `config.json` beside exported weights says, so that transformers builds this model.

        By default that of `hf_assets_path`; an adapter that can write one from `model_config` overrides this.

        Raises:
            NotImplementedError: neither is there.
        """
        if self.hf_assets_path is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no hf_config() and no hf_assets_path with a config.json to take it from"
            )
        config: dict[str, Any] = json.loads((Path(self.hf_assets_path) / "config.json").read_text(encoding="utf-8"))
        return config


def _read_index(folder: Path) -> dict[str, int] | None:
    if not folder.is_dir():
        raise FileNotFoundError(f"hf_assets_path: there is no folder {folder}")
    index = folder / _INDEX_FILE
    if not index.exists():
        return None
    weight_map = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index}: has no weight_map, so it is no index of a checkpoint")
    return {name: _file_number(file, index) for name, file in weight_map.items()}


def _file_number(file: str, index: Path) -> int:
    # The published form is model-00001-of-00003.safetensors; a checkpoint in one file has no number.
    match = re.search(r"-(\d+)-of-\d+\.", file)
    if match is None and "-of-" in file:
        raise ValueError(f"{index}: {file!r} has no number")
    return int(match.group(1)) if match else 1
