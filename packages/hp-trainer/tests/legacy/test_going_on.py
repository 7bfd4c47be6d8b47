"""The end of the data, and runs that go on from a checkpoint: to the bit, wherever the data ended."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from observed import observe
from tiny_run import build, write_yaml

from hp_config import HyperTrainerConfig
from hp_protocols.errors import ConfigError

README = Path(__file__).parents[2] / "README.md"
ROWS: dict[str, Any] = {"data__type": "preset_pt", "data__max_seq_len": 16, "data__train_path": "../rows.pt"}
LONG = {"train__max_steps": 9, "train__optimizer": {"lr": 1e-2}}


@pytest.fixture
def rows(tmp_path: Path) -> torch.Tensor:
    ids = torch.randint(300, (10, 16), generator=torch.Generator().manual_seed(3))
    torch.save({"input_ids": ids}, tmp_path / "rows.pt")
    return ids


def test_a_run_whose_data_ended_goes_on_with_more_epochs_and_equals_one_that_never_ended(
    tmp_path: Path, rows: torch.Tensor
) -> None:
    whole = observe(tmp_path / "whole", **ROWS, **LONG, train__num_train_epochs=3)
    assert (whole.result.reason, whole.result.step) == ("data_exhausted", 8)  # of 30 rows, 4 per step
    short = observe(tmp_path / "short", **ROWS, **LONG)
    assert (short.result.reason, short.result.step) == ("data_exhausted", 3)
    assert short.checkpoints == ["step-3"]
    place = {"save_hf_weights": False, "load_path": str(short.folder)}
    same = observe(tmp_path / "same", **ROWS, **LONG, train__checkpoint=place)
    assert (same.result.reason, same.result.step) == ("data_exhausted", 3)  # there is still no more
    more = observe(tmp_path / "more", **ROWS, **LONG, train__checkpoint=place, train__num_train_epochs=3)
    assert (more.trainer.first_step, more.result.step, more.result.reason) == (3, 8, "data_exhausted")
    # The end of the first epoch was a step of half the rows, which the whole run fills up with the next epoch's.
    assert more.curve("lr") == whole.curve("lr")[3:]


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_a_run_goes_on_from_any_step_to_the_bit_with_workers_and_epochs(
    step: int, tmp_path: Path, rows: torch.Tensor
) -> None:
    options = {**ROWS, "train__max_steps": 6, "train__num_train_epochs": 3, "train__optimizer": {"lr": 1e-2}}
    place = {"save_hf_weights": False, "save_steps": step}
    whole = observe(tmp_path / "whole", **options, train__checkpoint=place)
    again = {"save_hf_weights": False, "load_path": str(whole.folder / "checkpoint" / f"step-{step}")}
    resumed = observe(tmp_path / "resumed", **options, train__checkpoint=again, data__num_workers=step % 2)
    assert resumed.trainer.first_step == step
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert resumed.curve(key) == whole.curve(key)[step:]
    assert all(torch.equal(value, whole.end[name]) for name, value in resumed.end.items())


def test_the_last_step_of_the_data_weighs_each_micro_batch_that_it_has_alike(
    tmp_path: Path, rows: torch.Tensor
) -> None:
    """Ten rows: two steps of two micro-batches, then one of one, whose loss is its mean and not half of it."""
    options = {**ROWS, "data__shuffle": False, "train__optimizer": {"loss_aggregation": "rank_average", "lr": 0.0,
               "lr_min": 0.0}}  # fmt: skip
    run = observe(tmp_path / "run", **options, train__max_steps=9)
    with torch.no_grad():
        logits = run.trainer.model(rows)
    labels = F.pad(rows, (0, 1), value=-100)[:, 1:]
    means = [
        float(F.cross_entropy(logits[i : i + 2].flatten(0, 1), labels[i : i + 2].flatten())) for i in (0, 2, 4, 6, 8)
    ]
    expected = [(means[0] + means[1]) / 2, (means[2] + means[3]) / 2, means[4]]
    assert run.curve("loss") == pytest.approx(expected, rel=1e-6)


def test_a_folder_of_transformers_is_no_checkpoint_and_says_where_it_belongs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"load_path: there is no checkpoint.*\n.*belongs in model\.weights_path"):
        build(train__checkpoint={"load_path": str(tmp_path)})


def test_the_older_model_gives_no_deprecation_warning_while_it_is_the_default() -> None:
    assert HyperTrainerConfig().model.name == "qwen3_5"
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        build().close()


def test_the_readmes_callback_works(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    write_yaml()
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    (example,) = [block for block in blocks if "LargestGradient" in block]
    names: dict[str, Any] = {}
    exec(compile(example, str(README), "exec"), names)
    assert Path("outputs/checkpoint/step-2").is_dir()
