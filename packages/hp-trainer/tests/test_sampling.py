"""A trained run writes text: the likeliest token each time, or drawn ones that a seed repeats."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from hp_trainer.cli.sample import main
from hp_trainer.recipes.qwen3_5_v2 import qwen3_5_v2_debugmodel
from hp_trainer.sampling import TrainedModel, generate, load_trained_model, stream_text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, with checkpoints after the second and the fourth."""
    folder = tmp_path_factory.mktemp("sampling")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    config = qwen3_5_v2_debugmodel()
    config.training.steps, config.training.seq_len, config.training.global_batch_size = 4, 16, 2
    config.tokenizer.vocab_size = 300
    config.dataloader.dataset_path = str(folder / "text.txt")
    config.checkpoint.interval = 2
    # What one process that only reads must do without.
    config.activation_checkpoint.mode = "full"
    config.dump_folder = str(folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HP_CACHE_DIR", str(folder / "cache"))
        trainer = config.build()
        trainer.train()
        trainer.close()
    return folder / "run"


@pytest.fixture(scope="module")
def trained(run: Path) -> TrainedModel:
    return load_trained_model(run)


def ids(trained: TrainedModel, count: int = 24, **options: object) -> list[int]:
    prompt = trained.tokenizer.encode("The quick", add_bos=True)
    place = {
        "context": trained.context,
        "device": trained.device,
        "vocab_size": trained.tokenizer.vocab_size,
    }
    return list(generate(trained.module, prompt, max_new_tokens=count, **place, **options))  # type: ignore[arg-type]


def test_the_newest_checkpoint_is_loaded_unless_another_is_asked_for(run: Path, trained: TrainedModel) -> None:
    from hp_components.checkpoint import load_model

    assert trained.step == 4
    assert trained.context == 16
    weights = {name: value.clone() for name, value in trained.module.state_dict().items()}
    second = load_trained_model(run, 2)
    assert second.step == 2
    assert not torch.equal(second.module.state_dict()["embed_tokens.weight"], weights["embed_tokens.weight"])
    load_model(second.module, run / "checkpoint" / "step-4")
    assert all(torch.equal(value, weights[name]) for name, value in second.module.state_dict().items())


def test_greedy_takes_the_likeliest_token_given_the_last_tokens_that_it_was_trained_to_see(
    trained: TrainedModel,
) -> None:
    found = ids(trained)
    seen = trained.tokenizer.encode("The quick", add_bos=True)
    for token in found:
        with torch.no_grad():
            logits = trained.module(torch.tensor([seen[-16:]]))
        # The model has 2048 rows, the tokenizer fewer ids.
        assert token == logits[0, -1, : trained.tokenizer.vocab_size].argmax()
        seen.append(token)
    assert len(seen) > 16 + 5
    assert found == ids(trained)


def test_drawn_tokens_are_repeated_by_their_seed(trained: TrainedModel) -> None:
    draws = [ids(trained, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert max(max(drawn) for drawn in draws) < trained.tokenizer.vocab_size < 2048
    assert ids(trained, temperature=1.0, top_k=1, seed=5) == ids(trained)
    # So cold that nothing but the likeliest is left.
    assert ids(trained, temperature=1e-4, seed=5) == ids(trained)


def test_it_ends_before_the_token_that_ends_a_document(trained: TrainedModel) -> None:
    first, second = ids(trained, 2)
    assert ids(trained, stop=first) == []
    assert ids(trained, stop=second) == ([first] if second != first else [])


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def test_characters_of_several_tokens_come_when_they_are_whole() -> None:
    text = "aé漢🙂z"
    pieces = list(stream_text(Bytes(), b"go ", iter(text.encode())))  # type: ignore[arg-type]
    assert pieces == ["a", "é", "漢", "🙂", "z"]
    cut = list(stream_text(Bytes(), b"go ", iter("é漢".encode()[:-1])))  # type: ignore[arg-type]
    assert cut == ["é", "\N{REPLACEMENT CHARACTER}"]


def test_the_command_writes_prompt_and_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(run), "--prompt", "The quick", "--max-new-tokens", "8"]
    assert main(command) == 0
    first = capsys.readouterr()
    assert first.out.startswith("The quick")
    assert len(first.out) > len("The quick\n")
    assert "after step 4" in first.err
    assert main(command) == 0
    assert capsys.readouterr().out == first.out
    assert main([*command, "--step=2", "--temperature", "0.9", "--seed", "3", "--top_k", "9"]) == 0
    assert "after step 2" in capsys.readouterr().err


def test_mistakes_are_told_with_what_would_be_right(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {
        (str(tmp_path),): "is no run folder: it has no resolved.yaml",
        (str(run), "--step", "3"): "--step: there is none of 3; allowed: 2, 4",
        (str(run), "--seed", "3"): "--seed: does nothing while the likeliest token is taken",
        (str(run), "--temperature", "-1"): "--temperature: -1.0 is no temperature",
        (str(run), "--max_new_tokens", "many"): "--max_new_tokens: invalid int value: 'many'",
        (str(run), "--promt", "x"): "did you mean --prompt?",
    }
    for arguments, said in cases.items():
        assert main(list(arguments)) == 2, arguments
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error


def test_a_run_in_mixed_precision_writes_too(run: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(run, mixed)
    text = (mixed / "resolved.yaml").read_text()
    assert "mixed_precision_param: float32" in text
    (mixed / "resolved.yaml").write_text(
        text.replace("mixed_precision_param: float32", "mixed_precision_param: bfloat16")
    )
    trained = load_trained_model(mixed)
    logits = trained.module(torch.zeros(1, 4, dtype=torch.int64, device=trained.device))
    assert logits.dtype == torch.bfloat16, "as it was trained"
    assert len(ids(trained, count=3)) == 3
