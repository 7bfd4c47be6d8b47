"""Conversations: what a record says, who says it, and what of it is to be learned.

In: records with messages, or with a prompt and a response. Out: `Conversation`s; what is none is a bad place with file
and line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hp_components.data.formats import BadLinePolicy, FaultList, Part
from hp_components.data.records import Record, json_type, lone_surrogate, no_key
from hp_protocols.errors import Fault

__all__ = ["Conversation", "ConversationCorpus", "ConversationFields", "RecordCorpus"]

# How ShareGPT's files call the roles.
_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with `role` and `content`, and the tools that were at hand. `where` is the place of its record."""

    where: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class ConversationFields:
    """Where a record keeps its conversation."""

    form: Literal["messages", "prompt_response"] = "messages"
    messages_key: str = "messages"
    prompt_key: str = "prompt"
    response_key: str = "response"
    system_key: str | None = None
    tools_key: str = "tools"

    def read(self, record: Record, faults: FaultList) -> Conversation | None:
        """The conversation of a record, or None where it has none (which is then among the faults)."""
        if self.form == "prompt_response":
            return self._pair(record, faults)
        if self.messages_key not in record.value:
            faults.add(no_key(record, self.messages_key, "messages_key"))
            return None
        given = record.value[self.messages_key]
        if not isinstance(given, list) or not given:
            problem = f"{self.messages_key!r} is " + ("empty" if given == [] else f"a {json_type(given)}")
            faults.add(Fault(record.where, problem, allowed='a list of objects like {"role": "user", "content": "…"}'))
            return None
        messages = list[Mapping[str, Any]]()
        for number, message in enumerate(given, start=1):
            if (wrong := _message_problem(message)) is not None:
                faults.add(Fault(record.where, f"message {number} {wrong}"))
                return None
            messages.append(_plain(message))
        if not any(message["role"] == "assistant" for message in messages):
            faults.add(Fault(record.where, "has no message of an assistant, so there is nothing to learn"))
            return None
        return Conversation(record.where, messages, record.value.get(self.tools_key))

    def _pair(self, record: Record, faults: FaultList) -> Conversation | None:
        options = {"prompt_key": self.prompt_key, "response_key": self.response_key}
        if self.system_key is not None:
            options["system_key"] = self.system_key
        for option, key in options.items():
            if key not in record.value:
                faults.add(no_key(record, key, option))
                return None
            text = record.value[key]
            if not isinstance(text, str):
                faults.add(Fault(record.where, f"{key!r} is a {json_type(text)}", allowed="a string"))
                return None
            if (bad := lone_surrogate(text)) is not None:
                faults.add(Fault(record.where, f"{key!r} has half a surrogate pair at character {bad}"))
                return None
        roles = {"user": self.prompt_key, "assistant": self.response_key}
        if self.system_key is not None:
            roles = {"system": self.system_key, **roles}
        return Conversation(record.where, [{"role": role, "content": record.value[key]} for role, key in roles.items()])


def _plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if "role" in message:
        return message
    return {"role": _ROLES.get(message["from"], message["from"]), "content": message["value"]}


def _message_problem(message: object) -> str | None:
    """What is wrong with a message; None if nothing is."""
    if not isinstance(message, Mapping):
        return f"is a {json_type(message)}, not an object"
    role, content = ("role", "content") if "role" in message else ("from", "value")
    if role not in message:
        return f"has no 'role' (its fields: {', '.join(map(repr, message)) or 'none'})"
    if not isinstance(message[role], str):
        return f"has a {json_type(message[role])} as its {role!r}"
    text = message.get(content)
    # Without words there may be tool calls, and lists are for templates that take pictures.
    if text is None and len(message) == 2:
        return f"has no {content!r}"
    if isinstance(text, str) and (bad := lone_surrogate(text)) is not None:
        return f"has half a surrogate pair at character {bad}"
    return None if text is None or isinstance(text, str | list) else f"has a {json_type(text)} as its {content!r}"


class RecordCorpus(Protocol):
    """A corpus that is made of records."""

    on_bad_line: BadLinePolicy

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def records(self, faults: FaultList) -> Iterator[Record]: ...


class ConversationCorpus:
    """The conversations in a corpus of records. As text (to train a tokenizer on) they are their words, no more."""

    def __init__(self, corpus: RecordCorpus, fields: ConversationFields) -> None:
        self.corpus, self.fields = corpus, fields
        self.name, self.on_bad_line = corpus.name, corpus.on_bad_line

    @property
    def size(self) -> int:
        return self.corpus.size

    @property
    def fingerprint(self) -> str:
        return f"{self.corpus.fingerprint} {self.fields}"

    def conversations(self, faults: FaultList) -> Iterator[Conversation]:
        """Every conversation once."""
        for record in self.corpus.records(faults):
            if (conversation := self.fields.read(record, faults)) is not None:
                yield conversation

    def parts(self, faults: FaultList) -> Iterator[Part]:
        for conversation in self.conversations(faults):
            contents = [message.get("content") for message in conversation.messages]
            yield Part("\n".join(text for text in contents if isinstance(text, str)))

    def documents(self) -> Iterator[str]:
        faults = FaultList(self.name, self.on_bad_line)
        for part in self.parts(faults):
            yield part.text
        faults.raise_if_any()
