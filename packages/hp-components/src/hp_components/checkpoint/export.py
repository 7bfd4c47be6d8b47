"""The weights of a run as a folder that `transformers` loads.

In: a model's parts in any layout, an adapter, a tokenizer. Out: `step-N-hf` beside the checkpoints, under its name only
when it is whole. The model is gathered piece by piece; rank 0 writes.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hp_components._rank_zero import log
from hp_components.checkpoint import folder as folders
from hp_components.checkpoint.agreement import on_all_ranks, on_rank_zero
from hp_components.checkpoint.contents import ModelParts, listed
from hp_components.checkpoint.errors import CheckpointError
from hp_components.checkpoint.hf_loading import tied_names
from hp_components.checkpoint.hf_names import Translation, relate, without_data
from hp_components.checkpoint.hf_writer import FILE_BYTES, HuggingFaceWriter
from hp_protocols.platform import get_platform
from hp_protocols.state_dict_adapter import BaseStateDictAdapter

__all__ = ["Exporter", "SavesItself"]

logger = logging.getLogger(__name__)


class SavesItself(Protocol):
    """A tokenizer, as far as an export needs to know it."""

    def save(self, folder: str | os.PathLike[str]) -> None: ...


class Exporter:
    """Exports into the folder of checkpoints."""

    def __init__(
        self,
        folder: Path,
        model: ModelParts,
        adapter: BaseStateDictAdapter | None,
        tokenizer: SavesItself | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.folder = folder
        self.model = model
        self.adapter = adapter
        self.tokenizer = tokenizer
        self.group = group

    def export(self, step: int, dtype_name: str, file_bytes: int = FILE_BYTES) -> Path:
        """Write `step-N-hf`; one that is there already and is ours is replaced. Collective.

        Args:
            dtype_name: type of the weights.
            file_bytes: the most that one file holds, unless a single tensor is larger.

        Raises:
            CheckpointError: it could not be written; nothing is left over.
        """
        began, name, group = time.perf_counter(), f"step-{step}-hf", self.group
        live = on_all_ranks("collect the weights", self.model.state_dict, group)
        tied = tied_names(live, group)
        translations = on_all_ranks("translate the names", lambda: self._translations(live, tied), group)
        if len({frozenset(names) for names in get_platform().all_gather_object(list(live), group)}) > 1:
            raise CheckpointError("cannot export weights whose ranks hold different layers (pipeline stages)")
        partial, token = on_rank_zero(f"make a folder in {self.folder}", lambda: self._begin(name), group)
        writer = HuggingFaceWriter(partial, file_bytes) if get_platform().rank() == 0 else None
        try:
            failure = self._write(live, tied, translations, writer, get_platform().dtype_map[dtype_name])
            path = on_rank_zero(
                f"write {partial}", lambda: self._finish(writer, failure, name, token, dtype_name, step), group
            )
        except Exception:
            on_rank_zero(f"remove {partial}", lambda: folders.discard(partial), group)
            raise
        log(logger, logging.INFO, "exported %s (%s) in %.2f s", path, dtype_name, time.perf_counter() - began)
        return path

    def _translations(self, live: Mapping[str, Any], tied: Mapping[str, list[str]]) -> list[Translation]:
        assert self.adapter is not None
        ours = without_data(live)
        names = relate(without_data(self.adapter.to_hf(ours)), ours, self.adapter)
        lost = [name for name in names.absent if not any(other not in names.absent for other in tied.get(name, ()))]
        if lost:
            raise ValueError(f"the adapter has no names for {listed(lost)}")
        return names.translations

    @torch.no_grad()
    def _write(
        self,
        live: Mapping[str, Any],
        tied: Mapping[str, list[str]],
        translations: list[Translation],
        writer: HuggingFaceWriter | None,
        dtype: torch.dtype,
    ) -> Exception | None:
        """Gather and write piece by piece; rank 0's failure, after taking part in all that the others wait for."""
        assert self.adapter is not None
        failure: Exception | None = None
        for one in translations:
            # A tied tensor is gathered once: an adapter sees by its memory that it is one.
            first = {name: tied.get(name, [name])[0] for name in one.ours}
            gathered = {name: _whole(live[name]) for name in dict.fromkeys(first.values())}
            whole = {name: gathered[first[name]] for name in one.ours}
            if writer is None or failure is not None:
                continue
            try:
                for name, tensor in self.adapter.to_hf(whole).items():
                    writer.add(name, tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype))
            except Exception as error:  # raised by whoever called, once every rank is there
                failure = error
        return failure

    def _begin(self, name: str) -> tuple[Path, str]:
        token = secrets.token_hex(4)
        partial = folders.partial_folder(self.folder, name, token)
        partial.mkdir(parents=True)
        return partial, token

    def _finish(
        self, writer: HuggingFaceWriter | None, failure: Exception | None, name: str, token: str, dtype: str, step: int
    ) -> Path:
        assert writer is not None
        assert self.adapter is not None
        if failure is not None:
            raise failure
        writer.finish({**self.adapter.hf_config(), "dtype": dtype})
        if self.tokenizer is not None:
            self.tokenizer.save(writer.path)
        return folders.publish(writer.path, name, token, {"step": step, "exported": True})


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
