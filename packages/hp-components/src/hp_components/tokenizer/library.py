"""A tokenizer on the library `tokenizers`: the common part of those read from a folder and those trained here.

In: a `TokenizerFolder` (the library's tokenizer and what the files beside it say). Out: ids and text.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from hp_components.tokenizer.base import BaseTokenizer
from hp_components.tokenizer.chat_template import ChatTemplate
from hp_components.tokenizer.folder import TokenizerFolder, write_folder

__all__ = ["LibraryTokenizer"]

# GPT-2's rules never put a letter and the white space behind it into one word, so a text may be cut between them
# without changing a token.
_CUT = re.compile(r"(?<=[^\W\d_])(?=[ \n])")
# Nor do the rules that GPT-4, Llama 3 and the Qwens have, each an alternation of these.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_RULES = {
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"\p{N}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
}


class LibraryTokenizer(BaseTokenizer):
    """BaseTokenizer around a `tokenizers.Tokenizer`. Subclasses say where the folder comes from."""

    def __init__(self, folder: TokenizerFolder) -> None:
        self._folder = folder
        self.tokenizer = folder.tokenizer
        self.bos_token, self.eos_token = folder.bos_token, folder.eos_token
        self.bos_id, self.eos_id = folder.bos_id, folder.eos_id

    @functools.cached_property
    def vocab_size(self) -> int:
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The template of the folder. Raises ValueError when it is used and cannot be compiled."""
        source = self._folder.chat_template
        return None if source is None else ChatTemplate(source, self._folder.special_tokens)

    @functools.cached_property
    def fingerprint(self) -> str:
        facts = [self.bos_id, self.eos_id, self.tokenizer.encode_special_tokens]
        return hashlib.sha256((json.dumps(facts) + self.tokenizer.to_str()).encode()).hexdigest()

    @functools.cached_property
    def _template_ids(self) -> tuple[list[int], list[int]]:
        """What comes before and after a text if nobody asks for anything."""
        probe = self.tokenizer.encode("a", add_special_tokens=True)
        marks = [bool(mark) for mark in probe.special_tokens_mask]
        front = next((i for i, special in enumerate(marks) if not special), len(marks))
        back = next((i for i, special in enumerate(reversed(marks)) if not special), 0) if front < len(marks) else 0
        return probe.ids[:front], probe.ids[len(marks) - back :]

    def encode(self, text: str, *, add_bos: bool | None = None, add_eos: bool | None = None) -> list[int]:
        return self.encode_batch([text], add_bos=add_bos, add_eos=add_eos)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_bos: bool | None = None, add_eos: bool | None = None
    ) -> list[list[int]]:
        front, back = self._frame(add_bos, add_eos)
        try:
            encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            raise _reason(texts, error) from error
        return [_framed(encoding.ids, front, back) for encoding in encodings]

    def encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[list[int], list[bool]]]:
        try:
            encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except TypeError as error:
            raise _reason(texts, error) from error
        found = []
        for encoding, inside in zip(encodings, spans, strict=True):
            offsets_T2 = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            marks_T = np.zeros(len(offsets_T2), bool)
            for start, end in inside:
                marks_T |= (offsets_T2[:, 1] > start) & (offsets_T2[:, 0] < end)
            found.append((encoding.ids, marks_T.tolist()))
        return found

    def _frame(self, add_bos: bool | None, add_eos: bool | None) -> tuple[list[int], list[int]]:
        """The ids to put before and after a text."""
        front, back = self._template_ids
        if add_bos is not None:
            front = self._with(front, self.bos_id, add_bos, "BOS", first=True)
        if add_eos is not None:
            back = self._with(back, self.eos_id, add_eos, "EOS", first=False)
        return front, back

    def _with(self, ids: list[int], token: int | None, wanted: bool, name: str, *, first: bool) -> list[int]:
        if wanted and token is None:
            raise ValueError(f"add_{name.lower()}=True, but this tokenizer has no {name} token")
        if wanted == (token in ids):
            return ids
        if not wanted:
            return [other for other in ids if other != token]
        return [token, *ids] if first else [*ids, token]  # type: ignore[list-item]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        ids = [int(token) for token in ids]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"ids must lie in [0, {self.vocab_size}), got {min(ids)} … {max(ids)}")
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def pieces(self, text: str, length: int) -> list[str]:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        if not self._cuts_at_spaces:
            return [text]
        pieces, start = list[str](), 0
        while len(text) - start > length:
            cut = _CUT.search(text, start + length)
            if cut is None:
                break
            pieces.append(text[start : cut.start()])
            start = cut.start()
        return [*pieces, text[start:]]

    @functools.cached_property
    def _cuts_at_spaces(self) -> bool:
        """Whether a text may be cut between a letter and a space or line feed: only where the rules are known ones."""
        about = json.loads(self.tokenizer.to_str())
        literal = self.tokenizer.encode_special_tokens or not any(
            _CUT.search(token["content"]) or token["lstrip"] or token["rstrip"] for token in about["added_tokens"]
        )
        # NFC joins a letter with marks behind it, and neither a space nor a line feed is one.
        unchanged = about["normalizer"] in (None, {"type": "NFC"})
        return literal and unchanged and _has_known_rules(about["pre_tokenizer"] or {})

    def save(self, folder: str | os.PathLike[str]) -> None:
        write_folder(self._folder, folder)


def _has_known_rules(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether text is cut into words by GPT-2's rules or by an alternation of the known ones, and then into bytes."""
    split, *others = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if split.get("type") == "ByteLevel" and not others:
        return bool(split.get("use_regex", True)) and not split["add_prefix_space"]
    if split.get("type") != "Split" or split["behavior"] != "Isolated" or split["invert"] or len(others) != 1:
        return False
    rules = split["pattern"].get("Regex", "").replace(_CONTRACTIONS + "|", "").split("|")
    plain_bytes = others[0].get("type") == "ByteLevel" and not (others[0]["use_regex"] or others[0]["add_prefix_space"])
    return plain_bytes and set(rules) <= _RULES


def _reason(texts: Sequence[str], error: TypeError) -> Exception:
    """The library says "not a text" of text that UTF-8 cannot hold, too."""
    for text in texts:
        if isinstance(text, str):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as surrogate:
                place = f"at character {surrogate.start} of {text[:40]!r}"
                return ValueError(f"half a surrogate pair {place}, which is no Unicode text")
    return error


def _framed(ids: list[int], front: list[int], back: list[int]) -> list[int]:
    """`front`, `ids`, `back`, without doubling what the text itself spells out at its ends."""
    if front and ids[: len(front)] == front:
        front = []
    if back and ids[-len(back) :] == back:
        back = []
    return [*front, *ids, *back]
