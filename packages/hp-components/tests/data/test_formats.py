"""Every kind of file, packed or not, gives the same documents; what is bad in it is named and, if asked, skipped."""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from hp_components.data import TextDataLoader, files, formats, open_corpus
from hp_components.data.formats import FaultList, Part
from hp_components.tokenizer import BaseTokenizer
from hp_protocols.errors import ConfigError

TEXTS = [
    "plain",
    "two\nlines\r\nof text",
    "",
    "  spaces  ",
    "Füße 你好 🙂 \u2028 \u0085 \u200d \ufeff inside",
    "e\u0301 ﷺ \U0001f1e9\U0001f1ea \x00 \x1b[0m",
    '"quotes" \\ {"text": 1}',
    "x" * 3_000_000,
]


def write(path: Path, texts: list[str]) -> Path:
    """These documents in a file of the kind that its name says."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    records = [{"id": number, "text": text} for number, text in enumerate(texts)]
    if kind == "jsonl":
        raw = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    elif kind == "json":
        raw = json.dumps(records, indent=1).encode()
    elif kind == "parquet":
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), sink, row_group_size=3)
        raw = sink.getvalue().to_pybytes()
    else:
        raw = "".join(texts).encode()
    path.write_bytes(gzip.compress(raw) if path.name.endswith(".gz") else raw)
    return path


def read(path: Any, **options: Any) -> list[str]:
    return list(open_corpus(path if isinstance(path, list) else str(path), **options).documents())


def faults(path: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(path)
    return [str(fault) for fault in error.value.faults]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.JSONL.GZ", "a.json.gz", "a.parquet.gz"])
def test_every_kind_of_record_file_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    path = tmp_path / name.lower()
    write(path, TEXTS)
    path = path.rename(tmp_path / name)
    assert read(path) == TEXTS


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000, 2**22])
def test_a_text_of_any_size_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    monkeypatch.setattr(formats, "CHUNK_BYTES", chunk)
    text = "\ufeffA line\r\nof Füße,\r\r\n 你好\n\n🙂\r" * 3
    write(tmp_path / name, [text])
    corpus = open_corpus(tmp_path / name)
    parts = list(corpus.parts(FaultList("here")))
    assert "".join(part.text for part in parts) == text[1:].replace("\r\n", "\n")
    assert [part.first for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert all(len(part.text) <= chunk + 1 for part in parts)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.txt.gz"])
def test_an_empty_file_is_no_document_or_an_empty_one(tmp_path: Path, name: str) -> None:
    for raw in (b"", b"\xef\xbb\xbf"):
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
        assert read(tmp_path / name) == ([""] if ".txt" in name else [])
    (tmp_path / "b.txt").write_text("text")
    assert read(tmp_path)[-1] == "text"


@pytest.mark.parametrize("chunk", [1, 5, 64, 2**22])
@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "one"}, {"text": "two", "n": [1, {"a": 2}]}]',
        '\ufeff[\r\n  {\r\n    "text": "one"\r\n  },\r\n  {"text": "two"}\r\n]\r\n',
        '{"text": "one"}\n{"text": "two"}',
        '{\n "text": "one"\n}\n\n{"text": \n"two"}\n',
        '{"text": "o\\u006ee"}{"text":"two"}',
    ],
)
def test_a_json_file_is_an_array_or_objects_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, chunk: int
) -> None:
    monkeypatch.setattr("hp_components.data.json_stream.CHUNK_BYTES", chunk)
    (tmp_path / "a.json").write_bytes(content.encode())
    assert read(tmp_path / "a.json") == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "line", "message", "good"),
    [
        ('[\n{"text": "a"},\n{"text": 1},\n{"text": "b"}\n]', 3, "'text' is a number", ["a", "b"]),
        ('[\n{"text": "a"},\n"b"]', 3, "is a JSON string", ["a"]),
        (
            '[\n{"text": "a"},\n{"text" "b"},\n{"text": "c"}]',
            3,
            "is not JSON: Expecting ':' delimiter at column 9",
            ["a"],
        ),
        ('[\n{"text": "a"}\n{"text": "b"}]', 3, "has '{' behind an element of the array; allowed: a comma or ]", ["a"]),
        ('[{"text": "a"},', 1, "is not JSON: Expecting value", ["a"]),
        ('[{"text": "a"}', 1, "ends within the array", ["a"]),
        ('[{"text": "a"}] x', 1, "goes on behind the end of the array", ["a"]),
        ('{"text": "a"}\n{"text": }\n{"text": "b"}', 2, "is not JSON: Expecting value at column 10", ["a", "b"]),
        ('{"text": "a"}\nplain\n{"text": "b"}', 2, "is not JSON: Expecting value at column 1", ["a", "b"]),
        ('{"text": "a"}\n{"text": "b', 2, "is not JSON: Unterminated string", ["a"]),
        ("[" * 200_000, 1, "cannot be read as JSON", []),
    ],
)
@pytest.mark.parametrize("chunk", [3, 2**22])
def test_a_bad_place_in_a_json_file_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, line: int, message: str, good: list[str], chunk: int
) -> None:
    monkeypatch.setattr("hp_components.data.json_stream.CHUNK_BYTES", chunk)
    (tmp_path / "a.json").write_text(content)
    (text,) = faults(tmp_path / "a.json")
    assert text.startswith(f"{tmp_path}/a.json:{line}: ")
    assert message in text
    assert read(tmp_path / "a.json", on_bad_line="skip") == good


def test_bad_bytes_and_rows_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'[{"text": "\xff"}]')
    assert "byte 0xff at byte offset 11 is not UTF-8" in faults(tmp_path / "a.json")[0]
    table = pyarrow.Table.from_pylist([{"text": "a"}, {"text": None}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert faults(tmp_path / "a.parquet") == [f"{tmp_path}/a.parquet: row 2: 'text' is a null; allowed: a string"]
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    assert "cannot be read as Parquet" in faults(tmp_path / "a.parquet")[0]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.json.gz", "a.parquet.gz"])
@pytest.mark.parametrize("damage", ["cut short", "no gzip"])
def test_a_damaged_gzip_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = write(tmp_path / name, TEXTS)
    path.write_bytes(path.read_bytes()[:-20] if damage == "cut short" else b"some text")
    assert any(f"{path}: is damaged as a gzip file" in text for text in faults(path))


def test_a_gzip_file_of_another_name_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"text"))
    assert "it looks like a gzip file: name it so that it ends in .gz" in faults(tmp_path / "a.txt")[0]


def test_a_bad_byte_far_into_a_text_is_found_before_any_of_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "CHUNK_BYTES", 10)
    (tmp_path / "a.txt").write_bytes(b"0123456789" * 3 + b"\xe4\xbd" + b"x" * 20)
    assert "byte 0xe4 at byte offset 30" in faults(tmp_path / "a.txt")[0]
    found = FaultList("here", "skip")
    assert list(open_corpus(tmp_path / "a.txt").parts(found)) == []
    assert found.total == 1


def test_bad_lines_are_skipped_counted_and_told_on_every_build(
    tmp_path: Path, letters: BaseTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    lines = ['{"text": "abc"}', "bad", '{"text": 3}', *["worse"] * 20, '{"text": "de"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = TextDataLoader.Config(dataset_path=str(tmp_path / "a.jsonl"), on_bad_line="skip", shuffle=False)
    for _ in range(2):  # tokenised now, and from the cache
        caplog.clear()
        loader = config.build(tokenizer=letters, seq_len=9, local_batch_size=1)
        assert next(loader)["input"].tolist() == [[0, 2, 3, 4, 1, 0, 5, 6, 1]]
        assert loader.skipped.total == 22
        assert caplog.text.count("22 bad places skipped") == 1
        assert f"{tmp_path}/a.jsonl:2: is not JSON" in caplog.text
        assert "… and 12 more" in caplog.text
    config.on_bad_line = "error"
    with pytest.raises(ConfigError, match="22 bad places in all"):
        config.build(tokenizer=letters, seq_len=9, local_batch_size=1)


def test_a_state_goes_on_where_the_text_with_its_bad_lines_was_moved(tmp_path: Path, letters: BaseTokenizer) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\nbad\n')
    states = []
    for name in ("a.jsonl", "b.jsonl"):
        config = TextDataLoader.Config(dataset_path=str(tmp_path / name), on_bad_line="skip")
        # Its own cache: what is kept there says where the bad lines were when it was made.
        loader = config.build(tokenizer=letters, seq_len=4, local_batch_size=1, cache_dir=tmp_path / f"cache {name}")
        states.append(loader.state_dict())
        if name == "a.jsonl":
            (tmp_path / name).rename(tmp_path / "b.jsonl")
        assert f"{name}:2" in loader.skipped.first[0]
    assert states[0] == states[1]


def test_nothing_but_bad_lines_is_an_error_under_both_policies(tmp_path: Path, letters: BaseTokenizer) -> None:
    (tmp_path / "a.jsonl").write_text("bad\n")
    config = TextDataLoader.Config(dataset_path=str(tmp_path / "a.jsonl"), on_bad_line="skip")
    with pytest.raises(ConfigError, match=r"has no text; 1 bad places skipped:\n.*a.jsonl:1: is not JSON"):
        config.build(tokenizer=letters, seq_len=9, local_batch_size=1)


# ---- which files ----


def test_globs_and_several_paths_are_read_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("b/2.txt", "b/10.txt", "a/x/1.txt", "c[1].txt", "b/picture.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path / "b/*.txt") == ["b/10.txt", "b/2.txt"]
    assert read(tmp_path / "**/*.txt") == ["a/x/1.txt", "b/10.txt", "b/2.txt", "c[1].txt"]
    assert read(tmp_path / "**") == ["a/x/1.txt", "b/10.txt", "b/2.txt", "c[1].txt"]
    assert read(tmp_path / "[ab]") == ["a/x/1.txt", "b/10.txt", "b/2.txt"]
    assert "1 others are not (1 .png)" in caplog.text
    assert read(tmp_path / "c[1].txt") == ["c[1].txt"]  # what is there is meant as it is
    caplog.clear()
    several = [str(tmp_path / "b/2.txt"), str(tmp_path / "a"), str(tmp_path / "b/*.txt")]
    assert read(several) == ["b/2.txt", "a/x/1.txt", "b/10.txt"]
    assert "1 files are given more than once and read once" in caplog.text


def test_each_path_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    given = [str(tmp_path / name) for name in ("a.txt", "b.txt", "*.jsonl", "no/where")]
    found = faults(given)
    assert len(found) == 3
    assert "'" + given[1] + "' does not exist" in found[0]
    assert "matches nothing" in found[1]
    assert faults([]) == ["dataloader.dataset_path: is an empty list; allowed: paths, folders or globs"]


def test_a_packed_corpus_is_another_corpus_and_counts_as_larger(tmp_path: Path) -> None:
    plain, packed = write(tmp_path / "a.txt", ["a" * 999]), write(tmp_path / "b.txt.gz", ["a" * 999])
    corpora = open_corpus(plain), open_corpus(packed)
    assert corpora[0].fingerprint != corpora[1].fingerprint
    assert corpora[1].size == 3 * packed.stat().st_size
    assert files.EXTENSIONS == (".txt", ".jsonl", ".json", ".parquet")


def test_parquet_without_its_extra_says_what_to_install(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["text"])
    code = f"""
import sys
sys.modules["pyarrow"] = None
from hp_components.data import open_corpus
list(open_corpus({str(tmp_path / "a.parquet")!r}).documents())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    last = result.stderr.strip().splitlines()[-1]
    assert last == (
        "hp_protocols.errors.MissingExtraError: reading .parquet files needs pyarrow: "
        'pip install "hp-components[parquet]"'
    )


def test_a_part_is_a_whole_document_unless_it_says_otherwise() -> None:
    assert Part("a") == ("a", True, True)


def test_a_text_without_a_line_end_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "a.jsonl").write_text('{"text": "no line feed behind it"}')
    (tmp_path / "b.txt").write_text("nor here")
    assert read(tmp_path) == ["no line feed behind it", "nor here"]
    assert not caplog.text
