"""HuggingFaceTokenizer against the library `tokenizers` and transformers, on real folders of several kinds."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer

from hp_components.tokenizer import HuggingFaceTokenizer
from hp_protocols.errors import ConfigError

PROBES = [
    "The quick brown fox",
    " leading space, trailing space ",
    "x = [1, 22, 333]  # don't\n\n\tindent\r\n",
    "你好 мир 🙂 naïve é",
    "",
    "<|endoftext|>in<s> the</s> middle <|im_start|>user<|im_end|> <tool>",
]


def build(path: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.Config(tokenizer_path=str(path)).build()


@pytest.mark.parametrize("text", PROBES)
def test_ids_are_those_of_transformers(folder: Path, text: str) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    assert build(folder).encode(text) == reference(text)["input_ids"]


@pytest.mark.parametrize("text", PROBES)
def test_ids_without_bos_and_eos_are_those_of_the_library(folders: dict[str, Path], text: str) -> None:
    library = Tokenizer.from_file(str(folders["metaspace BPE"] / "tokenizer.json"))
    ids = build(folders["metaspace BPE"]).encode(text, add_bos=False, add_eos=False)
    assert ids == library.encode(text, add_special_tokens=False).ids


def test_text_comes_back_as_transformers_gives_it_back(folder: Path) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    for text in PROBES:
        ids = reference(text)["input_ids"]
        expected = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert build(folder).decode(ids) == expected


def test_special_tokens_are_those_of_transformers(folder: Path) -> None:
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), build(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (reference.bos_token_id, reference.eos_token_id)
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.get_vocab_size() == tokenizer.vocab_size


def test_a_batch_is_its_texts_one_by_one(folder: Path) -> None:
    tokenizer = build(folder)
    assert tokenizer.encode_batch(PROBES) == [tokenizer.encode(text) for text in PROBES]


def test_bos_and_eos_come_as_asked_and_are_never_doubled(folders: dict[str, Path]) -> None:
    tokenizer = build(folders["metaspace BPE"])
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    bare = tokenizer.encode("the dog", add_bos=False, add_eos=False)
    assert not {bos, eos} & set(bare)
    assert tokenizer.encode("the dog", add_bos=True, add_eos=True) == [bos, *bare, eos]
    assert tokenizer.encode("the dog", add_bos=True, add_eos=False) == [bos, *bare]
    assert tokenizer.encode("the dog", add_bos=False, add_eos=True) == [*bare, eos]
    assert tokenizer.encode("the dog") == [bos, *bare]
    for add in (None, True):
        ids = tokenizer.encode("<s>the dog</s>", add_bos=add, add_eos=add)
        assert (ids.count(bos), ids.count(eos)) == (1, 1)
        assert (ids[0], ids[-1]) == (bos, eos)


def test_asking_for_a_token_that_there_is_not_is_an_error(folders: dict[str, Path]) -> None:
    tokenizer = build(folders["byte-level BPE"])
    with pytest.raises(ValueError, match="add_bos=True, but this tokenizer has no BOS token"):
        tokenizer.encode("the dog", add_bos=True)


@pytest.mark.parametrize("asked_for", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
def test_vocab_and_merges_are_read_as_gpt2s(bpe_files: Path, asked_for: dict[str, bool]) -> None:
    tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (bpe_files / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", **tokens, **asked_for})
    )
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(bpe_files), build(bpe_files)
    tokenizer.save(bpe_files / "saved")
    assert tokenizer.eos_id == reference.eos_token_id
    for text in PROBES[:-1]:  # the last one spells out BOS, which transformers would double
        assert tokenizer.encode(text) == reference(text)["input_ids"]
        assert build(bpe_files / "saved").encode(text) == tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False, add_eos=False), skip_special_tokens=False) == text


def test_vocab_and_merges_of_a_class_with_other_rules_are_refused(bpe_files: Path) -> None:
    (bpe_files / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    with pytest.raises(ConfigError, match="do not say how Qwen2Tokenizer cuts text into words") as error:
        build(bpe_files)
    assert "save_pretrained" in str(error.value)


def test_the_path_of_the_file_is_as_good_as_that_of_the_folder(folders: dict[str, Path]) -> None:
    folder = folders["metaspace BPE"]
    assert build(folder / "tokenizer.json").fingerprint == build(folder).fingerprint


def test_truncation_and_padding_in_the_file_do_not_cut_a_document(truncating_file: Path) -> None:
    tokenizer = build(truncating_file)
    text = "def main(argv: list[str]) -> int:\n" * 20
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False) == "a"


@pytest.mark.parametrize(
    ("files", "bos", "eos"),
    [
        ({}, None, None),
        ({"special_tokens_map.json": {"eos_token": "<|endoftext|>"}}, None, "<|endoftext|>"),
        ({"config.json": {"bos_token_id": 0, "eos_token_id": [3, 0]}}, "<|endoftext|>", "#"),
        ({"config.json": {"eos_token_id": 0}, "tokenizer_config.json": {"eos_token": None}}, None, None),
        (
            {"special_tokens_map.json": {"eos_token": "!"}, "tokenizer_config.json": {"eos_token": "<|endoftext|>"}},
            None,
            "<|endoftext|>",
        ),
    ],
)
def test_bos_and_eos_are_found_in_the_files_beside(
    folders: dict[str, Path], tmp_path: Path, files: dict[str, dict[str, object]], bos: str | None, eos: str | None
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folders["byte-level BPE"] / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = build(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (bos, eos)


def test_a_saved_folder_gives_the_same_tokenizer_here_and_in_transformers(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = build(folder)
    tokenizer.save(tmp_path / "saved")
    again = build(tmp_path / "saved")
    assert (again.bos_id, again.eos_id, again.fingerprint) == (
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.fingerprint,
    )
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == "{{ messages }}"
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in PROBES:
        assert again.encode(text) == tokenizer.encode(text) == reference(text)["input_ids"]


@pytest.mark.parametrize("there", [[], ["readme.md", "vocab.json"]])
def test_a_folder_without_files_lists_what_was_looked_for(tmp_path: Path, there: list[str]) -> None:
    for name in there:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError) as error:
        build(tmp_path)
    text = str(error.value)
    assert "tokenizer.tokenizer_path" in text
    assert all(name in text for name in ("tokenizer.json", "vocab.json", "merges.txt", *there))


def test_a_missing_folder_suggests_the_nearest(folders: dict[str, Path]) -> None:
    folder = folders["unigram"]
    with pytest.raises(ConfigError, match="does not exist") as error:
        build(folder.with_name(folder.name + "x"))
    assert f"did you mean {folder.parent}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{]", "is no tokenizer file"),
        ("tokenizer_config.json", '{\n"a": }', r"tokenizer_config.json:2: is not JSON: .* at column 6"),
        ("tokenizer_config.json", "[]", "is not a JSON object"),
        ("tokenizer_config.json", '{"bos_token": 3}', "bos_token: is 3"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "added_tokens_decoder: is not as it should be"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"a": "b"}}', "allowed: an object of ids and tokens"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"7": {"content": "<|endoftext|>"}}}',
            "has id 7 there, but 0 in the tokenizer",
        ),
    ],
)
def test_damaged_files_are_named(
    folders: dict[str, Path], tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folders["byte-level BPE"] / "tokenizer.json").read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        build(tmp_path)


def test_ids_out_of_range_and_half_surrogates_are_errors(folders: dict[str, Path]) -> None:
    tokenizer = build(folders["byte-level BPE"])
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 400\)"):
        tokenizer.decode([1, 400])
    with pytest.raises(ValueError, match="half a surrogate pair at character 2"):
        tokenizer.encode("ab\ud800")


def test_fingerprints_differ_where_ids_can_differ(folders: dict[str, Path], tmp_path: Path) -> None:
    prints = {build(folder).fingerprint for kind, folder in folders.items() if "elsewhere" not in kind}
    assert len(prints) == 7


@pytest.mark.parametrize("kind", ["byte-level BPE", "split BPE"])
def test_every_unicode_text_comes_back(folders: dict[str, Path], kind: str) -> None:
    tokenizer = build(folders[kind])
    texts = [
        "\x00\x01\x7f",
        "\u2028\u2029\u0085\ufeff",
        "\U0010ffff\ud7ff\ue000",
        "🏳️‍🌈👩‍👩‍👧 ﷽",
        "a\r\nb\rc\n",
        " \t\n ",
    ]
    texts.append("".join(chr(code) for code in range(0x20, 0x800)))
    for text in texts:
        expected = unicodedata.normalize("NFC", text) if kind == "split BPE" else text
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("kind", "can_be_cut"),
    [("byte-level BPE", True), ("split BPE", True), ("metaspace BPE", False), ("unigram", False)],
)
def test_a_text_is_cut_only_where_that_changes_no_token(folders: dict[str, Path], kind: str, can_be_cut: bool) -> None:
    tokenizer = build(folders[kind])
    text = " ".join(PROBES) * 3 + "naïve e\u0301 \u0301x ½ ² Ⅷ a\n\nb \n c  d\te's 'S ''S\n"
    pieces = tokenizer.pieces(text, 3)
    assert (len(pieces) > 20) == can_be_cut
    assert "".join(pieces) == text
    whole = tokenizer.encode(text, add_bos=False, add_eos=False)
    assert [token for piece in pieces for token in tokenizer.encode(piece, add_bos=False, add_eos=False)] == whole


@pytest.mark.parametrize(
    ("name", "kind"), [("tokenizer.model", "a sentencepiece model"), ("vocab.txt", "a WordPiece vocabulary")]
)
def test_vocabularies_that_are_not_read_are_named(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match=f"{name} is {kind}, which is not read\n.*save_pretrained"):
        build(tmp_path)
