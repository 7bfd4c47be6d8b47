"""A corpus as one long array of token ids, worked out once per machine and then memory-mapped.

In: a corpus and a tokenizer. Out: a `TokenStream`: every document as BOS + text + EOS, one after the other, and where
each begins. Kept as one file in the cache folder; a damaged file is noticed and made again.

File: magic, 16 bytes | tokens | document starts, int64 | description, JSON | its SHA-256 | its length, 8 bytes | magic.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from hp_components.data.cache import cache_key, cache_root, exclusive, open_atomic
from hp_components.data.sources import Corpus
from hp_components.tokenizer.base import BaseTokenizer
from hp_protocols.errors import ConfigError, Fault

__all__ = ["TokenStream", "tokenise"]

log = logging.getLogger(__name__)

MAGIC = b"hp-tokens-0001\r\n"
TAIL_BYTES = 32 + 8 + len(MAGIC)
# Checksums are per block, so that a file of hundreds of gigabytes is checked in seconds: all blocks of a file up to
# 1 GiB, this many of a larger one, spread over it.
BLOCK_BYTES = 16 * 2**20
CHECKED_BLOCKS = 64
# Text handed to the library at once. It keeps some hundred bytes per token while at it.
BATCH_CHARACTERS = 4 * 2**20
PIECE_CHARACTERS = 2**20
PROGRESS_SECONDS = 10.0


class DamagedFileError(Exception):
    """A kept file is not what was written."""


class TokenStream:
    """Token ids of a whole corpus, memory-mapped.

    Attributes:
        tokens: [number of tokens], uint16 or uint32.
        starts: [number of documents], int64, ascending: where each document begins in `tokens`.
        digest: of all content; equal digests mean equal streams.
    """

    def __init__(self, path: Path) -> None:
        """Open and check a file that `tokenise` wrote. Raises DamagedFileError, FileNotFoundError."""
        self.path = path
        with open(path, "rb") as file:
            self._description, self.digest = _read_description(file)
            self._map()
            _check_blocks(file, self._description)

    def _map(self) -> None:
        about = self._description
        self.tokens = np.memmap(self.path, about["dtype"], "r", len(MAGIC), (about["tokens"],))
        starts_offset = len(MAGIC) + about["token_bytes"]
        self.starts = np.memmap(self.path, "<i8", "r", starts_offset, (about["documents"],))

    def __getstate__(self) -> dict[str, Any]:
        # A memory map would be pickled as all its data; a worker process maps the same file instead.
        return {"path": self.path, "digest": self.digest, "_description": self._description}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()


def tokenise(
    corpus: Corpus, tokenizer: BaseTokenizer, *, cache_dir: str | os.PathLike[str] | None = None
) -> TokenStream:
    """The token stream of a corpus, from the cache or worked out now.

    Any number of processes may ask for the same stream at once: one works, the others wait for its file.

    Raises:
        ConfigError: bad places in the corpus, no text in it, or a cache folder that cannot be written.
    """
    key = cache_key("tokens 1", corpus.fingerprint, tokenizer.fingerprint)
    path = cache_root(cache_dir) / "tokens" / f"{key}.tokens"
    if (kept := _open_kept(path)) is not None:
        return kept
    with exclusive(path):
        if (kept := _open_kept(path)) is not None:
            return kept
        _write(path, corpus, tokenizer)
        return TokenStream(path)


def _open_kept(path: Path) -> TokenStream | None:
    try:
        return TokenStream(path)
    except FileNotFoundError:
        return None
    except DamagedFileError as error:
        log.warning("the kept tokens %s are damaged (%s); tokenising the corpus again", path, error)
        return None
    except OSError as error:
        raise ConfigError(
            Fault(str(path), f"cannot be read: {error.strerror}", hint="set HP_CACHE_DIR to another folder")
        ) from error


def _write(path: Path, corpus: Corpus, tokenizer: BaseTokenizer) -> None:
    """Tokenise into a new file at `path`."""
    started = time.monotonic()
    log.info("tokenising %s (%.1f MB), once; kept as %s", corpus.name, corpus.size / 1e6, path)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    starts = array("q")
    with open_atomic(path) as file:
        file.write(MAGIC)
        count = empty = 0
        for document in _encoded(corpus, tokenizer):
            if document is None:
                empty += 1
                continue
            first, ids = document
            if first:
                starts.append(count)
            file.write(np.asarray(ids, dtype).tobytes())
            count += len(ids)
        if not count:
            raise ConfigError(
                Fault(corpus.name, "has no text" + (f": its {empty} documents are empty" if empty else ""))
            )
        _finish(file, dtype, count, np.asarray(starts, "<i8"))
    if empty:
        log.info("%s: %d empty documents left out", corpus.name, empty)
    log.info("%d documents, %d tokens in %.1f s", len(starts), count, time.monotonic() - started)


def _encoded(corpus: Corpus, tokenizer: BaseTokenizer) -> Iterator[tuple[bool, list[int]] | None]:
    """(is the first piece of a document, ids) for the whole corpus; None for an empty document."""
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    if not eos:
        log.warning("this tokenizer has no EOS token: documents follow each other without one")
    for batch in _batches(corpus, tokenizer):
        texts = [text for _, _, text in batch]
        for (first, last, _), ids in zip(
            batch, tokenizer.encode_batch(texts, add_bos=False, add_eos=False), strict=True
        ):
            # No text, or a tokenizer that makes nothing of it (white space, for some).
            if first and last and not ids:
                yield None
                continue
            if first and ids[:1] != bos:
                ids = bos + ids
            if last and ids[-1:] != eos:
                ids = ids + eos
            yield first, ids


def _batches(corpus: Corpus, tokenizer: BaseTokenizer) -> Iterator[list[tuple[bool, bool, str]]]:
    """Pieces of documents, (first of its document, last of its document, text), some megabytes at a time."""
    batch, size, done, told = list[tuple[bool, bool, str]](), 0, 0, time.monotonic()
    for document in corpus.documents():
        pieces = tokenizer.pieces(document, PIECE_CHARACTERS)
        for index, piece in enumerate(pieces):
            batch.append((index == 0, index == len(pieces) - 1, piece))
            size += len(piece) + 1
            if size < BATCH_CHARACTERS:
                continue
            yield batch
            done, batch, size = done + size, [], 0
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                log.info("tokenising: %.0f of about %.0f MB", done / 1e6, corpus.size / 1e6)
    if batch:
        yield batch


def _finish(file: IO[bytes], dtype: np.dtype[Any], count: int, starts: np.ndarray) -> None:
    """Write document starts and the description behind the tokens."""
    padding = -(count * dtype.itemsize) % 8
    file.write(b"\0" * padding + starts.tobytes())
    description = {
        "dtype": dtype.str,
        "tokens": count,
        "token_bytes": count * dtype.itemsize + padding,
        "documents": len(starts),
    }
    blocks = [_block_digest(file, index) for index in range(_block_count(description))]
    file.seek(0, os.SEEK_END)
    text = json.dumps(description | {"blocks": blocks}).encode()
    file.write(text + hashlib.sha256(text).digest() + len(text).to_bytes(8, "little") + MAGIC)


def _read_description(file: IO[bytes]) -> tuple[dict[str, Any], str]:
    """What the file says about itself, and the digest of that (and so of all content)."""
    size = file.seek(0, os.SEEK_END)
    if size < len(MAGIC) + TAIL_BYTES:
        raise DamagedFileError("too short")
    file.seek(size - TAIL_BYTES)
    digest, length, magic = file.read(32), int.from_bytes(file.read(8), "little"), file.read(len(MAGIC))
    if magic != MAGIC:
        raise DamagedFileError("its end is missing")
    if length > size - len(MAGIC) - TAIL_BYTES:
        raise DamagedFileError("its description is missing")
    file.seek(size - TAIL_BYTES - length)
    text = file.read(length)
    if hashlib.sha256(text).digest() != digest:
        raise DamagedFileError("its description has changed")
    about = json.loads(text)
    if size != _data_end(about) + length + TAIL_BYTES:
        raise DamagedFileError("its size has changed")
    return about, digest.hex()


def _data_end(about: dict[str, Any]) -> int:
    return len(MAGIC) + about["token_bytes"] + 8 * about["documents"]


def _block_count(about: dict[str, Any]) -> int:
    return -(-_data_end(about) // BLOCK_BYTES)


def _block_digest(file: IO[bytes], index: int, end: int | None = None) -> str:
    file.seek(index * BLOCK_BYTES)
    length = BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - index * BLOCK_BYTES)
    return hashlib.sha256(file.read(length)).hexdigest()


def _check_blocks(file: IO[bytes], about: dict[str, Any]) -> None:
    count = len(about["blocks"])
    for index in sorted({round(i) for i in np.linspace(0, count - 1, min(count, CHECKED_BLOCKS))}):
        if _block_digest(file, index, _data_end(about)) != about["blocks"][index]:
            raise DamagedFileError(f"block {index} has changed")
