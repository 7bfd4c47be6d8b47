"""One long array of token ids, worked out once per machine, kept in the cache folder and then memory-mapped.

In: a key, and a function that writes the tokens. Out: a `TokenStream`: all documents one after the other, where each
begins, and (for conversations) which tokens are to be learned. A damaged file is noticed and made again.

File: magic, 16 bytes | tokens | document starts, int64 | mask, if there is one, uint8 per token, filled up to 8 bytes |
description, JSON | its SHA-256 | its length, 8 bytes | magic.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from hp_components.data.cache import cache_root, exclusive, open_atomic
from hp_components.data.formats import Skipped
from hp_protocols.errors import ConfigError, Fault

__all__ = ["StreamWriter", "TokenStream", "kept_stream", "token_dtype"]

log = logging.getLogger(__name__)

MAGIC = b"hp-tokens-0001\r\n"
TAIL_BYTES = 32 + 8 + len(MAGIC)
# Checksums are per block, so that a file of hundreds of gigabytes is checked in seconds: all blocks of a file up to
# 1 GiB, this many of a larger one, spread over it.
BLOCK_BYTES = 16 * 2**20
CHECKED_BLOCKS = 64


class DamagedFileError(Exception):
    """A kept file is not what was written."""


class TokenStream:
    """Token ids of a whole corpus, memory-mapped.

    Attributes:
        tokens: [number of tokens], uint16 or uint32.
        starts: [number of documents], int64, ascending: where each document begins in `tokens`.
        mask: [number of tokens], uint8: 1 for tokens to learn; None: all are.
        skipped: the bad places that were left out.
        digest: of all content; equal digests mean equal streams.
    """

    def __init__(self, path: Path) -> None:
        """Open and check a file that `kept_stream` wrote. Raises DamagedFileError, FileNotFoundError."""
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
        mask_offset = starts_offset + 8 * about["documents"]
        masked = about.get("mask_bytes", 0) > 0
        self.mask = np.memmap(self.path, "u1", "r", mask_offset, (about["tokens"],)) if masked else None
        skipped = about.get("skipped", {"total": 0, "first": []})
        self.skipped = Skipped(skipped["total"], tuple(skipped["first"]))

    def __getstate__(self) -> dict[str, Any]:
        # A memory map would be pickled as all its data; a worker process maps the same file instead.
        return {"path": self.path, "digest": self.digest, "_description": self._description}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Two bytes per token where they can hold every id, else four."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class StreamWriter:
    """Takes documents, piece by piece, into a new file. Holds eight bytes per document in memory, and no token."""

    def __init__(self, file: IO[bytes], mask_file: IO[bytes]) -> None:
        self._file, self._mask_file = file, mask_file
        self._starts, self._dtype = array("q"), np.dtype("<u2")
        self.tokens, self.masked = 0, False
        file.write(MAGIC)

    @property
    def documents(self) -> int:
        return len(self._starts)

    def open(self, dtype: np.dtype[Any], *, masked: bool = False) -> None:
        """Say how tokens are kept, before the first one."""
        self._dtype, self.masked = dtype, masked

    def add(self, ids: Any, *, first: bool = True, mask: np.ndarray | None = None) -> None:
        """Token ids of the document at hand; `first` begins a new one."""
        if (mask is not None) != self.masked:
            raise ValueError("a stream has a mask for all of its tokens or for none")
        if first:
            self._starts.append(self.tokens)
        self._file.write(np.asarray(ids, self._dtype).tobytes())
        self.tokens += len(ids)
        if mask is not None:
            self._mask_file.write(np.asarray(mask, np.uint8).tobytes())

    def finish(self, skipped: Skipped) -> None:
        """Write document starts, mask and the description behind the tokens."""
        token_bytes = self.tokens * self._dtype.itemsize
        padding = -token_bytes % 8
        self._file.write(b"\0" * padding + np.asarray(self._starts, "<i8").tobytes())
        description: dict[str, Any] = {
            "dtype": self._dtype.str,
            "tokens": self.tokens,
            "token_bytes": token_bytes + padding,
            "documents": len(self._starts),
        }
        if self.masked:
            self._mask_file.seek(0)
            shutil.copyfileobj(self._mask_file, self._file)
            padding = -self.tokens % 8
            self._file.write(b"\0" * padding)
            description["mask_bytes"] = self.tokens + padding
        if skipped.total:
            description["skipped"] = {"total": skipped.total, "first": list(skipped.first)}
        blocks = [_block_digest(self._file, index) for index in range(_block_count(description))]
        self._file.seek(0, os.SEEK_END)
        text = json.dumps(description | {"blocks": blocks}).encode()
        self._file.write(text + hashlib.sha256(text).digest() + len(text).to_bytes(8, "little") + MAGIC)


def kept_stream(
    key: str, write: Callable[[StreamWriter], Skipped], cache_dir: str | os.PathLike[str] | None = None
) -> TokenStream:
    """The stream of this key from the cache, or written now by `write`, which returns what it had to skip.

    Any number of processes may ask for the same stream at once: one works, the others wait for its file.

    Raises:
        ConfigError: what `write` raises, or a cache folder that cannot be written.
    """
    path = cache_root(cache_dir) / "tokens" / f"{key}.tokens"
    if (kept := _open_kept(path)) is not None:
        return kept
    with exclusive(path):
        if (kept := _open_kept(path)) is not None:
            return kept
        with open_atomic(path) as file, tempfile.TemporaryFile(dir=path.parent) as mask_file:
            writer = StreamWriter(file, mask_file)
            writer.finish(write(writer))
        log.info("kept as %s", path)
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


def _read_description(file: IO[bytes]) -> tuple[dict[str, Any], str]:
    """What the file says about itself, and the digest of all content."""
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
    # Where the bad places are that were skipped (paths, lines) makes no difference to what is in the stream.
    content = {key: value for key, value in about.items() if key != "skipped"}
    return about, hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _data_end(about: dict[str, Any]) -> int:
    return len(MAGIC) + about["token_bytes"] + 8 * about["documents"] + about.get("mask_bytes", 0)


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
