"""A folder in Hugging Face format, written file by file.

In: tensors, one after the other. Out: safetensors files of a few GB each with their index, or one file, as
`transformers` loads them. At most one file's tensors are in memory.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from hp_components.checkpoint.folder import sync_file
from hp_components.checkpoint.hf_folder import INDEX, ONE_FILE

__all__ = ["HuggingFaceWriter"]

# What transformers and the hub take for one file.
FILE_BYTES = 5_000_000_000


class HuggingFaceWriter:
    """Writes into an existing, empty folder."""

    def __init__(self, path: Path, file_bytes: int = FILE_BYTES) -> None:
        self.path = path
        self.file_bytes = file_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._files: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor, on the cpu."""
        if self._pending and self._pending_bytes + tensor.nbytes > self.file_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += tensor.nbytes
        self._total += tensor.nbytes

    def finish(self, config: dict[str, object]) -> None:
        """The last file, the index if there are several, and config.json."""
        self._flush()
        count = len(self._files)
        if count == 1:
            self._numbered(1).rename(self.path / ONE_FILE)
        else:
            weight_map: dict[str, str] = {}
            for number, names in enumerate(self._files, start=1):
                file = self.path / f"model-{number:05}-of-{count:05}.safetensors"
                self._numbered(number).rename(file)
                weight_map |= dict.fromkeys(names, file.name)
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
            self._write_json(INDEX, index)
        self._write_json("config.json", config)
        # safetensors writes files that only their owner may read; all of the folder is to be like the rest.
        for file in self.path.glob("*.safetensors"):
            file.chmod((self.path / "config.json").stat().st_mode)

    def _numbered(self, number: int) -> Path:
        return self.path / f"model-{number:05}-of-00000.safetensors"  # how many there will be shows at the end

    def _flush(self) -> None:
        from safetensors.torch import save_file

        self._files.append(list(self._pending))
        file = self._numbered(len(self._files))
        # Tensors that share memory are refused by safetensors: a tied weight under two names is two tensors there.
        seen: set[int] = set()
        for name, tensor in self._pending.items():
            if tensor.untyped_storage().data_ptr() in seen:
                self._pending[name] = tensor.clone()
            seen.add(tensor.untyped_storage().data_ptr())
        save_file(self._pending, file, metadata={"format": "pt"})
        sync_file(file)
        self._pending, self._pending_bytes = {}, 0

    def _write_json(self, name: str, content: object) -> None:
        with (self.path / name).open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
