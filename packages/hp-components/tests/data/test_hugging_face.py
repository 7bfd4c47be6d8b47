"""Datasets of the library `datasets`: the same rows as from files, the same contract, clear refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from hp_components.data import HuggingFaceTextDataLoader, TextDataLoader, prepare
from hp_components.data.formats import FaultList
from hp_components.tokenizer import BaseTokenizer, CorpusTokenizer
from hp_protocols.errors import ConfigError

TEXTS = ["abc", "defgh" * 7, "", "ijk", "Füße 🙂"] * 9


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    datasets.disable_progress_bars()


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    lines = [json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    return tmp_path / "a.jsonl"


def rows(config: Any, tokenizer: BaseTokenizer, count: int = 12, state: Any = None, **place: int) -> list[Any]:
    loader = config.build(tokenizer=tokenizer, seq_len=8, seed=3, **{"local_batch_size": 4, **place})
    if state is not None:
        loader.load_state_dict(state)
    found = [torch.stack(list(next(loader).values()), dim=1) for _ in range(count)]
    return [torch.cat(found), loader.state_dict()]


@pytest.mark.parametrize("source", ["json", "parquet", "saved", "saved splits", "folder"])
def test_the_rows_are_those_of_the_same_text_in_a_file(
    jsonl: Path, tmp_path: Path, letters: BaseTokenizer, source: str
) -> None:
    expected, _ = rows(TextDataLoader.Config(dataset_path=str(jsonl)), letters)
    dataset = datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS})
    given: dict[str, Any] = {"dataset": str(tmp_path / "ds")}
    if source == "json":
        given = {"dataset": "json", "data_files": str(jsonl)}
    elif source == "parquet":
        dataset.to_parquet(str(tmp_path / "a.parquet"))
        given = {"dataset": "parquet", "data_files": [str(tmp_path / "*.parquet")]}
    elif source == "saved":
        dataset.save_to_disk(str(tmp_path / "ds"))
    elif source == "saved splits":
        splits = datasets.DatasetDict({"train": dataset, "test": dataset.select([0])})
        splits.save_to_disk(str(tmp_path / "ds"))
    else:
        (tmp_path / "ds").mkdir()
        jsonl.rename(tmp_path / "ds/a.jsonl")
    found, _ = rows(HuggingFaceTextDataLoader.Config(**given), letters)
    assert torch.equal(found, expected)


def test_a_state_goes_on_under_another_number_of_ranks(jsonl: Path, letters: BaseTokenizer) -> None:
    config = HuggingFaceTextDataLoader.Config(dataset="json", data_files=str(jsonl))
    whole, _ = rows(config, letters, 12)
    _, state = rows(config, letters, 5)
    ranks = [rows(config, letters, 7, state, local_batch_size=2, dp_rank=r, dp_world_size=2)[0] for r in range(2)]
    together = torch.cat([part for pair in zip(*(rank.split(2) for rank in ranks), strict=True) for part in pair])
    assert torch.equal(together, whole[20:])


def test_fingerprints_tell_parts_of_a_dataset_apart(jsonl: Path) -> None:
    def corpus(**given: Any) -> Any:
        return HuggingFaceTextDataLoader.Config(dataset="json", data_files=str(jsonl), **given).open_corpus()

    assert corpus().fingerprint == corpus().fingerprint
    prints = {corpus(split=split).fingerprint for split in ("train", "train[:5]", "train[5:10]", "train[10:15]")}
    assert len(prints) == 4
    assert list(corpus(split="train[3:5]").documents()) == TEXTS[3:5]


def test_a_tokenizer_is_trained_on_a_dataset(jsonl: Path) -> None:
    config = HuggingFaceTextDataLoader.Config(dataset="json", data_files=str(jsonl))
    tokenizer = prepare(CorpusTokenizer.Config(vocab_size=262), config)
    assert (
        tokenizer.fingerprint
        == prepare(CorpusTokenizer.Config(vocab_size=262), TextDataLoader.Config(dataset_path=str(jsonl))).fingerprint
    )


def test_rows_without_text_are_named_or_skipped(tmp_path: Path, letters: BaseTokenizer) -> None:
    datasets.Dataset.from_dict({"text": ["a", None, "b"]}).save_to_disk(str(tmp_path / "ds"))
    config = HuggingFaceTextDataLoader.Config(dataset=str(tmp_path / "ds"))
    with pytest.raises(ConfigError, match=r"\(train\): row 2: 'text' is a null; allowed: a string"):
        config.build(tokenizer=letters, seq_len=4, local_batch_size=1)
    config.on_bad_line = "skip"
    loader = config.build(tokenizer=letters, seq_len=6, local_batch_size=1)
    assert next(loader)["input"].tolist() == [[0, 2, 1, 0, 3, 1]]
    assert loader.skipped.total == 1
    records = list(config.open_corpus().records(FaultList("here")))
    assert [record.value["text"] for record in records] == ["a", None, "b"]


def test_a_missing_column_lists_those_there_are(jsonl: Path) -> None:
    config = HuggingFaceTextDataLoader.Config(dataset="json", data_files=str(jsonl), text_key="texts")
    with pytest.raises(ConfigError, match=r"no column 'texts' \(its columns: 'id', 'text'\)\n.*text_key text"):
        config.open_corpus()


def test_what_cannot_be_loaded_is_refused_with_the_librarys_words(jsonl: Path, tmp_path: Path) -> None:
    def refusal(**given: Any) -> str:
        with pytest.raises(ConfigError) as error:
            HuggingFaceTextDataLoader.Config(**given).open_corpus()
        return str(error.value)

    assert "Unable to find" in refusal(dataset="json", data_files=str(tmp_path / "nowhere.jsonl"))
    assert 'Unknown split "test"' in refusal(dataset="json", data_files=str(jsonl), split="test")
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n{"text": ')
    assert "'json' cannot be loaded" in refusal(dataset="json", data_files=str(tmp_path / "bad.jsonl"))
    datasets.DatasetDict({"a": datasets.Dataset.from_dict({"text": ["x"]})}).save_to_disk(str(tmp_path / "ds"))
    assert "has no split 'train'; allowed: a" in refusal(dataset=str(tmp_path / "ds"))
    assert "is a saved dataset, which has none" in refusal(dataset=str(tmp_path / "ds"), subset="x")


def test_values_that_cannot_be_are_told_at_once() -> None:
    config = HuggingFaceTextDataLoader.Config(streaming=True, num_workers=-1)
    faults = [str(fault) for fault in config.faults("dataloader")]
    assert [fault.split(":")[0] for fault in faults] == [
        "dataloader.num_workers",
        "dataloader.dataset",
        "dataloader.streaming",
    ]
    assert "no order of rows that goes on under another number of ranks" in faults[-1]
    (fault,) = HuggingFaceTextDataLoader.Config(dataset="json").faults("dataloader")
    assert str(fault) == "dataloader.data_files: is not set, and 'json' reads files"


def test_without_a_connection_or_the_library_it_says_so(tmp_path: Path) -> None:
    code = """
import sys
if sys.argv[1] == "no library":
    sys.modules["datasets"] = None
from hp_components.data import HuggingFaceTextDataLoader
HuggingFaceTextDataLoader.Config(dataset="some-one/some-data").open_corpus()
"""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    words = [
        subprocess.run([sys.executable, "-c", code, what], capture_output=True, text=True, env=environ, timeout=60)
        for what in ("no connection", "no library")
    ]
    assert "dataloader.dataset: 'some-one/some-data' cannot be loaded" in words[0].stderr
    assert "needs a connection to it, or its copy in this machine's cache" in words[0].stderr
    assert 'HuggingFaceTextDataLoader needs datasets: pip install "hp-components[hf-datasets]"' in words[1].stderr
