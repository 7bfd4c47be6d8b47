"""Conversations: labels on answers only, whole conversations in a row, the contract of every other loader."""

from __future__ import annotations

import itertools
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hp_components.data import ChatDataLoader, prepare
from hp_components.data.chat_rows import best_fit
from hp_components.tokenizer import BaseTokenizer, CorpusTokenizer, HuggingFaceTokenizer
from hp_protocols.errors import ConfigError

X = -100
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def chat(*turns: str) -> dict[str, Any]:
    """Turns of user and assistant by turns."""
    roles = itertools.cycle(["user", "assistant"])
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]}


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


def build(path: Path, tokenizer: BaseTokenizer, *, seq_len: int = 16, local: int = 2, **config: Any) -> Any:
    place = {key: config.pop(key) for key in ("dp_rank", "dp_world_size") if key in config}
    config = {"template": "empty", "shuffle": False, "epochs": 1, **config}
    runtime = {"tokenizer": tokenizer, "seq_len": seq_len, "local_batch_size": local, "seed": 5, **place}
    return ChatDataLoader.Config(dataset_path=str(path), **config).build(**runtime)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder with a chat template."""
    made = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|start|>", "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["user assistant some words, some more words\n"] * 5, trainer)
    tokenizer.save(str(made / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def test_answers_have_labels_and_prompts_and_padding_have_none(tmp_path: Path, letters: BaseTokenizer) -> None:
    # a=2 …; BOS 0, EOS 1 behind each answer.
    path = write(tmp_path / "a.jsonl", [chat("ab", "c", "d", "ef"), chat("g", "h")])
    batch = next(build(path, letters))
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input": [[0, 2, 3, 4, 1, 5, 6, 7, 1, 0, 8, 9, 1, 1, 1, 1], [1] * 16],
        "labels": [[X, X, 4, 1, X, 6, 7, 1, X, X, 9, 1, X, X, X, X], [X] * 16],
        "positions": [[0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 0, 1, 2], list(range(16))],
        "segment_ids": [[0] * 9 + [1] * 4 + [2] * 3, [0] * 16],
        "cu_seqlens": [0, 9, 13, 16, 32],
    }


def test_one_per_row_and_the_last_answer_only(tmp_path: Path, letters: BaseTokenizer) -> None:
    path = write(tmp_path / "a.jsonl", [chat("ab", "c", "d", "ef"), chat("g", "h")])
    batch = next(build(path, letters, packing=False, train_on="last_assistant", document_mask=False, seq_len=10))
    assert list(batch) == ["input", "labels", "positions", "segment_ids"]
    assert batch["input"].tolist() == [[0, 2, 3, 4, 1, 5, 6, 7, 1, 1], [0, 8, 9, 1, 1, 1, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[X, X, X, X, X, 6, 7, 1, X, X], [X, 9, 1, X, X, X, X, X, X, X]]


def test_prompts_and_responses_are_conversations_too(tmp_path: Path, letters: BaseTokenizer) -> None:
    pairs = [{"system": "z", "ask": "ab", "response": "c"}]
    path = write(tmp_path / "a.jsonl", pairs)
    batch = next(build(path, letters, form="prompt_response", prompt_key="ask", system_key="system", local=1))
    assert batch["input"][0, :7].tolist() == [0, 27, 2, 3, 4, 1, 1]
    assert batch["labels"][0, :7].tolist() == [X, X, X, 4, 1, X, X]
    share = {"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "c"}]}
    path = write(tmp_path / "b.jsonl", [share])
    again = next(build(path, letters, messages_key="conversations", local=1))
    assert again["input"][0, :6].tolist() == [0, 2, 3, 4, 1, 1]
    assert again["labels"][0, :6].tolist() == [X, X, 4, 1, X, X]


def test_human_and_assistant_are_written_out(tmp_path: Path) -> None:
    tokenizer = CorpusTokenizer.Config(vocab_size=300).build(corpus=lambda: ["Human: some words\n\nAssistant: more"])
    record = {
        "messages": [{"role": "system", "content": "Be kind."}, *chat("Hi", "Hello you", "Bye", "Bye")["messages"]]
    }
    path = write(tmp_path / "a.jsonl", [record])
    batch = next(build(path, tokenizer, template="human_assistant", seq_len=200, local=1))
    ids, labels = batch["input"][0].tolist(), batch["labels"][0]
    length = int((batch["segment_ids"][0] == 0).sum())
    text = tokenizer.decode(ids[:length], skip_special_tokens=False)
    assert text == ("<|bos|>Be kind.\n\nHuman: Hi\n\nAssistant: Hello you<|eos|>Human: Bye\n\nAssistant: Bye<|eos|>")
    learned = [token for token in labels.tolist() if token != X]
    assert tokenizer.decode(learned, skip_special_tokens=False) == " Hello you<|eos|> Bye<|eos|>"


@pytest.mark.parametrize("marked", [True, False])
def test_the_tokenizers_template_gives_the_tokens_and_labels_of_transformers(
    tmp_path: Path, folder: Path, marked: bool
) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    chats = [chat("some words", "more words"), chat("a", "", "你好 🙂", "some\nwords", "words"), chat("x", "y" * 300)]
    if not marked:
        (tmp_path / "chat_template.jinja").write_text(
            TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((folder / name).read_bytes())
        folder = tmp_path
    tokenizer = HuggingFaceTokenizer.Config(tokenizer_path=str(folder)).build()
    path = write(tmp_path / "a.jsonl", chats)
    loader = build(path, tokenizer, template="tokenizer", seq_len=350, local=1, packing=False)
    for messages, batch in zip(chats, loader, strict=True):
        expected = reference.apply_chat_template(
            messages["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = expected["input_ids"], expected["assistant_masks"]
        assert batch["input"][0, : len(ids)].tolist() == ids
        labels = [token if learn else X for token, learn in zip(ids[1:], mask[1:], strict=True)] + [X]
        assert batch["labels"][0, : len(ids)].tolist() == labels
        assert (batch["labels"][0, len(ids) :] == X).all()


# ---- rows ----


def test_rows_hold_every_conversation_once_and_are_well_filled() -> None:
    rng = random.Random(0)
    for _ in range(50):
        seq_len = rng.choice([4, 16, 100, 5000])
        lengths = [min(seq_len, max(1, int(rng.expovariate(3 / seq_len)))) for _ in range(rng.randint(1, 300))]
        rows = best_fit(lengths, seq_len)
        assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
        used = [sum(lengths[number] for number in row) for row in rows]
        assert max(used) <= seq_len
        # First-fit decreasing (and best-fit with it) needs at most 11/9 of the best plus 6/9.
        assert len(rows) <= 11 / 9 * -(-sum(lengths) // seq_len) + 1 + sum(length > seq_len // 2 for length in lengths)
        assert rows == sorted(sorted(row) for row in rows)
    assert best_fit([], 8) == []


def test_a_conversation_longer_than_a_row_is_what_was_said_it_is(
    tmp_path: Path, letters: BaseTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", [chat("a", "bcdefgh"), chat("i", "j"), chat("klmnopqrs", "t")])
    with pytest.raises(ConfigError) as error:
        build(path, letters, seq_len=6)
    assert "2 of 3 conversations are longer than a row of 6 tokens (the longest has 12)" in str(error.value)
    assert "--dataloader.on_too_long skip, or --training.seq_len 12" in str(error.value)
    (batch,) = build(path, letters, seq_len=6, on_too_long="skip")
    assert batch["input"].tolist() == [[0, 10, 11, 1, 1, 1], [1] * 6]
    assert "are left out; the longest has 12" in caplog.text
    (batch,) = build(path, letters, seq_len=6, on_too_long="truncate")
    assert batch["input"].tolist() == [[0, 2, 3, 4, 5, 6], [0, 10, 11, 1, 1, 1]]
    assert batch["labels"].tolist() == [[X, 3, 4, 5, 6, X], [X, 11, 1, X, X, X]]
    assert "and are cut; the longest has 12; 1 have no answer left then and are left out" in caplog.text
    with pytest.raises(ConfigError, match="nothing to train on"):
        build(write(tmp_path / "b.jsonl", [chat("a", "b" * 99)]), letters, seq_len=6, on_too_long="skip")


@pytest.mark.parametrize("packing", [True, False])
def test_a_state_goes_on_under_another_number_of_ranks_and_workers(
    tmp_path: Path, letters: BaseTokenizer, packing: bool
) -> None:
    rng = random.Random(1)
    texts = ["".join(rng.choices("abcdefg", k=rng.randint(1, 12))) for _ in range(200)]
    path = write(tmp_path / "a.jsonl", [chat(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)])

    def world(dp: int, state: Any = None, **config: Any) -> list[Any]:
        place = [{"dp_rank": rank, "dp_world_size": dp, "local": 8 // dp} for rank in range(dp)]
        options = {"seq_len": 40, "shuffle": True, "epochs": None, "packing": packing, **config}
        loaders = [build(path, letters, **options, **at) for at in place]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        return loaders

    def take(loaders: list[Any], count: int) -> torch.Tensor:
        names = ["input", "labels", "positions", "segment_ids"]
        return torch.cat(
            [torch.stack([b[n] for n in names], 1) for _ in range(count) for b in [next(one) for one in loaders]]
        )

    one = take(world(1), 25)
    eight = world(8)
    assert torch.equal(take(eight, 11), one[:88])
    assert torch.equal(take(world(2, eight[3].state_dict(), num_workers=1), 14), one[88:])
    with pytest.raises(ConfigError, match="data position is for packing"):
        world(1, eight[0].state_dict(), packing=not packing)


# ---- bad records ----


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"message": []}, "has no field 'messages' (its fields: 'message')\n    → --dataloader.messages_key message"),
        ({"messages": "hi"}, "'messages' is a string; allowed: a list of objects"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": ["hi"]}, "message 1 is a string, not an object"),
        ({"messages": [{"content": "hi"}]}, "message 1 has no 'role' (its fields: 'content')"),
        ({"messages": [{"role": 1, "content": "hi"}]}, "message 1 has a number as its 'role'"),
        ({"messages": [{"role": "assistant", "content": None}]}, "message 1 has no 'content'"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "message 1 has a number as its 'content'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "has no message of an assistant"),
        (chat("a", "1"), None),
        ({**chat("a", "b"), "tools": []}, "has tools, which template 'empty' cannot write"),
        (
            {"messages": [{"role": "assistant", "content": "a", "thinking": "b"}]},
            "has a message with more than words, which template 'empty' cannot write",
        ),
    ],
)
def test_a_bad_record_is_named_with_its_line(
    tmp_path: Path, letters: BaseTokenizer, record: Any, message: str | None
) -> None:
    path = write(tmp_path / "a.jsonl", [chat("ab", "c"), record])
    if message is None:  # an empty answer still has its end to learn
        assert build(path, letters).num_rows == 1
        return
    with pytest.raises(ConfigError) as error:
        build(path, letters)
    (fault,) = error.value.faults
    assert str(fault).startswith(f"{path}:2: ")
    assert message in str(fault)
    assert build(path, letters, on_bad_line="skip").skipped.total == 1


def test_what_the_template_refuses_and_answers_without_a_token_are_bad_lines(
    tmp_path: Path, folder: Path, letters_config: type[BaseTokenizer.Config]
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + TEMPLATE
    (tmp_path / "chat_template.jinja").write_text(refusing)
    tokenizer = HuggingFaceTokenizer.Config(tokenizer_path=str(tmp_path)).build()
    path = write(tmp_path / "a.jsonl", [chat("a", "b"), {"messages": [{"role": "assistant", "content": "a"}]}])
    with pytest.raises(ConfigError, match=r"a.jsonl:2: the chat template refuses these messages: user first"):
        build(path, tokenizer, template="tokenizer")
    path = write(tmp_path / "b.jsonl", [chat("a", "b"), chat("a", "1")])
    with pytest.raises(ConfigError, match=r"b.jsonl:2: has no token to learn: its answers are empty"):
        build(path, letters_config(with_eos=False).build())


def test_text_files_and_missing_templates_are_refused(tmp_path: Path, letters: BaseTokenizer) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"a.txt: has text, not records; allowed: .jsonl, .json, .parquet"):
        build(tmp_path / "a.txt", letters)
    path = write(tmp_path / "a.jsonl", [chat("ab", "c")])
    with pytest.raises(ConfigError, match=r"template: is 'tokenizer', but this tokenizer has no chat template"):
        build(path, letters, template="tokenizer")
    config = ChatDataLoader.Config(system_key="system", messages_key="")
    places = [fault.where for fault in config.faults("dataloader")]
    assert places == ["dataloader.dataset_path", "dataloader.messages_key", "dataloader.system_key"]


def test_a_tokenizer_is_trained_on_the_words_of_conversations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "a.jsonl", [chat("question" * 20, "answer" * 20)])
    config = ChatDataLoader.Config(dataset_path=str(path), template="human_assistant")
    tokenizer = prepare(CorpusTokenizer.Config(vocab_size=280), config)
    assert "1 conversations" in caplog.text
    assert len(tokenizer.encode("question" * 4 + "answer" * 4)) < 20
    plain = json.loads(json.dumps(config.to_dict()))
    assert ChatDataLoader.Config.from_dict(plain) == config
