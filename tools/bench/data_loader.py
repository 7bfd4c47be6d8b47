"""Tokens per second of TextDataLoader beside `datasets` and a hand-written packing loop, paired in one process.

In: options below. Out: medians and their ratios for three things: cold (from the files to the end of an epoch,
tokenising included, empty caches), warm (the same with full caches) and steady (the epoch alone). Both use one worker
process, one tokenizer and one corpus; rounds alternate, so that a machine whose speed drifts treats both alike.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import datasets
import transformers
from torch.utils.data import DataLoader

from hp_components import CorpusTokenizer, TextDataLoader
from hp_components.data import open_corpus

ROWS = 8


def write_corpus(path: Path, megabytes: float) -> None:
    """The standard library's sources as JSON lines, again and again with a number in front, up to this size."""
    texts, written, number = list(open_corpus(None).documents()), 0, 0
    with open(path, "w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            line = json.dumps({"text": f"# {number}\n{texts[number % len(texts)]}"}) + "\n"
            file.write(line)
            written, number = written + len(line), number + 1


def count(batches: Iterable[dict]) -> int:
    return sum(batch["input"].numel() for batch in batches)


def ours(corpus: Path, tokenizer: CorpusTokenizer, cache: Path, seq_len: int) -> Callable[[], Iterable[dict]]:
    def build() -> Iterable[dict]:
        config = TextDataLoader.Config(dataset_path=str(corpus), epochs=1, num_workers=1)
        return config.build(tokenizer=tokenizer, seq_len=seq_len, local_batch_size=ROWS, cache_dir=cache / "ours")

    return build


def theirs(corpus: Path, folder: Path, cache: Path, seq_len: int) -> Callable[[], Iterable[dict]]:
    """As the examples of the libraries do it: load, tokenise, concatenate and cut, each cached, then a DataLoader."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def tokenise(rows: dict) -> dict:
        ids = tokenizer(rows["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return {"ids": [[tokenizer.bos_token_id, *one, tokenizer.eos_token_id] for one in ids]}

    def pack(rows: dict) -> dict:
        stream = [token for ids in rows["ids"] for token in ids]
        cuts = range(0, len(stream) - seq_len, seq_len)
        return {
            "input": [stream[cut : cut + seq_len] for cut in cuts],
            "labels": [stream[cut + 1 : cut + seq_len + 1] for cut in cuts],
        }

    def build() -> Iterable[dict]:
        dataset = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(cache / "theirs"))
        dataset = dataset.map(tokenise, batched=True, remove_columns=["text"]).map(
            pack, batched=True, remove_columns=["ids"]
        )
        return DataLoader(dataset.with_format("torch"), batch_size=ROWS, shuffle=True, num_workers=1)

    return build


def measure(build: Callable[[], Iterable[dict]]) -> tuple[float, float]:
    """Tokens per second from building on, and of the epoch alone."""
    started = time.perf_counter()
    batches = build()
    built = time.perf_counter()
    tokens = count(batches)
    ended = time.perf_counter()
    return tokens / (ended - started), tokens / (ended - built)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=24)
    parser.add_argument("--seq-len", type=int, default=1024)
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    logging.getLogger("hp_components").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ["HP_CACHE_DIR"] = str(root / "tokenizer-cache")
        write_corpus(root / "corpus.jsonl", arguments.megabytes)
        tokenizer = CorpusTokenizer.Config(vocab_size=2048).build(corpus=open_corpus(root / "corpus.jsonl"))
        tokenizer.save(root / "tokenizer")
        sides = {
            "TextDataLoader": ours(root / "corpus.jsonl", tokenizer, root / "cache", arguments.seq_len),
            "datasets": theirs(root / "corpus.jsonl", root / "tokenizer", root / "cache", arguments.seq_len),
        }
        rates: dict[str, dict[str, list[float]]] = {what: {side: [] for side in sides} for what in RATES}
        for number in range(arguments.rounds + 1):
            shutil.rmtree(root / "cache", ignore_errors=True)
            for side, build in sides.items():
                cold, _ = measure(build)
                warm, steady = measure(build)
                if number:  # the first round warms up: imports, the page cache
                    for what, rate in zip(RATES, (cold, warm, steady), strict=True):
                        rates[what][side].append(rate)
    report(rates)


RATES = ("cold", "warm", "steady")


def report(rates: dict[str, dict[str, list[float]]]) -> None:
    for what, sides in rates.items():
        ratios = [mine / other for mine, other in zip(*sides.values(), strict=True)]
        medians = ", ".join(f"{side} {statistics.median(values) / 1e6:.2f}" for side, values in sides.items())
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        print(f"{what:7} M tokens/s: {medians}; ratio {middle:.2f} (from {low:.2f} to {high:.2f}, {len(ratios)} pairs)")


if __name__ == "__main__":
    main()
