"""prepare: the slow work once, before the ranks start."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hp_components.data import DummyDataLoader, TextDataLoader, build_tokenizer, prepare
from hp_components.data import preparation as preparation_module
from hp_components.data.sources import FileCorpus, standard_library_corpus
from hp_components.tokenizer import CorpusTokenizer, HuggingFaceTokenizer
from hp_protocols.errors import ConfigError


def written(folder: Path) -> dict[Path, int]:
    """Every file of the cache, and when it was written."""
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.suffix != ".lock"}


def test_the_default_trains_on_the_standard_library_once(cache_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    configs = CorpusTokenizer.Config(), TextDataLoader.Config()
    tokenizer = prepare(*configs)
    assert "trained on Python standard library" in caplog.text
    first = written(cache_folder)
    caplog.clear()
    again = prepare(*configs)
    loader = configs[1].build(tokenizer=again, seq_len=128, local_batch_size=8, seed=0)
    batch = next(loader)
    assert not caplog.text
    assert written(cache_folder) == first
    assert again.fingerprint == tokenizer.fingerprint
    assert tokenizer.vocab_size == 2048
    assert "def " in "".join(tokenizer.decode(row) for row in batch["input"].tolist())
    assert loader.num_tokens > 1_000_000
    assert {path.name for path in cache_folder.iterdir()} == {"tokenizers", "tokens"}


def test_loaders_after_prepare_find_everything_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("some text, some more text. " * 100)
    loader = TextDataLoader.Config(dataset_path=str(tmp_path / "a.txt"))
    prepare(CorpusTokenizer.Config(vocab_size=270), loader, cache_dir=tmp_path / "elsewhere")
    caplog.set_level(logging.INFO)
    tokenizer = build_tokenizer(CorpusTokenizer.Config(vocab_size=270), loader, cache_dir=tmp_path / "elsewhere")
    loader.build(tokenizer=tokenizer, seq_len=8, local_batch_size=1, cache_dir=tmp_path / "elsewhere")
    assert not caplog.text


def test_a_tokenizer_from_a_folder_needs_no_corpus(tmp_path: Path) -> None:
    trained = CorpusTokenizer.Config(vocab_size=270).build(corpus=lambda: ["some text"])
    trained.save(tmp_path / "tokenizer")
    config = HuggingFaceTokenizer.Config(tokenizer_path=str(tmp_path / "tokenizer"))
    assert prepare(config, DummyDataLoader.Config()).fingerprint == trained.fingerprint


def test_random_tokens_with_a_trained_tokenizer_train_it_on_the_standard_library(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = standard_library_corpus()
    few = FileCorpus(whole.files[:5], name=whole.name)
    monkeypatch.setattr(preparation_module, "standard_library_corpus", lambda: few)
    caplog.set_level(logging.INFO)
    prepare(CorpusTokenizer.Config(vocab_size=260), DummyDataLoader.Config())
    assert "260 tokens trained on Python standard library" in caplog.text
    assert "tokenising" not in caplog.text


def test_bad_lines_are_found_before_anything_is_kept(tmp_path: Path, cache_folder: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nbad\n{"text": 1}\n')
    loader = TextDataLoader.Config(dataset_path=str(tmp_path / "a.jsonl"))
    with pytest.raises(ConfigError) as error:
        prepare(CorpusTokenizer.Config(vocab_size=260), loader)
    assert [fault.where for fault in error.value.faults] == [f"{tmp_path}/a.jsonl:2", f"{tmp_path}/a.jsonl:3"]
    assert {path.suffix for path in cache_folder.glob("*/*")} == {".lock"}


CHILD = """
import sys
from hp_components.data import TextDataLoader, prepare
from hp_components.data import preparation as preparation_module
from hp_components.data.sources import FileCorpus, standard_library_corpus
from hp_components.tokenizer import CorpusTokenizer
config = TextDataLoader.Config(dataset_path=sys.argv[1])
tokenizer = prepare(CorpusTokenizer.Config(vocab_size=300), config)
loader = config.build(tokenizer=tokenizer, seq_len=16, local_batch_size=4, dp_rank=int(sys.argv[2]), dp_world_size=2)
for _ in range(2):
    print(next(loader)["input"].tolist())
"""


def test_two_ranks_without_a_prepared_cache_agree(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number} of the text\n" for number in range(3000)))
    command = [sys.executable, "-c", CHILD, str(tmp_path / "a.txt")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=os.environ) for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    config = TextDataLoader.Config(dataset_path=str(tmp_path / "a.txt"))
    tokenizer = build_tokenizer(CorpusTokenizer.Config(vocab_size=300), config)
    one = config.build(tokenizer=tokenizer, seq_len=16, local_batch_size=8)
    for parts in zip(*outputs, strict=True):
        together = torch.cat([torch.tensor(eval(part)) for part in parts])
        assert torch.equal(together, next(one)["input"])
