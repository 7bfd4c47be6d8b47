"""CorpusTokenizer: lossless, deterministic, trained once, and readable by others."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer

from hp_components.tokenizer import CorpusTokenizer, HuggingFaceTokenizer
from hp_components.tokenizer import corpus as corpus_module
from hp_protocols.errors import ConfigError

WORDS = ["one", "two", "three", "four", "seven", "eleven", "naïve", "你好", "🙂", "<|eos|>", "def", "return"]


def documents() -> list[str]:
    """Some hundred kilobytes of text."""
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=200)) + "\n" for _ in range(300)]


def build(vocab_size: int = 300) -> CorpusTokenizer:
    return CorpusTokenizer.Config(vocab_size=vocab_size).build(corpus=documents)


HARD_TEXTS = [
    "",
    " ",
    "\x00\x01\x7f\x80\xff",
    "tabs\tand\r\nnew\n\n\nlines   and  spaces   ",
    "<|bos|>text<|eos|> <|eos|",
    "é é (composed, not) ﬁ ½ Å",
    "你好世界🙂🏳️‍🌈\u200b\u2028\ufeff\uffff\U0010ffff",
    "a" * 10_000,
    "".join(chr(code) for code in range(0x2000) if not 0xD800 <= code < 0xE000),
]


@pytest.mark.parametrize("text", HARD_TEXTS, ids=range(len(HARD_TEXTS)))
def test_every_text_comes_back_unchanged(text: str) -> None:
    tokenizer = build()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, add_bos=True, add_eos=True)) == text


def test_random_unicode_comes_back_unchanged() -> None:
    tokenizer, rng = build(), random.Random(1)
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    texts = ["".join(rng.choices(characters, k=500)) for _ in range(50)]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts


def test_special_tokens_come_only_when_asked_for() -> None:
    tokenizer = build()
    ids = tokenizer.encode("<|bos|>a<|eos|>")
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    assert tokenizer.encode("<|bos|>a<|eos|>", add_bos=True, add_eos=True) == [0, *ids, 1]
    assert tokenizer.decode([0, 1], skip_special_tokens=False) == "<|bos|><|eos|>"


def test_ids_are_those_of_the_library_from_the_same_file(tmp_path: Path) -> None:
    tokenizer = build()
    tokenizer.save(tmp_path)
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.encode_special_tokens = True
    for text in [*documents()[:20], *HARD_TEXTS]:
        assert tokenizer.encode(text) == library.encode(text).ids


def test_a_saved_folder_is_the_same_tokenizer_here_and_in_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = build()
    tokenizer.save(tmp_path)
    caplog.set_level(logging.INFO)
    ours = HuggingFaceTokenizer.Config(tokenizer_path=str(tmp_path)).build()
    given = CorpusTokenizer.Config(vocab_size=999, tokenizer_path=str(tmp_path)).build()
    assert f"{tmp_path} has 300 tokens; vocab_size is for training only" in caplog.text
    for other in (ours, given):
        assert other.fingerprint == tokenizer.fingerprint
        assert (other.bos_id, other.eos_id, other.vocab_size) == (0, 1, 300)
    theirs = [transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast]
    for reference in (cls.from_pretrained(tmp_path) for cls in theirs):
        assert (reference.bos_token_id, reference.eos_token_id, len(reference)) == (0, 1, 300)
        for text in [*documents()[:5], *HARD_TEXTS]:
            assert reference(text)["input_ids"] == tokenizer.encode(text)
            assert reference.decode(tokenizer.encode(text)) == text


def test_configs_come_back_from_plain_data() -> None:
    for config in (CorpusTokenizer.Config(vocab_size=300), HuggingFaceTokenizer.Config(tokenizer_path="a")):
        plain = json.loads(json.dumps(config.to_dict()))
        assert type(config).from_dict(plain) == config


def test_it_is_trained_once_and_then_found(cache_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = build()
    assert "300 tokens trained on" in caplog.text
    (file,) = cache_folder.glob("tokenizers/*.tokenizer")
    before = file.stat().st_mtime_ns
    caplog.clear()
    assert build().fingerprint == first.fingerprint
    assert file.stat().st_mtime_ns == before
    assert "trained" not in caplog.text


def test_another_corpus_or_size_is_another_tokenizer(cache_folder: Path) -> None:
    changed = documents()
    changed[-1] += "!"
    build()
    build(vocab_size=301)
    CorpusTokenizer.Config(vocab_size=300).build(corpus=lambda: changed)
    assert len(list(cache_folder.glob("tokenizers/*.tokenizer"))) == 3


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_noticed_and_made_again(
    cache_folder: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    first = build()
    (file,) = cache_folder.glob("tokenizers/*.tokenizer")
    whole = file.read_bytes()
    file.write_bytes({"cut": whole[:-100], "changed": whole.replace(b"one", b"eno"), "empty": b""}[damage])
    assert build().fingerprint == first.fingerprint
    assert "damaged" in caplog.text
    assert file.read_bytes() == whole


CHILD = """
import logging, sys
from hp_components.tokenizer import CorpusTokenizer
logging.basicConfig(level=logging.INFO)
print(CorpusTokenizer.Config(vocab_size=300).build(corpus=[sys.argv[1]]).fingerprint)
"""


def test_processes_at_once_train_once_and_agree(cache_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("".join(documents() * 10))
    command = [sys.executable, "-c", CHILD, str(tmp_path / "corpus.txt")]
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(3)
    ]
    outputs = [child.communicate(timeout=100) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert sum("tokens trained on" in err for _, err in outputs) == 1
    # A process of its own, threads of its own, the same file.
    (file,) = cache_folder.glob("tokenizers/*.tokenizer")
    content = file.read_bytes()
    file.unlink()
    subprocess.run(command, check=True, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"}, capture_output=True)
    assert file.read_bytes() == content


@pytest.mark.parametrize("vocab_size", [-1, 0, 257])
def test_a_vocabulary_that_cannot_hold_the_bytes_is_refused(vocab_size: int) -> None:
    config = CorpusTokenizer.Config(vocab_size=vocab_size)
    (fault,) = config.faults("tokenizer")
    assert fault.where == "tokenizer.vocab_size"
    with pytest.raises(ConfigError, match=rf"vocab_size: {vocab_size} is too small; allowed: at least 258"):
        config.build(corpus=documents)
    assert CorpusTokenizer.Config(vocab_size=258).build(corpus=documents).vocab_size == 258


def test_a_corpus_that_gives_fewer_tokens_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = CorpusTokenizer.Config(vocab_size=2048).build(corpus=lambda: ["just one line"])
    assert tokenizer.vocab_size < 300
    assert "is too small for 2048 tokens" in caplog.text


def test_it_can_be_built_from_a_list_of_files(tmp_path: Path) -> None:
    for index, text in enumerate(documents()):
        (tmp_path / f"{index:03}.txt").write_text(text)
    tokenizer = CorpusTokenizer.Config(vocab_size=300).build(corpus=sorted(tmp_path.glob("*.txt")))
    assert tokenizer.fingerprint == build().fingerprint


def test_without_a_corpus_it_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="needs corpus="):
        CorpusTokenizer.Config().build()
    with pytest.raises(ConfigError, match="every document is empty"):
        CorpusTokenizer.Config().build(corpus=lambda: ["", ""])


def test_a_large_corpus_is_sampled_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    # One and a half times what is used; the last third has a word that the rest has not.
    monkeypatch.setattr(corpus_module, "SAMPLE_BYTES", 2**20)
    common, late = "alpha beta gamma delta " * (2**19 // 23), "omicron " * (2**19 // 8)
    tokenizer = CorpusTokenizer.Config(vocab_size=300).build(corpus=lambda: [common, common, late])
    assert len(tokenizer.encode(" omicron omicron")) == 2
    assert len(tokenizer.encode(" alpha alpha")) == 2


def test_pieces_have_the_ids_of_the_whole() -> None:
    tokenizer = build()
    texts = ["".join(documents()), "x = 1  # a\n\n\n  b_c  d9 e\r\n" * 2000, " " * 20_000, "a" * 20_000, ""]
    for text in texts:
        pieces = tokenizer.pieces(text, 1000)
        assert "".join(pieces) == text
        assert [token for ids in tokenizer.encode_batch(pieces) for token in ids] == tokenizer.encode(text)
    assert len(tokenizer.pieces(texts[0], 1000)) > len(texts[0]) // 1100


def test_a_tokenizer_that_joins_words_over_spaces_is_never_cut(folders: dict[str, Path]) -> None:
    text = "the quick brown fox " * 1000
    for kind in ("metaspace BPE", "unigram", "WordPiece"):
        tokenizer = HuggingFaceTokenizer.Config(tokenizer_path=str(folders[kind])).build()
        assert tokenizer.pieces(text, 100) == [text]
