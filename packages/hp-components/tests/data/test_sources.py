"""Where text comes from: what is read, in which order, and what bad input gets."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from hp_components.data import open_corpus
from hp_components.data import sources as sources_module
from hp_components.data.sources import Corpus, FileCorpus, MemoryCorpus, as_corpus
from hp_protocols.errors import ConfigError


def read(path: Path | str, text_key: str = "text") -> list[str]:
    return list(open_corpus(str(path), text_key=text_key).documents())


def faults(path: Path | str, text_key: str = "text") -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(path, text_key)
    return [str(fault) for fault in error.value.faults]


# ---- files and folders ----


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.TXT").write_bytes("\ufeffone\r\ntwo\u2028\rthree\n".encode())
    assert read(tmp_path / "a.TXT") == ["one\ntwo\u2028\rthree\n"]


def test_a_jsonl_line_is_a_document(tmp_path: Path) -> None:
    lines = [
        '\ufeff{"text": "one"}',
        "",
        '{"id": 1, "text": "two\\nlines \\ud83d\\ude42"}\r',
        "  ",
        '{"text": "\u2028"}',
    ]
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode())
    assert read(tmp_path / "a.jsonl") == ["one", "two\nlines 🙂", "\u2028"]


def test_text_key_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 1, "content": "yes"}\n')
    assert read(tmp_path / "a.jsonl", text_key="content") == ["yes"]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = ["b/2.txt", "b.txt", "a/z/1.txt", "a/z.jsonl", "a/10.txt", "a/9.txt"]
    for name in [*files, "a/picture.png", "notes.md", ".hidden.txt", ".git/x.txt", "Makefile", "b/table.csv"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) if name.endswith("l") else name)
    assert read(tmp_path) == ["a/10.txt", "a/9.txt", "a/z/1.txt", "a/z.jsonl", "b/2.txt", "b.txt"]
    assert "6 files are text to read, 6 others are not (1 .csv, 1 .md, 1 .png, 2 hidden, 1 without extension)" in (
        caplog.text
    )


def test_links_are_followed_and_a_loop_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/a.txt").write_text("linked")
    (tmp_path / "data/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/loop").symlink_to(tmp_path / "data")
    (tmp_path / "data/nowhere.txt").symlink_to(tmp_path / "gone.txt")
    os.mkfifo(tmp_path / "data/pipe.txt")
    assert read(tmp_path / "data") == ["linked"]
    assert "2 broken link or special file" in caplog.text


def test_a_missing_path_suggests_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("a")
    (text,) = faults(tmp_path / "corpsu.txt")
    assert text.startswith("dataloader.dataset_path: ")
    assert f"did you mean {tmp_path}/corpus.txt?" in text
    (text,) = faults(tmp_path / "no/such/folder")
    assert f"{tmp_path} exists, 'no' in it does not" in text
    assert "is empty" in faults("")[0]


def test_a_folder_without_text_says_what_it_has(tmp_path: Path) -> None:
    assert "no text in the folder" in faults(tmp_path)[0]
    assert "(it has nothing)" in faults(tmp_path)[0]
    for name in ("a.py", "b.py", "c.csv"):
        (tmp_path / name).write_text("x")
    assert "(it has 2 .py, 1 .csv); allowed: files that end in .txt, .jsonl, .json or .parquet" in faults(tmp_path)[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.csv", ".csv files are not read"),
        ("a.txt.zst", ".zst files are not read"),
        ("a", "cannot tell how"),
        ("a.gz", "cannot tell how"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_name(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_text("x")
    (text,) = faults(tmp_path / name)
    assert message in text
    assert "allowed: a file that ends in .txt, .jsonl, .json or .parquet (also with .gz behind it), or a folder" in text


def test_a_device_is_refused() -> None:
    assert "is no regular file (device)" in faults("/dev/null")[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    assert faults(tmp_path / "a.txt") == [f"{tmp_path}/a.txt: cannot be read: Permission denied"]


# ---- bad content ----


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "is not JSON: Expecting ',' delimiter at column 13"),
        (b"plain text", "is not JSON: Expecting value at column 1"),
        (b'{"text": "a"} x', "is not JSON: Extra data at column 15"),
        (b"{", "this one spreads over lines"),
        (b'["a"]', 'is a JSON array; allowed: an object like {"text": "…"}'),
        (b"null", "is a JSON null"),
        (b'{"text": null}', "'text' is a null; allowed: a string"),
        (b'{"text": ["a"]}', "'text' is a array; allowed: a string"),
        (
            b'{"texts": "a", "n": 1}',
            "has no field 'text' (its fields: 'texts', 'n')\n    → --dataloader.text_key texts",
        ),
        (b'{"body": "a", "n": 1}', "→ --dataloader.text_key body"),
        (b'{"a": "a", "b": "b"}', "→ --dataloader.text_key NAME"),
        (b"{}", "has no field 'text' (its fields: none)"),
        (b'{"text": "\\ud83d!"}', "'text' has half a surrogate pair (\\ud83d) at character 0"),
        (b'{"text": "\xff"}', "byte 0xff at byte offset 28 is not UTF-8"),
        (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "cannot be read as JSON"),
        (b"[" * 200_000, "cannot be read as JSON"),
    ],
)
def test_a_bad_line_is_named_with_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b"\n" + b'{"text": "good"}')
    (text,) = faults(tmp_path / "a.jsonl")
    assert text.startswith(f"{tmp_path}/a.jsonl:3: ")
    assert message in text


def test_ten_bad_lines_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "fine"}\n' + "bad\n" * 7)
    found = faults(tmp_path)
    assert len(found) == 11
    assert [text.split(": ")[0] for text in found[:10]] == [f"{tmp_path}/a.jsonl:{n}" for n in range(2, 9)] + [
        f"{tmp_path}/b.jsonl:{n}" for n in range(2, 5)
    ]
    assert found[10] == f"{tmp_path}: 14 bad places in all; the first 10 are listed"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"abc\xe9def", "byte 0xe9 at byte offset 3 is not UTF-8\n    → save it as UTF-8"),
        (b"\xef\xbb\xbfabc\xe9", "byte 0xe9 at byte offset 6"),
        ("text".encode("utf-16"), "it looks like UTF-16"),
    ],
)
def test_undecodable_bytes_are_named_with_their_offset(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(raw)
    (text,) = faults(tmp_path / "a.txt")
    assert text.startswith(f"{tmp_path}/a.txt: ")
    assert message in text


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n{"text": "2"}\n')
    documents = open_corpus(tmp_path / "a.jsonl").documents()
    next(documents)
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write('{"text": "3"}\n')
    with pytest.raises(ConfigError, match="changed while it was being read"):
        list(documents)


# ---- fingerprints ----


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("some text")
    os.utime(tmp_path / "two/a.txt", (1, 1))
    first = open_corpus(tmp_path / "one").fingerprint
    assert open_corpus(tmp_path / "two").fingerprint == first
    (tmp_path / "two/a.txt").write_text("some texT")
    os.utime(tmp_path / "two/a.txt", (1, 1))
    assert open_corpus(tmp_path / "two").fingerprint != first
    assert open_corpus(tmp_path / "one", text_key="content").fingerprint != first


def test_a_large_corpus_is_known_by_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "CONTENT_HASH_LIMIT", 4)
    path = tmp_path / "a.txt"
    path.write_text("some text")
    first = open_corpus(path).fingerprint
    assert open_corpus(path).fingerprint == first
    os.utime(path, (1, 1))
    assert open_corpus(path).fingerprint != first


def test_documents_in_memory_are_a_corpus() -> None:
    corpus = as_corpus(lambda: ["ab", "c"])
    assert isinstance(corpus, Corpus)
    assert list(corpus.documents()) == list(corpus.documents()) == ["ab", "c"]
    assert corpus.size == 3
    assert corpus.fingerprint == MemoryCorpus(lambda: iter(["ab", "c"])).fingerprint
    assert corpus.fingerprint != MemoryCorpus(lambda: ["a", "bc"]).fingerprint
    with pytest.raises(TypeError, match="use open_corpus"):
        as_corpus("a.txt")
    with pytest.raises(ValueError, match="empty list"):
        as_corpus([])


# ---- the standard library ----


def test_the_default_is_the_standard_librarys_sources() -> None:
    corpus = open_corpus(None)
    assert isinstance(corpus, FileCorpus)
    names = [file.name for file in corpus.files]
    assert {"os.py", "asyncio/tasks.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert not [name for name in names if "test" in name.split("/") or "site-packages" in name]
    documents = list(corpus.documents())
    assert documents[names.index("os.py")] == Path(sysconfig.get_path("stdlib"), "os.py").read_text("utf-8")
    assert 3e6 < sum(map(len, documents)) < 1e8


@pytest.mark.parametrize("moved", ["sysconfig", "both"])
def test_a_standard_library_elsewhere_is_found_or_missed_aloud(tmp_path: Path, moved: str) -> None:
    (tmp_path / "lib/test").mkdir(parents=True)
    (tmp_path / "lib/test/no.py").write_text("x = 1")
    (tmp_path / "lib/b.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    (tmp_path / "lib/a.py").write_text("y = 2\r\n")
    code = f"""
import os, sysconfig
sysconfig.get_path = lambda name: {str(tmp_path / "nowhere")!r}
os.__file__ = {str(tmp_path / ("lib/os.py" if moved == "sysconfig" else "python311.zip/os.pyc"))!r}
from hp_components.data import open_corpus
print(list(open_corpus(None).documents()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if moved == "sysconfig":
        assert result.stdout == "['y = 2\\n', \"# -*- coding: latin-1 -*-\\nx = 'é'\\n\"]\n"
    else:
        assert "is not set, and the running Python has no sources at" in result.stderr
        assert "--dataloader.dataset_path my_text.txt" in result.stderr


def test_what_is_left_out_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "a.txt").write_text("x")
    read(tmp_path)
    assert not caplog.text
