"""A folder with weights as Hugging Face publishes them, looked at before a tensor is read.

In: a folder with model.safetensors, or with several files and their index. Out: names, shapes and types, and each
tensor by name; only the parts of it that are used are read from disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hp_protocols.errors import ConfigError, Fault

__all__ = ["INDEX", "ONE_FILE", "HuggingFaceFolder"]

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"


class HuggingFaceFolder:
    """The tensors of a folder.

    Raises:
        ConfigError: there are no weights in safetensors format, or they are incomplete or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files, files = _look_for_files(path)
        self._open: dict[str, Any] = {}
        faults = []
        self.shapes: dict[str, torch.Tensor] = {}
        for file in files:
            try:
                self.shapes |= self._look_into(file)
            except Exception as error:  # safetensors has no common error for a damaged file
                faults.append(Fault(str(path / file), f"cannot be read as safetensors: {error}"))
        if not faults and (lost := sorted(self._files.keys() - self.shapes.keys())):
            faults.append(Fault(str(path), f"the index names tensors that are not in the files: {', '.join(lost[:8])}"))
        if faults:
            raise ConfigError(faults)

    def tensors(self, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Tensors over the mapped file: a slice of one reads only that slice."""
        return {name: self._handle(self._files[name]).get_tensor(name) for name in names}

    def _handle(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._open:
            self._open[file] = safe_open(self.path / file, framework="pt", device="cpu")
        return self._open[file]

    def _look_into(self, file: str) -> dict[str, torch.Tensor]:
        handle = self._handle(file)
        found = {}
        for name in handle.keys():  # noqa: SIM118 (a safetensors file is no mapping)
            if self._files.get(name, file) != file:
                continue  # the index says that it is to be taken from another file
            self._files[name] = file
            part = handle.get_slice(name)
            found[name] = torch.empty(part.get_shape(), dtype=_dtype(part.get_dtype()), device="meta")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)


def _look_for_files(path: Path) -> tuple[dict[str, str], list[str]]:
    """(the file of each name, as far as an index says; the files)."""
    index = path / INDEX
    if index.is_file():
        try:
            weight_map: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(Fault(str(index), f"is no index of weights: {type(error).__name__}: {error}")) from error
        if lost := sorted({file for file in weight_map.values() if not (path / file).is_file()}):
            raise ConfigError(
                Fault(str(path), f"incomplete: the index names files that are not there: {', '.join(lost)}")
            )
        return dict(weight_map), sorted(set(weight_map.values()))
    if (path / ONE_FILE).is_file():
        return {}, [ONE_FILE]
    raise ConfigError(_no_weights(path))


def _no_weights(path: Path) -> Fault:
    if pickled := sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern)):
        hint = "convert it with save_pretrained of a recent transformers, which writes safetensors"
        problem = f"has its weights in {', '.join(pickled[:3])}: a pickled file can run any code when it is read"
        return Fault(str(path), problem, allowed="safetensors", hint=hint)
    if others := sorted(file.name for file in path.glob("*.safetensors")):
        problem = f"has {', '.join(others[:3])}, but neither {ONE_FILE} nor {INDEX}"
        return Fault(str(path), problem, hint="name the whole folder as it was published")
    return Fault(str(path), f"has neither {ONE_FILE} nor {INDEX}", allowed="a folder in Hugging Face format")


_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"tensors of type {name} are not supported")
    return _DTYPES[name]
