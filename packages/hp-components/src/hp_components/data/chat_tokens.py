"""Conversations as a token stream in which the tokens to learn are marked.

In: a `ConversationCorpus`, a tokenizer, how conversations are written. Out: the `TokenStream` with its mask, from the
cache or worked out now.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hp_components.data.ahead import run_ahead
from hp_components.data.batches import in_batches
from hp_components.data.cache import cache_key
from hp_components.data.conversations import Conversation, ConversationCorpus
from hp_components.data.formats import FaultList, Skipped
from hp_components.data.token_stream import StreamWriter, TokenStream, kept_stream, token_dtype
from hp_components.tokenizer.base import BaseTokenizer
from hp_protocols.errors import ConfigError, Fault

__all__ = ["ChatStyle", "tokenise_conversations"]

log = logging.getLogger(__name__)

BATCH_CHARACTERS = 2**20


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How a conversation is written, and which of its answers are learned.

    template: "tokenizer" is the chat template of the tokenizer's folder. The other two need none: "human_assistant"
        puts `Human:` and `Assistant:` before the turns, "empty" nothing; both end an answer with EOS.
    """

    template: Literal["tokenizer", "human_assistant", "empty"] = "tokenizer"
    train_on: Literal["all_assistant", "last_assistant"] = "all_assistant"


@dataclass(frozen=True, slots=True)
class _Written:
    """A conversation as text, and where in it the answers are."""

    conversation: Conversation
    text: str
    spans: tuple[tuple[int, int], ...]


def tokenise_conversations(
    corpus: ConversationCorpus,
    tokenizer: BaseTokenizer,
    style: ChatStyle,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
) -> TokenStream:
    """The token stream of these conversations, from the cache or worked out now.

    Raises:
        ConfigError: bad places, no conversation at all, or a tokenizer without the chat template that is asked for.
    """
    source = ""
    if style.template == "tokenizer":
        try:
            template = tokenizer.chat_template
        except ValueError as error:
            raise ConfigError(Fault("tokenizer.tokenizer_path", str(error))) from error
        if template is None:
            raise ConfigError(_no_template())
        source = template.source
    key = cache_key("chat 1", corpus.fingerprint, tokenizer.fingerprint, style, source)
    return kept_stream(key, lambda writer: _write(writer, corpus, tokenizer, style), cache_dir)


def _no_template() -> Fault:
    return Fault(
        "dataloader.template",
        "is 'tokenizer', but this tokenizer has no chat template",
        allowed="human_assistant or empty, or a tokenizer folder with chat_template.jinja",
        hint="--dataloader.template human_assistant",
    )


def _write(writer: StreamWriter, corpus: ConversationCorpus, tokenizer: BaseTokenizer, style: ChatStyle) -> Skipped:
    started = time.monotonic()
    log.info("tokenising the conversations of %s (%.1f MB), once", corpus.name, corpus.size / 1e6)
    faults, learned = FaultList(corpus.name, corpus.on_bad_line), 0
    empty = FaultList(corpus.name, corpus.on_bad_line)  # of its own, as the other fills in the reader's thread
    writer.open(token_dtype(tokenizer.vocab_size), masked=True)
    texts = _all_written(corpus, style, tokenizer, faults)
    for batch in run_ahead(in_batches(texts, lambda one: len(one.text), BATCH_CHARACTERS, corpus.size)):
        for written, (ids, mask_T) in zip(batch, _encoded(batch, tokenizer, style), strict=True):
            # The first token of a row is nobody's label.
            if mask_T[1:].any():
                writer.add(ids, mask=mask_T)
                learned += int(mask_T[1:].sum())
            else:
                empty.add(Fault(written.conversation.where, "has no token to learn: its answers are empty"))
    faults.extend(empty)
    faults.raise_if_any()
    if not writer.tokens:
        raise ConfigError(Fault(corpus.name, "has no conversation" + (f"; {faults.skipped}" if faults.total else "")))
    log.info(
        "%d conversations, %d tokens, %.0f%% of them to learn, in %.1f s",
        writer.documents,
        writer.tokens,
        100 * learned / writer.tokens,
        time.monotonic() - started,
    )
    return faults.skipped


def _all_written(
    corpus: ConversationCorpus, style: ChatStyle, tokenizer: BaseTokenizer, faults: FaultList
) -> Iterator[_Written]:
    for conversation in corpus.conversations(faults):
        try:
            written = _written(conversation, style, tokenizer)
        except ValueError as error:
            faults.add(Fault(conversation.where, str(error)))
        else:
            yield written


def _written(conversation: Conversation, style: ChatStyle, tokenizer: BaseTokenizer) -> _Written:
    """Raises ValueError where the template cannot write it."""
    last_only = style.train_on == "last_assistant"
    if style.template == "tokenizer":
        template = tokenizer.chat_template
        assert template is not None  # tokenise_conversations has seen to it
        rendered = template.render_answers(conversation.messages, last_only=last_only, tools=conversation.tools)
        return _Written(conversation, rendered.text, rendered.spans)
    if conversation.tools is not None:
        raise ValueError(f"has tools, which template {style.template!r} cannot write")
    text, spans = "", list[tuple[int, int]]()
    for message in conversation.messages:
        content = message.get("content")
        if not isinstance(content, str) or set(message) - {"role", "content"}:
            raise ValueError(f"has a message with more than words, which template {style.template!r} cannot write")
        before, after = _surroundings(message["role"], style)
        text += before
        if message["role"] == "assistant":
            # The space belongs to the answer: that is how most tokenizers write a word behind another.
            content = f" {content}" if before else content
            spans.append((len(text), len(text) + len(content)))
        text += content + after
    return _Written(conversation, text, tuple(spans))


def _surroundings(role: str, style: ChatStyle) -> tuple[str, str]:
    """What comes before and after the words of a turn."""
    if style.template == "empty":
        return "", ""
    names = {"user": "Human: ", "assistant": "Assistant:", "system": ""}
    if role not in names:
        raise ValueError(f"has the role {role!r}; template 'human_assistant' knows system, user and assistant")
    return names[role], "" if role == "assistant" else "\n\n"


def _encoded(
    batch: list[_Written], tokenizer: BaseTokenizer, style: ChatStyle
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Ids and mask of each conversation of a batch."""
    if style.template == "tokenizer":
        for ids, marks in tokenizer.encode_spans([one.text for one in batch], [one.spans for one in batch]):
            yield ids, np.array(marks, bool)
        return
    # Each stretch by itself, as a prompt and its answer are at inference: then no token can belong to both.
    stretches = [stretch for one in batch for stretch in _stretches(one)]
    encoded = iter(tokenizer.encode_batch([text for text, _ in stretches], add_bos=False, add_eos=False))
    for one in batch:
        chosen = one.spans[-1:] if style.train_on == "last_assistant" else one.spans
        yield _joined(one, chosen, encoded, tokenizer)


def _stretches(written: _Written) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """The text of a conversation between the borders of its answers: (text, its span if it is an answer)."""
    done = 0
    for start, end in written.spans:
        yield written.text[done:start], None
        yield written.text[start:end], (start, end)
        done = end
    yield written.text[done:], None


def _joined(
    written: _Written, chosen: tuple[tuple[int, int], ...], encoded: Iterator[list[int]], tokenizer: BaseTokenizer
) -> tuple[list[int], np.ndarray]:
    ids = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    marks = [False] * len(ids)
    for _, span in _stretches(written):
        found = next(encoded)
        if span is not None and tokenizer.eos_id is not None:
            found = [*found, tokenizer.eos_id]
        ids += found
        marks += [span in chosen] * len(found)
    return ids, np.array(marks, bool)
