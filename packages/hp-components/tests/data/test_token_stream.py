"""The kept token stream: right, made once, whole or not there, and made again when damaged."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from hp_components.data import open_corpus
from hp_components.data import token_stream as token_stream_module
from hp_components.data import tokenising as tokenising_module
from hp_components.data.sources import MemoryCorpus
from hp_components.data.tokenising import tokenise
from hp_components.tokenizer import BaseTokenizer, CorpusTokenizer
from hp_protocols.errors import ConfigError

DOCUMENTS = ["abc", "", "d", "1", "efghij" * 50]


def corpus() -> MemoryCorpus:
    return MemoryCorpus(lambda: DOCUMENTS, name="five documents")


def kept(cache_folder: Path) -> Path:
    (file,) = cache_folder.glob("tokens/*.tokens")
    return file


def replace(file: Path, content: bytes) -> None:
    # As a new file: a stream that is open has mapped the old one.
    file.unlink()
    file.write_bytes(content)


def test_the_stream_is_every_document_with_bos_and_eos(
    letters: BaseTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stream = tokenise(corpus(), letters)
    expected = [letters.encode(text, add_bos=True, add_eos=True) for text in ("abc", "d", "efghij" * 50)]
    assert stream.tokens.tolist() == [token for ids in expected for token in ids]
    assert stream.starts.tolist() == [0, 5, 8]
    assert "five documents: 2 empty documents left out" in caplog.text
    assert "3 documents, 310 tokens" in caplog.text


@pytest.mark.parametrize(("size", "dtype"), [(28, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32")])
def test_tokens_take_two_bytes_where_they_can(
    letters_config: type[BaseTokenizer.Config], size: int, dtype: str
) -> None:
    stream = tokenise(corpus(), letters_config(size=size).build())
    assert stream.tokens.dtype == np.dtype(dtype)
    assert stream.tokens[:3].tolist() == [0, 2, 3]


def test_bos_and_eos_that_a_text_spells_out_are_not_doubled(tmp_path: Path) -> None:
    from hp_components.tokenizer import HuggingFaceTokenizer

    trained = CorpusTokenizer.Config(vocab_size=260).build(corpus=lambda: ["some text"])
    trained.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|bos|>", "eos_token": "<|eos|>"}')
    tokenizer = HuggingFaceTokenizer.Config(tokenizer_path=str(tmp_path)).build()
    stream = tokenise(MemoryCorpus(lambda: ["<|bos|>a<|eos|>", "a"]), tokenizer)
    (a,) = tokenizer.encode("a")
    assert stream.tokens.tolist() == [0, a, 1, 0, a, 1]


def test_a_corpus_of_many_batches_is_that_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenising_module, "BATCH_CHARACTERS", 20_000)
    monkeypatch.setattr(tokenising_module, "PIECE_CHARACTERS", 3_000)
    files = open_corpus(None).files[::40]
    texts = [file.path.read_text("utf-8") for file in files]
    texts.append("\n\n\n".join(texts))
    tokenizer = CorpusTokenizer.Config(vocab_size=600).build(corpus=lambda: texts)
    stream = tokenise(MemoryCorpus(lambda: texts), tokenizer)
    tokenizer.save(tmp_path)
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = [[0, *library.encode(text).ids, 1] for text in texts if text]
    assert stream.tokens.tolist() == [token for ids in expected for token in ids]
    assert stream.starts.tolist() == np.cumsum([0, *map(len, expected)])[:-1].tolist()


def test_the_second_time_nothing_is_done(
    letters: BaseTokenizer, cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = tokenise(corpus(), letters)
    before = kept(cache_folder).stat()
    caplog.set_level(logging.INFO)
    second = tokenise(corpus(), letters)
    assert second.digest == first.digest
    assert np.array_equal(second.tokens, first.tokens)
    assert kept(cache_folder).stat() == before
    assert not caplog.text


def test_another_corpus_or_tokenizer_is_another_stream(
    letters: BaseTokenizer, letters_config: type[BaseTokenizer.Config]
) -> None:
    digests = {
        tokenise(corpus(), letters).digest,
        tokenise(corpus(), letters_config(with_bos=False).build()).digest,
        tokenise(MemoryCorpus(lambda: [*DOCUMENTS[:-1], "x"]), letters).digest,
        # The same tokens, but other documents.
        tokenise(MemoryCorpus(lambda: ["ab"]), letters_config(with_bos=False, with_eos=False).build()).digest,
        tokenise(MemoryCorpus(lambda: ["a", "b"]), letters_config(with_bos=False, with_eos=False).build()).digest,
    }
    assert len(digests) == 5


def test_every_kind_of_damage_is_noticed_and_mended(
    letters: BaseTokenizer, cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = tokenise(corpus(), letters)
    whole = kept(cache_folder).read_bytes()
    damaged = [whole[:length] for length in (0, 10, 40, len(whole) // 2, len(whole) - 1)]
    damaged += [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in range(0, len(whole), 7)]
    damaged += [whole + b"x", whole[:-70] + whole[-64:]]
    for content in damaged:
        replace(kept(cache_folder), content)
        caplog.clear()
        mended = tokenise(corpus(), letters)
        assert np.array_equal(mended.tokens, first.tokens)
        assert np.array_equal(mended.starts, first.starts)
        assert "are damaged" in caplog.text
        assert kept(cache_folder).read_bytes() == whole


def test_a_large_file_is_checked_in_parts(
    letters: BaseTokenizer, cache_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_stream_module, "BLOCK_BYTES", 64)
    monkeypatch.setattr(token_stream_module, "CHECKED_BLOCKS", 3)
    tokenise(corpus(), letters)
    whole = kept(cache_folder).read_bytes()
    for place in (0, 20, 650):  # in the first and the last block of 11
        replace(kept(cache_folder), whole[:place] + b"\xff" + whole[place + 1 :])
        caplog.clear()
        tokenise(corpus(), letters)
        assert "are damaged" in caplog.text


def test_no_text_at_all_is_an_error_and_leaves_nothing(letters: BaseTokenizer, cache_folder: Path) -> None:
    with pytest.raises(ConfigError, match="nothing: has no text"):
        tokenise(MemoryCorpus(list, name="nothing"), letters)
    with pytest.raises(ConfigError, match="has no text: its 2 documents are empty"):
        tokenise(MemoryCorpus(lambda: ["", "123"]), letters)
    assert {path.suffix for path in cache_folder.glob("tokens/*")} == {".lock"}


def test_a_bad_line_leaves_nothing(letters: BaseTokenizer, cache_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nbad\n')
    with pytest.raises(ConfigError, match=r"a.jsonl:2: is not JSON"):
        tokenise(open_corpus(tmp_path / "a.jsonl"), letters)
    assert [path.suffix for path in cache_folder.glob("tokens/*")] == [".lock"]


def test_a_cache_that_cannot_be_written_says_what_to_do(
    letters: BaseTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HP_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set HP_CACHE_DIR to another folder"):
        tokenise(corpus(), letters)


def test_a_full_disk_is_an_error_and_leaves_nothing(letters: BaseTokenizer, cache_folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(ConfigError, match="cannot write the cache: File too large"):
            tokenise(corpus(), letters)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.suffix for path in cache_folder.glob("tokens/*")] == [".lock"]
    assert len(tokenise(corpus(), letters).tokens) == 310


CHILD = """
import logging, sys, time
logging.basicConfig(level=logging.INFO)
from hp_components.data.sources import MemoryCorpus
from hp_components.data.tokenising import tokenise
from hp_components.tokenizer import CorpusTokenizer

def documents():
    for index in range(200):
        yield "some text to be tokenised, some more of it " * 100
        if slow and index == 100:
            print("half", flush=True)
            time.sleep(60)

slow = False
tokenizer = CorpusTokenizer.Config(vocab_size=300).build(corpus=documents)
corpus = MemoryCorpus(documents)
corpus.fingerprint
slow = sys.argv[1] == "slow"
print(tokenise(corpus, tokenizer).digest)
"""


@pytest.fixture
def child() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(children: list[subprocess.Popen[str]], mode: str) -> subprocess.Popen[str]:
    children.append(
        subprocess.Popen(
            [sys.executable, "-c", CHILD, mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
    )
    return children[-1]


def test_processes_at_once_work_once_and_agree(child: list[subprocess.Popen[str]]) -> None:
    for _ in range(3):
        start(child, "fast")
    outputs = [process.communicate(timeout=60) for process in child]
    assert [process.returncode for process in child] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert sum("tokenising" in err for _, err in outputs) == 1


def test_a_killed_process_leaves_nothing_that_counts_and_nothing_for_long(
    child: list[subprocess.Popen[str]], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenising_module, "BATCH_CHARACTERS", 1000)
    killed = start(child, "slow")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "half\n"
    # The next one waits for it, and takes over when it dies.
    waiting = start(child, "fast")
    assert waiting.stderr is not None
    while "waiting for another process" not in (line := waiting.stderr.readline()):
        assert line, "it did not wait"
    # Looked at before the kill: the one that waits takes over, and tidies up, at once.
    assert list(cache_folder.glob("tokens/*.tmp"))
    assert not list(cache_folder.glob("tokens/*.tokens"))
    killed.kill()
    killed.wait()
    _, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, err
    assert len(list(cache_folder.glob("tokens/*.tokens"))) == 1
    assert not list(cache_folder.glob("tokens/*.tmp"))


MEMORY = """
import resource, sys
from dataclasses import dataclass
from hp_components.data import open_corpus
from hp_components.data.tokenising import tokenise
from hp_components.tokenizer import BaseTokenizer

class Fourths(BaseTokenizer):
    "A token for every four characters, worked out at once; a text may be cut anywhere."

    bos_id = eos_id = None
    vocab_size, fingerprint = 10, "fourths"

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config): ...
    def encode(self, text, *, add_bos=None, add_eos=None): return [3] * (len(text) // 4)
    def decode(self, ids, *, skip_special_tokens=True): return ""
    def save(self, folder): ...
    def pieces(self, text, length): return [text[at : at + 2**16] for at in range(0, len(text), 2**16)] or [""]

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak()
stream = tokenise(open_corpus(sys.argv[1]), Fourths.Config().build())
print(peak() - before, len(stream.tokens), len(stream.starts))
"""


def test_a_large_text_is_never_in_memory(tmp_path: Path) -> None:
    megabytes = 160
    with open(tmp_path / "a.txt", "wb") as file:
        for _ in range(megabytes):
            file.write(b"some text, " * 95325 + b"\n")
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "a.txt")], capture_output=True, text=True, timeout=120
    )
    growth, tokens, documents = result.stdout.split()
    assert int(tokens) > megabytes * 2**20 / 4 * 0.99
    assert documents == "1"
    # Tokens of 80 MB are written meanwhile, and the map of them is read once to check it.
    assert float(growth) < megabytes
