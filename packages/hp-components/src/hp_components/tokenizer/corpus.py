"""A tokenizer trained on the corpus itself, so that a run needs no download.

In: a corpus and a vocabulary size. Out: a byte-level BPE tokenizer that gives back every text unchanged, trained on
first use and kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hp_components.data.cache import cache_key, cache_root, exclusive, open_atomic
from hp_components.data.formats import FaultList
from hp_components.data.sources import Corpus, as_corpus
from hp_components.tokenizer.base import BaseTokenizer
from hp_components.tokenizer.folder import TokenizerFolder, read_folder
from hp_components.tokenizer.library import LibraryTokenizer
from hp_protocols.errors import ConfigError, Fault

__all__ = ["CorpusTokenizer"]

log = logging.getLogger(__name__)

BOS, EOS = "<|bos|>", "<|eos|>"
SMALLEST_VOCAB = 256 + len((BOS, EOS))
# Merges hardly change beyond some megabytes of text; 16 MiB train in about two seconds on two cores.
SAMPLE_BYTES = 16 * 2**20
# The sample is taken in pieces, so that it is spread over a corpus of one large file too.
PIECE_CHARACTERS = 2**15


class CorpusTokenizer(LibraryTokenizer):
    """Byte-level BPE trained on a corpus. Lossless for every Unicode text.

    The text `<|eos|>` in a document is text, not the token: only `add_bos` and `add_eos` make those.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        trains_on_corpus: ClassVar[bool] = True

        vocab_size: int = 2048
        """Tokens to train, the 256 bytes and two special tokens included. A small corpus may give fewer."""

        tokenizer_path: str | None = None
        """Read this folder (a run's, for example) instead of training; it then decides about the vocabulary too."""

        def faults(self, path: str) -> list[Fault]:
            """What is wrong with these values, for the whole config's list of faults."""
            return _vocab_size_faults(self.vocab_size, f"{path}.vocab_size")

    def __init__(
        self,
        config: Config,
        *,
        corpus: Corpus | Callable[[], Iterable[str]] | Sequence[str | os.PathLike[str]] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Build from `config`.

        Args:
            corpus: what to train on: a Corpus, a function that returns documents, or a list of files. Not needed
                with `tokenizer_path`.
            cache_dir: see `hp_components.data.cache.cache_root`.
        """
        if config.tokenizer_path is not None:
            super().__init__(read_folder(config.tokenizer_path))
            if self.vocab_size != config.vocab_size:
                log.info("%s has %d tokens; vocab_size is for training only", config.tokenizer_path, self.vocab_size)
            return
        if faults := _vocab_size_faults(config.vocab_size, "tokenizer.vocab_size"):
            raise ConfigError(faults)
        if corpus is None:
            raise ValueError("CorpusTokenizer.Config.build needs corpus=… to train on, or tokenizer_path in the config")
        super().__init__(_folder(_trained(as_corpus(corpus), config.vocab_size, cache_dir)))


def _vocab_size_faults(vocab_size: int, where: str) -> list[Fault]:
    if vocab_size >= SMALLEST_VOCAB:
        return []
    allowed = f"at least {SMALLEST_VOCAB} (256 bytes, {BOS} and {EOS})"
    return [Fault(where, f"{vocab_size} is too small", allowed=allowed)]


def _folder(tokenizer: Tokenizer) -> TokenizerFolder:
    tokenizer.encode_special_tokens = True
    # split_special_tokens is transformers' name for the same; transformers' own defaults would also tidy up spaces.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    return TokenizerFolder(tokenizer=tokenizer, bos_token=BOS, eos_token=EOS, config=config)


def _trained(corpus: Corpus, vocab_size: int, cache_dir: str | os.PathLike[str] | None) -> Tokenizer:
    """The tokenizer of this corpus from the cache, trained and put there if it is not."""
    key = cache_key("tokenizer 1", corpus.fingerprint, vocab_size, version("tokenizers"))
    path = cache_root(cache_dir) / "tokenizers" / f"{key}.tokenizer"
    if (cached := _read_cached(path)) is not None:
        return cached
    with exclusive(path):
        if (cached := _read_cached(path)) is not None:
            return cached
        started = time.monotonic()
        tokenizer = _train(corpus, vocab_size)
        content = tokenizer.to_str().encode()
        with open_atomic(path) as file:
            file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        size = tokenizer.get_vocab_size()
        log.info(
            "tokenizer with %d tokens trained on %s in %.1f s, kept as %s",
            size,
            corpus.name,
            time.monotonic() - started,
            path,
        )
    if size < vocab_size:
        log.warning("%s is too small for %d tokens: its tokenizer has %d", corpus.name, vocab_size, size)
    return tokenizer


def _read_cached(path: Path) -> Tokenizer | None:
    """A kept tokenizer. A damaged file counts as none, and is said to be."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            Fault(str(path), f"cannot be read: {error.strerror}", hint="set HP_CACHE_DIR to another folder")
        ) from error
    if hashlib.sha256(content).hexdigest().encode() != digest:
        log.warning("the kept tokenizer %s is damaged; training it again", path)
        return None
    return Tokenizer.from_str(content.decode())


def _train(corpus: Corpus, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = list(_sample(corpus))
    if not sample:
        raise ConfigError(Fault(corpus.name, "has no text: every document is empty"))
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def _sample(corpus: Corpus) -> Iterator[str]:
    """All of a small corpus; of a large one, pieces spread evenly over it. The same pieces every time."""
    share = min(1.0, SAMPLE_BYTES / max(corpus.size, 1))
    due = 0.0
    faults = FaultList(corpus.name, corpus.on_bad_line)
    for part in corpus.parts(faults):
        for start in range(0, len(part.text), PIECE_CHARACTERS):
            piece = part.text[start : start + PIECE_CHARACTERS]
            # Take a piece whenever the pieces passed are worth one, so `share` of the characters is taken.
            due += share * len(piece)
            if due >= len(piece):
                due -= len(piece)
                yield piece
    faults.raise_if_any()
