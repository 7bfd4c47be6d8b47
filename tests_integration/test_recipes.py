"""A recipe of a published size, made small by the edit that a user makes: its layout trains on real processes."""

from __future__ import annotations

import pytest
import yaml
from harness import Hp, records

RECIPE_4B = ("--module", "qwen3_5_v2", "--config", "qwen3_5_v2_4b_tp2_fsdp4")


@pytest.fixture
def tokenizer(hp: Hp) -> str:
    """A tokenizer folder as a published model has one, and text beside it."""
    from hp_components import CorpusTokenizer, TextDataLoader
    from hp_components.data import build_tokenizer

    text = hp.cwd / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 400)
    data = TextDataLoader.Config(dataset_path=str(text))
    build_tokenizer(CorpusTokenizer.Config(vocab_size=290), data, cache_dir=hp.cwd / "c").save(hp.cwd / "hf")
    return "hf"


def test_a_size_trains_as_another_flavour_with_the_recipes_options(hp: Hp, tokenizer: str) -> None:
    shown = hp("config", "show", *RECIPE_4B)
    assert shown.code == 0, shown.text
    run = yaml.safe_load(shown.out)
    run["trainer"]["model_spec"] = {"name": "qwen3_5_v2", "flavor": "debugmodel"}
    (hp.cwd / "small.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
    options = ("--tokenizer.tokenizer_path", tokenizer, "--dataloader.dataset_path", "text.txt", "--dump_folder=run")
    sizes = ("--training.seq_len=64", "--training.steps=3", "--metrics.log_freq=1")
    four = ("--nproc", "4", "--parallelism.data_parallel_shard_degree", "2")
    done = hp("train", "small.yaml", *options, *sizes, *four)
    assert done.code == 0, done.text
    assert "processes  4 on cpu (dp_shard 2, tp 2)" in done.out
    first, *_, last = [record["loss"] for record in records(hp.cwd / "run")]
    assert last < first - 1  # type: ignore[operator]
    resolved = yaml.safe_load((hp.cwd / "run" / "resolved.yaml").read_text())["trainer"]
    assert resolved["training"]["mixed_precision_param"] == "bfloat16"
    assert (resolved["loss"]["num_chunks"], resolved["activation_checkpoint"]["mode"]) == (8, "selective")
