"""Documents that share a row: with document_mask they do not see each other, without it all is as before."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from hp_components import ChatDataLoader, CorpusTokenizer, CrossEntropyLoss, TextDataLoader
from hp_protocols import get_spec
from hp_protocols.errors import ConfigError
from hp_trainer.cross_checks import document_mask_faults
from hp_trainer.recipes.qwen3_5_v2 import qwen3_5_v2_debugmodel_sft
from hp_trainer.training_step import document_arguments


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HP_CACHE_DIR", str(tmp_path / "hp-cache"))


def test_a_row_of_documents_gives_the_loss_of_each_document_by_itself(tmp_path: Path) -> None:
    lines = [{"text": text} for text in ("one two three", "four", "five six", "seven eight nine ten", "eleven")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tokenizer = CorpusTokenizer.Config(vocab_size=258).build(corpus=lambda: ["text"])
    model = get_spec("qwen3_5_v2", "debugmodel").model.build()
    model.init_states(seed=0)
    loss_fn = CrossEntropyLoss.Config().build()

    def load(mask: bool) -> dict[str, torch.Tensor]:
        config = TextDataLoader.Config(dataset_path=str(tmp_path / "a.jsonl"), document_mask=mask, shuffle=False)
        loader = config.build(tokenizer=tokenizer, seq_len=32, local_batch_size=2)
        assert document_mask_faults(loader, model) == []
        return next(loader)

    plain, masked = load(False), load(True)
    assert document_arguments(plain) == {}
    assert {name: masked[name].tolist() for name in plain} == {name: plain[name].tolist() for name in plain}
    with torch.no_grad():
        seen, unseen = (
            loss_fn.run_model(model, batch["labels"], batch["input"], **document_arguments(batch)).item()
            for batch in (plain, masked)
        )
        bounds, alone = masked["cu_seqlens"].tolist(), 0.0
        inputs, labels = masked["input"].flatten(), masked["labels"].flatten()
        for start, end in itertools.pairwise(bounds):
            alone += loss_fn.run_model(model, labels[None, start:end], inputs[None, start:end]).item()
    assert len(bounds) > 6
    assert unseen == pytest.approx(alone, rel=1e-5)
    assert abs(seen - alone) > 1e-3


def test_a_model_that_takes_no_boundaries_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    tokenizer = CorpusTokenizer.Config(vocab_size=258).build(corpus=lambda: ["text"])
    config = TextDataLoader.Config(dataset_path=str(tmp_path / "a.txt"), document_mask=True)
    loader = config.build(tokenizer=tokenizer, seq_len=4, local_batch_size=1)
    (fault,) = document_mask_faults(loader, torch.nn.Linear(2, 2))
    assert str(fault).startswith("dataloader.document_mask: is on, but Linear does not take document boundaries")


def test_fine_tuning_learns_the_answers_of_a_file(tmp_path: Path) -> None:
    answers = {"red": "apple", "green": "leaf", "blue": "sky"}
    lines = [json.dumps({"messages": [
        {"role": "user", "content": f"what is {color}?"}, {"role": "assistant", "content": answer}
    ]}) for color, answer in answers.items()] * 8  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("\n".join([*lines, "bad"]))
    config = qwen3_5_v2_debugmodel_sft()
    with pytest.raises(ConfigError, match=r"dataloader.dataset_path: is not set"):
        config.dataloader.build(tokenizer=None, seq_len=8, local_batch_size=1)
    config.dataloader.dataset_path = str(tmp_path / "chats.jsonl")
    config.dataloader.on_bad_line = "skip"
    config.tokenizer.vocab_size = 300
    config.training.steps, config.training.seq_len, config.training.local_batch_size = 12, 64, 8
    config.lr_scheduler.warmup_steps, config.metrics.log_freq = 2, 1
    config.dump_folder = str(tmp_path / "run")
    trainer = config.build()
    trainer.train()
    trainer.close()
    assert isinstance(config.dataloader, ChatDataLoader.Config)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < losses[0] / 2
    (event,) = [record for record in records if record.get("event") == "bad_lines_skipped"]
    assert (event["count"], event["step"]) == (1, 0)
    assert event["first"][0].startswith(f"{tmp_path}/chats.jsonl:25: is not JSON")
