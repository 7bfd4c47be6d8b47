"""Data in a whole run: workers that die, the sources a user has, and fine-tuning that goes on under other ranks."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import time
from pathlib import Path

from harness import PATIENCE, RECIPE, SMALL, Hp, descendants, losses, records, wait_for

SFT = (*RECIPE[:-1], "qwen3_5_v2_debugmodel_sft", *SMALL, "--tokenizer.vocab_size", "300")


def test_a_killed_data_worker_ends_the_run_with_an_error_and_no_hang(hp: Hp) -> None:
    options = [*SMALL, "--dump_folder", "run", "--training.steps", "100000", "--dataloader.num_workers", "1"]
    run = hp.start("train", *RECIPE, *options)
    wait_for(lambda: (hp.cwd / "run" / "metrics.jsonl").exists() and len(records(hp.cwd / "run")) > 1)
    (worker,) = descendants(run.pid)
    os.kill(worker, signal.SIGKILL)
    killed = time.monotonic()
    _, err = run.communicate(timeout=PATIENCE)
    assert time.monotonic() - killed < 60
    assert run.returncode == 1
    assert "DataLoader worker" in err


def test_packed_files_and_globs_train_as_the_plain_file_does(hp: Hp) -> None:
    text = "pack my box with five dozen jugs " * 400
    lines = [json.dumps({"text": f"{number} {text}"}) + "\n" for number in range(6)]
    (hp.cwd / "plain.jsonl").write_text("".join(lines))
    (hp.cwd / "packed").mkdir()
    for number in range(3):
        raw = "".join(lines[2 * number : 2 * number + 2]).encode()
        (hp.cwd / f"packed/{number}.jsonl.gz").write_bytes(gzip.compress(raw))
    paths = {"run-plain": "plain.jsonl", "run-packed": "[packed/0.jsonl.gz,packed/*.gz]"}
    for run, path in paths.items():
        options = ["--training.steps", "3", "--tokenizer.vocab_size", "300", "--dataloader.dataset_path", path]
        done = hp.train(*SMALL, *options, "--dump_folder", run)
        assert done.code == 0, done.text
    # The sample that the tokenizer is trained on is all of so small a text.
    assert losses(hp.cwd / "run-packed") == losses(hp.cwd / "run-plain")


def write_chats(path: Path) -> None:
    rng, words = random.Random(0), ["red", "green", "blue", "apple", "leaf", "sky"]
    chats = []
    for _ in range(60):
        text = " ".join(rng.choices(words, k=rng.randint(1, 6)))
        chats.append({"prompt": f"repeat {text}", "response": text})
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats) + "bad\n")


def test_fine_tuning_goes_on_under_another_number_of_ranks(hp: Hp) -> None:
    write_chats(hp.cwd / "chats.jsonl")
    options = ["--dataloader.dataset_path", "chats.jsonl", "--dataloader.form", "prompt_response"]
    options += ["--dataloader.on_bad_line", "skip", "--dump_folder", "run", "--nproc", "2", "--training.steps", "5"]
    begun = hp("train", *SFT, *options)
    assert begun.code == 0, begun.text
    done = hp("train", "run/resolved.yaml", "--training.steps", "12")
    assert done.code == 0, done.text
    found = records(hp.cwd / "run")
    assert [record["step"] for record in found] == list(range(1, 13))
    assert found[-1]["loss"] < found[0]["loss"]
    # Told once by each start, and not by every rank.
    assert (hp.cwd / "run/metrics.jsonl").read_text().count("bad_lines_skipped") == 2
    assert begun.err.count("1 bad places skipped") == done.err.count("1 bad places skipped") == 1
    assert "chats.jsonl:61: is not JSON" in done.err
