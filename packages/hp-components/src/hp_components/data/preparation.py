"""All the work that data needs once, done before the ranks of a run start.

In: the tokenizer's and the dataloader's config. Out: the tokenizer; its training and the tokenised corpus lie in the
cache, where every rank finds them.
"""

from __future__ import annotations

import os

from hp_components.data.base import BaseDataLoader
from hp_components.data.sources import Corpus, standard_library_corpus
from hp_components.tokenizer.base import BaseTokenizer

__all__ = ["build_tokenizer", "prepare"]


def build_tokenizer(
    tokenizer: BaseTokenizer.Config,
    dataloader: BaseDataLoader.Config,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
) -> BaseTokenizer:
    """Build the tokenizer; one that trains does so on the dataloader's text (the standard library's if it has none)."""
    return _build(tokenizer, dataloader.open_corpus(), cache_dir)


def prepare(
    tokenizer: BaseTokenizer.Config,
    dataloader: BaseDataLoader.Config,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
) -> BaseTokenizer:
    """`build_tokenizer`, and tokenise the dataloader's text. A second call finds everything done.

    Raises:
        ConfigError: every fault of paths, files and lines; nothing has been written then outside the cache.
    """
    corpus = dataloader.open_corpus()
    built = _build(tokenizer, corpus, cache_dir)
    if corpus is not None:
        dataloader.tokenise(corpus, built, cache_dir=cache_dir)
    return built


def _build(
    tokenizer: BaseTokenizer.Config, corpus: Corpus | None, cache_dir: str | os.PathLike[str] | None
) -> BaseTokenizer:
    if not tokenizer.trains_on_corpus:
        return tokenizer.build()
    return tokenizer.build(corpus=standard_library_corpus() if corpus is None else corpus, cache_dir=cache_dir)
