"""Chat templates against transformers: the same text, the same ids, the same tokens of the assistant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from hp_components.tokenizer import CorpusTokenizer, HuggingFaceTokenizer
from hp_components.tokenizer.chat_template import ChatTemplate
from hp_protocols.errors import ConfigError

CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}\n{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if loop.first and message.role != 'system' %}\n"
    "        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}\n"
    "    {%- endif %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
MARKED = (
    "{% for message in messages %}\n"
    "{% if message.role == 'assistant' %}\n"
    "<|im_start|>assistant\n{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n\n"
    "{% else %}\n"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\n"
    "{% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] "
    "+ ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
THOUGHTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.reasoning_content is defined and loop.last %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{{ message.content or '' }}<|im_end|>\n{% endfor %}"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "The quick brown fox."}],
    [
        {"role": "user", "content": "  one\n\n"},
        {"role": "assistant", "content": "\n你好 🙂 e\u0301 <b> & 'quotes'"},
        {"role": "user", "content": "two <|im_end|> not the end"},
        {"role": "assistant", "content": "", "tool_calls": None},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "jumps over the lazy dog", "thinking": "hm"},
    ],
]


@pytest.fixture
def chat_folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A tokenizer folder whose chat template a test writes."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folders["with added tokens"] / name).read_bytes())
    return tmp_path


def build(folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.Config(tokenizer_path=str(folder)).build()


@pytest.mark.parametrize("template", [CHATML, MARKED, THOUGHTS])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [False, True])
def test_text_and_ids_are_those_of_transformers(
    chat_folder: Path, template: str, chat: list[dict[str, Any]], prompt: bool
) -> None:
    (chat_folder / "chat_template.jinja").write_text(template)
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(chat_folder), build(chat_folder)
    text = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=prompt) == text
    ids = reference.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
    assert tokenizer.encode_chat(chat, add_generation_prompt=prompt) == ids


def test_tools_and_other_variables_reach_the_template(chat_folder: Path) -> None:
    tools = [{"type": "function", "function": {"name": "größe", "parameters": {"a": [1, None, True]}}}]
    (chat_folder / "chat_template.jinja").write_text(CHATML + "{{ mood }}")
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(chat_folder), build(chat_folder)
    text = reference.apply_chat_template(CHATS[0], tools=tools, tokenize=False, mood="calm")
    assert "größe" in text
    assert tokenizer.apply_chat_template(CHATS[0], tools=tools, mood="calm") == text


@pytest.mark.parametrize("place", ["text", "list"])
def test_a_template_in_the_config_file_is_found_and_saved(chat_folder: Path, place: str) -> None:
    path = chat_folder / "tokenizer_config.json"
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    given = CHATML if place == "text" else several
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": given}))
    tokenizer = build(chat_folder)
    tokenizer.save(chat_folder / "saved")
    for folder in (chat_folder, chat_folder / "saved"):
        reference = transformers.AutoTokenizer.from_pretrained(folder)
        text = reference.apply_chat_template(CHATS[0], tokenize=False)
        assert build(folder).apply_chat_template(CHATS[0]) == text
    # The file of its own goes before it.
    (chat_folder / "chat_template.jinja").write_text("file")
    (chat_folder / "additional_chat_templates").mkdir()
    (chat_folder / "additional_chat_templates/other.jinja").write_text("other")
    assert build(chat_folder).apply_chat_template(CHATS[0]) == "file"
    build(chat_folder).save(chat_folder / "again")
    reference = transformers.AutoTokenizer.from_pretrained(chat_folder / "again")
    assert reference.apply_chat_template(CHATS[0], tokenize=False) == "file"
    assert reference.apply_chat_template(CHATS[0], tokenize=False, chat_template="other") == "other"


@pytest.mark.parametrize("chat", CHATS)
def test_a_template_that_marks_its_answers_gives_the_mask_of_transformers(
    chat_folder: Path, chat: list[dict[str, Any]]
) -> None:
    (chat_folder / "chat_template.jinja").write_text(MARKED)
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(chat_folder), build(chat_folder)
    expected = reference.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    assert tokenizer.chat_template is not None
    rendered = tokenizer.chat_template.render_answers(chat)
    ((ids, marks),) = tokenizer.encode_spans([rendered.text], [rendered.spans])
    assert ids == expected["input_ids"]
    assert marks == [bool(mark) for mark in expected["assistant_masks"]]
    assert sum(marks) < len(marks)


@pytest.mark.parametrize("chat", CHATS)
def test_a_template_that_does_not_mark_them_gives_the_same_answers(chat: list[dict[str, Any]]) -> None:
    unmarked = MARKED.replace("{% generation %}", "{% if true %}").replace("{% endgeneration %}", "{% endif %}")
    tokens = {"eos_token": "<|im_end|>"}
    marked, found = (ChatTemplate(source, tokens).render_answers(chat) for source in (MARKED, unmarked))
    assert found == marked
    answers = [message["content"] + "<|im_end|>" for message in chat if message["role"] == "assistant"]
    assert [found.text[start:end] for start, end in found.spans] == answers
    last = ChatTemplate(unmarked, tokens).render_answers(chat, last_only=True)
    assert last.spans == found.spans[-1:] == ChatTemplate(MARKED, tokens).render_answers(chat, last_only=True).spans


def test_bos_and_eos_are_those_of_the_template_and_never_doubled(folders: dict[str, Path], tmp_path: Path) -> None:
    for path in folders["metaspace BPE"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(LLAMA)
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path), build(tmp_path)
    ids = tokenizer.encode_chat(CHATS[0])
    assert ids == reference.apply_chat_template(CHATS[0], return_dict=False)
    assert (ids.count(tokenizer.bos_id), ids.count(tokenizer.eos_id)) == (1, 1)
    with pytest.raises(ValueError, match="refuses these messages: Only user and assistant roles are supported!"):
        tokenizer.encode_chat([{"role": "system", "content": "x"}])


def test_a_turn_that_changes_when_others_follow_is_refused() -> None:
    template = ChatTemplate(THOUGHTS, {"eos_token": "<|im_end|>"})
    chat = [{"role": "assistant", "content": "a", "reasoning": "hm"}, {"role": "user", "content": "b"}]
    with pytest.raises(ValueError, match="message 1: the chat template writes this turn otherwise"):
        template.render_answers(chat)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% for %}", "line 2 of the chat template"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ messages[0].content + 1 }}", "fails on these messages: TypeError"),
    ],
)
def test_a_template_that_cannot_be_or_breaks_out_is_an_error(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source, {}).render(CHATS[0])


def test_a_tokenizer_without_a_template_says_so(chat_folder: Path) -> None:
    assert build(chat_folder).chat_template is None
    with pytest.raises(ValueError, match="has no chat template"):
        build(chat_folder).apply_chat_template(CHATS[0])
    assert CorpusTokenizer.Config(vocab_size=260).build(corpus=lambda: ["text"]).chat_template is None
    (chat_folder / "tokenizer_config.json").write_text('{"chat_template": [{"nom": 1}]}')
    with pytest.raises(ConfigError, match="a list of objects with `name` and `template`"):
        build(chat_folder)
