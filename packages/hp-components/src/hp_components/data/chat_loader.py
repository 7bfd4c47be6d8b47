"""Batches of conversations, to learn answers from (supervised fine-tuning).

In: `ChatDataLoader.Config` (where the conversations are, how they are written), a tokenizer, and this rank's place.
Out: batches as those of text, with labels on the assistant's tokens only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from hp_components.data.chat_rows import ConversationRows, LongConversations
from hp_components.data.chat_tokens import ChatStyle, tokenise_conversations
from hp_components.data.conversations import ConversationCorpus, ConversationFields
from hp_components.data.corpus_loader import CorpusDataLoader
from hp_components.data.sources import open_corpus
from hp_components.data.token_stream import TokenStream
from hp_components.tokenizer.base import BaseTokenizer
from hp_protocols.errors import Fault

__all__ = ["ChatDataLoader"]


class ChatDataLoader(CorpusDataLoader):
    """Rows of whole conversations; see `ConversationRows`.

    Prompts and padding have the label −100. The state and the order are those of every other loader.
    """

    documents_are = "conversation"

    @dataclass(kw_only=True, slots=True)
    class Config(CorpusDataLoader.Config):
        dataset_path: str | list[str] | None = None
        """A .jsonl, .json or .parquet file (or .gz of one), a folder or a glob of them, or several of these."""

        form: Literal["messages", "prompt_response"] = "messages"
        """What a record holds: a list of messages with role and content (or from and value), or two strings."""

        messages_key: str = "messages"
        """The field with the messages."""

        prompt_key: str = "prompt"
        """The field with the prompt, for form=prompt_response."""

        response_key: str = "response"
        """The field with the answer, for form=prompt_response."""

        system_key: str | None = None
        """The field with a system prompt, for form=prompt_response; unset: there is none."""

        tools_key: str = "tools"
        """The field with the tools that the chat template is told of, where a record has it; for form=messages."""

        template: Literal["tokenizer", "human_assistant", "empty"] = "tokenizer"
        """How a conversation is written: by the chat template of the tokenizer's folder; with `Human:` and
        `Assistant:` before the turns; with nothing."""

        train_on: Literal["all_assistant", "last_assistant"] = "all_assistant"
        """Which answers have labels: all of a conversation, or its last."""

        packing: bool = True
        """Several conversations share a row where they fit; otherwise each has one, filled up with padding."""

        on_too_long: LongConversations = "error"
        """What becomes of a conversation longer than training.seq_len: the run does not begin ("error"), its end is
        cut off ("truncate"), or it is left out ("skip"). The last two say how many."""

        document_mask: bool = True
        """Conversations that share a row do not see each other."""

        def open_corpus(self) -> ConversationCorpus:
            fields = ConversationFields(
                self.form, self.messages_key, self.prompt_key, self.response_key, self.system_key, self.tools_key
            )
            given = "" if self.dataset_path is None else self.dataset_path
            return ConversationCorpus(open_corpus(given, on_bad_line=self.on_bad_line), fields)

        def tokenise(
            self, corpus: Any, tokenizer: BaseTokenizer, *, cache_dir: str | os.PathLike[str] | None = None
        ) -> TokenStream:
            style = ChatStyle(self.template, self.train_on)
            return tokenise_conversations(corpus, tokenizer, style, cache_dir=cache_dir)

        def faults(self, path: str) -> list[Fault]:
            """What is wrong with these values, for the whole config's list of faults."""
            faults = CorpusDataLoader.Config.faults(self, path)
            if self.dataset_path is None:
                allowed = "a .jsonl, .json or .parquet file, a folder or a glob of them"
                faults.append(Fault(f"{path}.dataset_path", "is not set", allowed=allowed))
            keys = {"messages": ("messages_key", "tools_key"), "prompt_response": ("prompt_key", "response_key")}
            for name in (*keys[self.form], "system_key"):
                if getattr(self, name) == "":
                    faults.append(Fault(f"{path}.{name}", "is empty", allowed="the name of a field"))
            if self.system_key is not None and self.form == "messages":
                problem = "is set, but the system prompt is one of the messages"
                faults.append(Fault(f"{path}.system_key", problem, hint=f"--{path}.form prompt_response"))
            return faults

    config: Config

    def make_rows(self, seq_len: int, pad_id: int) -> ConversationRows:
        return ConversationRows(self.stream, seq_len, pad_id, self.config.packing, self.config.on_too_long)

    def row_identity(self) -> dict[str, Any]:
        return {"packing": self.config.packing, "on_too_long": self.config.on_too_long}
