"""Chat templates: a conversation as the text that a model was trained on, and which stretches of it are answers.

In: the Jinja source of a template, and messages. Out: text, as transformers renders it, with the (start, end) of what
an assistant said. Templates come from elsewhere: they run in Jinja's sandbox.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["ChatTemplate", "Message", "Rendered"]

Message = Mapping[str, Any]
# The names under which the thoughts of a message are found; templates read the first.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# Around what stands between {% generation %} and {% endgeneration %}. Drawn anew by every process, so that no message
# can contain them.
_BEGIN, _END = f"\ue000{uuid.uuid4().hex}\ue001", f"\ue001{uuid.uuid4().hex}\ue000"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, and the (start, end) of the answers in it."""

    text: str
    spans: tuple[tuple[int, int], ...]


class _Generation(Extension):
    """{% generation %} … {% endgeneration %}: what the model is to write."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return _BEGIN + caller() + _END


class ChatTemplate:
    """A template, compiled once.

    Args:
        special_tokens: what the template may name: bos_token, eos_token and so on.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ValueError for a source that is no template."""
        self.source, self._special_tokens = source, dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._marks_answers = any(True for _ in _generation_tags(environment, source))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno} of the chat template: {error.message}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation. Raises ValueError with the template's own words where it refuses it."""
        return _without_marks(self._render(messages, add_generation_prompt, tools, variables)).text

    def render_answers(
        self,
        messages: Sequence[Message],
        *,
        last_only: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> Rendered:
        """The text of a conversation and where the assistant's turns are in it.

        A template with {% generation %} says so itself. Otherwise a turn is what the conversation up to it adds to the
        prompt for it, without the white space behind its end-of-sequence token.

        Raises:
            ValueError: the template refuses the messages, or writes a turn otherwise when others follow it.
        """
        rendered = _without_marks(self._render(messages, False, tools, variables))
        if self._marks_answers:
            return Rendered(rendered.text, rendered.spans[-1:] if last_only else rendered.spans)
        turns = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        chosen = turns[-1:] if last_only else turns
        spans = [self._turn(rendered.text, messages, number, tools, variables) for number in chosen]
        return Rendered(rendered.text, tuple(spans))

    def _turn(
        self,
        text: str,
        messages: Sequence[Message],
        number: int,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> tuple[int, int]:
        prompt = self._render(messages[:number], True, tools, variables)
        until = text if number == len(messages) - 1 else self._render(messages[: number + 1], False, tools, variables)
        if not (text.startswith(until) and until.startswith(prompt)):
            raise ValueError(
                f"message {number + 1}: the chat template writes this turn otherwise when others follow it, so that "
                "what is to be learned cannot be told; learn the last answer only, or use a template with "
                "{% generation %}"
            )
        answer, end_token = until[len(prompt) :], self._special_tokens.get("eos_token")
        if end_token and answer.rstrip().endswith(end_token):
            answer = answer.rstrip()
        return len(prompt), len(prompt) + len(answer)

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        names = {
            **self._special_tokens,
            "messages": [_tidied(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            return self._template.render(names)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except (TypeError, KeyError, AttributeError, IndexError, ZeroDivisionError) as error:
            # Whatever a template does with a message of another make than it expects.
            problem = f"the chat template fails on these messages: {type(error).__name__}: {error}"
            raise ValueError(problem) from error


def _tidied(message: Message) -> dict[str, Any]:
    """A message as templates expect it: no fields that are null, and thoughts under the name that they read."""
    kept = {key: value for key, value in message.items() if value is not None}
    thoughts = next((kept[name] for name in _THOUGHTS if name in kept), None)
    return kept if thoughts is None else {"thinking": thoughts, **kept, "reasoning_content": thoughts}


def _generation_tags(environment: jinja2.Environment, source: str) -> list[nodes.CallBlock]:
    calls = environment.parse(source).find_all(nodes.CallBlock)
    return [call for call in calls if isinstance(call.call.node, nodes.ExtensionAttribute)]


def _without_marks(text: str) -> Rendered:
    """Take the marks of {% generation %} out of a text."""
    pieces, spans, length = list[str](), list[tuple[int, int]](), 0
    before, *marked = text.split(_BEGIN)
    pieces.append(before)
    length += len(before)
    for stretch in marked:
        answer, _, after = stretch.partition(_END)
        spans.append((length, length + len(answer)))
        pieces += [answer, after]
        length += len(answer) + len(after)
    return Rendered("".join(pieces), tuple(spans))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes what HTML would take for markup.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
