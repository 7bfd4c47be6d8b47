"""Data: where text comes from, and batches of packed rows of it.

In: `TextDataLoader.Config` or one of its siblings; `prepare` does the slow part ahead of time. Out: a
`BaseDataLoader`. Names are imported when first used, so that what needs no torch does not import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_components.data.base import BaseDataLoader
    from hp_components.data.chat_loader import ChatDataLoader
    from hp_components.data.dummy import DummyDataLoader
    from hp_components.data.hugging_face import HuggingFaceTextDataLoader
    from hp_components.data.loader import TextDataLoader
    from hp_components.data.preparation import build_tokenizer, prepare
    from hp_components.data.sources import Corpus, open_corpus

__all__ = [
    "BaseDataLoader",
    "ChatDataLoader",
    "Corpus",
    "DummyDataLoader",
    "HuggingFaceTextDataLoader",
    "TextDataLoader",
    "build_tokenizer",
    "open_corpus",
    "prepare",
]

_HOMES = {
    "BaseDataLoader": "base",
    "ChatDataLoader": "chat_loader",
    "Corpus": "sources",
    "DummyDataLoader": "dummy",
    "HuggingFaceTextDataLoader": "hugging_face",
    "TextDataLoader": "loader",
    "build_tokenizer": "preparation",
    "open_corpus": "sources",
    "prepare": "preparation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
