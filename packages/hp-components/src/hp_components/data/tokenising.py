"""A corpus of text as a token stream: every document as BOS + text + EOS, one after the other.

In: a corpus and a tokenizer. Out: the `TokenStream`, from the cache or worked out now, in bounded memory.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator

from hp_components.data.ahead import run_ahead
from hp_components.data.batches import in_batches
from hp_components.data.cache import cache_key
from hp_components.data.formats import FaultList, Skipped
from hp_components.data.sources import Corpus
from hp_components.data.token_stream import StreamWriter, TokenStream, kept_stream, token_dtype
from hp_components.tokenizer.base import BaseTokenizer
from hp_protocols.errors import ConfigError, Fault

__all__ = ["tokenise"]

log = logging.getLogger(__name__)

# Text handed to the library at once, which encodes it on all cores. It keeps some hundred bytes per token while at it.
BATCH_CHARACTERS = 2 * 2**20
PIECE_CHARACTERS = 2**15
# A document that cannot be cut is encoded in one go, at some hundred bytes of memory per token.
LARGEST_UNCUT = 256 * 2**20


def tokenise(
    corpus: Corpus, tokenizer: BaseTokenizer, *, cache_dir: str | os.PathLike[str] | None = None
) -> TokenStream:
    """The token stream of a corpus, from the cache or worked out now.

    Any number of processes may ask for the same stream at once: one works, the others wait for its file.

    Raises:
        ConfigError: bad places in the corpus, no text in it, or a cache folder that cannot be written.
    """
    key = cache_key("tokens 1", corpus.fingerprint, tokenizer.fingerprint)
    return kept_stream(key, lambda writer: _write(writer, corpus, tokenizer), cache_dir)


def _write(writer: StreamWriter, corpus: Corpus, tokenizer: BaseTokenizer) -> Skipped:
    """Tokenise the corpus into `writer`."""
    started = time.monotonic()
    log.info("tokenising %s (%.1f MB), once", corpus.name, corpus.size / 1e6)
    faults, empty = FaultList(corpus.name, corpus.on_bad_line), 0
    writer.open(token_dtype(tokenizer.vocab_size))
    for document in _encoded(corpus, tokenizer, faults):
        if document is None:
            empty += 1
        else:
            writer.add(document[1], first=document[0])
    faults.raise_if_any()
    if not writer.tokens:
        problem = "has no text" + (f": its {empty} documents are empty" if empty else "")
        raise ConfigError(Fault(corpus.name, problem + (f"; {faults.skipped}" if faults.total else "")))
    if empty:
        log.info("%s: %d empty documents left out", corpus.name, empty)
    log.info("%d documents, %d tokens in %.1f s", writer.documents, writer.tokens, time.monotonic() - started)
    return faults.skipped


def _encoded(corpus: Corpus, tokenizer: BaseTokenizer, faults: FaultList) -> Iterator[tuple[bool, list[int]] | None]:
    """(is the first piece of a document, ids) for the whole corpus; None for an empty document."""
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    if not eos:
        log.warning("this tokenizer has no EOS token: documents follow each other without one")
    # Files are read in a thread of their own, while the library encodes (and lets other threads run).
    batches = in_batches(_pieces(corpus, tokenizer, faults), lambda piece: len(piece[2]), BATCH_CHARACTERS, corpus.size)
    for batch in run_ahead(batches):
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


def _pieces(corpus: Corpus, tokenizer: BaseTokenizer, faults: FaultList) -> Iterator[tuple[bool, bool, str]]:
    """Documents cut where the tokenizer allows it: (first of its document, last of its document, text).

    What lies behind the last cut waits for the document's next part.
    """
    held, first = "", True
    for part in corpus.parts(faults):
        if part.first:
            held, first = "", True
        pieces = tokenizer.pieces(held + part.text, PIECE_CHARACTERS)
        held = "" if part.last else pieces.pop()
        if len(held) > LARGEST_UNCUT:
            raise ConfigError(_too_long(corpus))
        for index, piece in enumerate(pieces):
            yield first, part.last and index == len(pieces) - 1, piece
            first = False


def _too_long(corpus: Corpus) -> Fault:
    return Fault(
        corpus.name,
        f"has a document of more than {LARGEST_UNCUT / 2**20:.0f} million characters, which this tokenizer "
        "cannot take in pieces",
        hint='make it several documents: a .jsonl file with one {"text": …} for each paragraph',
    )
