"""A cache folder per test, and a tokenizer whose ids can be written down by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hp_components.tokenizer import BaseTokenizer


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hp-cache"
    monkeypatch.setenv("HP_CACHE_DIR", str(folder))
    return folder


class Letters(BaseTokenizer):
    """a is 2, b is 3, …; BOS is 0, EOS is 1; anything else has no id."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        size: int = 28
        with_bos: bool = True
        with_eos: bool = True

    def __init__(self, config: Config) -> None:
        self.config = config
        self.bos_id = 0 if config.with_bos else None
        self.eos_id = 1 if config.with_eos else None

    @property
    def vocab_size(self) -> int:
        return self.config.size

    @property
    def fingerprint(self) -> str:
        return f"letters {self.config}"

    def encode(self, text: str, *, add_bos: bool | None = None, add_eos: bool | None = None) -> list[int]:
        ids = [ord(letter) - ord("a") + 2 for letter in text if "a" <= letter <= "z"]
        return [0] * bool(add_bos) + ids + [1] * bool(add_eos)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token - 2 + ord("a")) for token in ids if token > 1)

    def save(self, folder: str | os.PathLike[str]) -> None:
        raise NotImplementedError


@pytest.fixture
def letters() -> BaseTokenizer:
    return Letters.Config().build()


@pytest.fixture
def letters_config() -> type[Letters.Config]:
    return Letters.Config
