"""Every key of the older YAML acts: short runs, each changing one thing."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_run import build, train

from hp_protocols.errors import ConfigError
from hp_trainer._legacy.callbacks import GradientHealthCallback, MoEMonitorCallback, ProgressCallback
from hp_trainer._legacy.data import PresetRows


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def test_recomputation_and_deterministic_runs_give_the_same_bits_and_half_precision_gives_others() -> None:
    plain = weights(train())
    for options in (
        {"train__gradient_checkpointing": {"activation_checkpoint": "full"}},
        {"train__gradient_checkpointing": {"activation_checkpoint": "selective"}},
        {"train__debug": {"deterministic": True, "gc_steps": 1, "check_nan_inf": True}},
    ):
        same = train(**options, train__checkpoint={"save_hf_weights": False, "output_dir": "same"})
        assert all(torch.equal(value.full_tensor() if hasattr(value, "full_tensor") else value, plain[name.replace(
            "_checkpoint_wrapped_module.", "")]) for name, value in weights(same).items())  # fmt: skip
    half = train(train__mixed_precision={"enabled": True, "output_dtype": "bfloat16"})
    assert any(not torch.equal(value.full_tensor(), plain[name]) for name, value in weights(half).items())
    assert all(value.dtype == torch.float32 for value in weights(half).values())


def test_text_conversations_and_datasets_are_read(tmp_path: Path) -> None:
    rows = [{"body": f"the number {number} is followed by the number {number + 1}"} for number in range(40)]
    Path("text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = {"data__type": "json_file", "data__train_path": "text.jsonl", "data__text_key": "body"}
    whole = build(**text, data__shuffle=False, data__num_workers=0)
    assert "40 documents" in str(whole.dataloader)
    whole.close()
    some = train(**text, data__train_size=10, train__eval={"eval_steps": 1, "eval_dataset": "text.jsonl"})
    assert "10 documents" in str(some.dataloader)
    events = [json.loads(line) for line in Path("outputs/metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event.get("event") == "validation"] == [1, 2]
    chats = [
        {"turns": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"no {n}"}]} for n in range(9)
    ]
    Path("chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    chat = train(
        data__type="json_file", data__train_path="chat.jsonl", data__template="default", data__messages_key="turns",
        data__max_seq_len=64,
    )  # fmt: skip
    assert "9 conversations" in str(chat.dataloader)
    labels = next(iter(build(
        data__type="json_file", data__train_path="chat.jsonl", data__template="default", data__messages_key="turns",
        data__max_seq_len=64, train__checkpoint={"save_hf_weights": False, "output_dir": "more"},
    ).dataloader))["labels"]  # fmt: skip
    assert 0 < int((labels != -100).sum()) < labels.numel() // 4


def test_a_saved_dataset_is_read() -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["one two three four"] * 30}).save_to_disk("saved")
    trainer = train(data__type="hf_datasets", data__train_path="saved", data__train_size=20)
    assert "20 documents" in str(trainer.dataloader)


IDS = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"attention_mask": MASK.flip(1)}, r"attention_mask of row 1 has a 0 before a 1; .*ones, then zeros\n.*pad"),
        ({"attention_mask": 2 * MASK}, "attention_mask has the value 2; allowed: 0 and 1"),
        ({"attention_mask": MASK.float()}, "attention_mask has numbers of type torch.float32"),
        ({"attention_mask": MASK[0]}, r"attention_mask \(1, 4\) are not of the shape of input_ids \(2, 4\)"),
        ({"labels": IDS + 92}, r"labels has the token id 100 in row 0 at 3, .*; allowed: -100, or 0 to 99\n.*101"),
        ({"labels": IDS.where(IDS != 3, -1)}, "labels has the token id -1 in row 1 at 2"),
        ({"labels": IDS[:, :3]}, r"labels \(2, 3\) are not of the shape"),
        ({"labels": None}, "labels is of type NoneType"),
        ({"input_ids": IDS - 3}, "input_ids has the token id -2 in row 1 at 0, .*; allowed: 0 to 99\n.*padding"),
        ({"input_ids": IDS + 93}, "input_ids has the token id 100 in row 0 at 2"),
        ({"input_ids": IDS.tolist()}, "rows.pt: input_ids is of type list; .*a tensor of whole numbers\n.*tensor"),
        ({"input_ids": IDS / 2}, "input_ids has numbers of type torch.float32"),
        ({"input_ids": IDS[None]}, r"input_ids has the shape \(1, 2, 4\)"),
        ({"input_ids": IDS[:0]}, r"input_ids \(0, 4\) have no tokens"),
        ([{"input_ids": IDS[0]}, {"input_ids": [1, 2]}], r"rows.pt\[1\]: input_ids is of type list"),
    ],
)  # fmt: skip
def test_prepared_rows_that_cannot_be_trained_on_as_they_are_are_refused(content: Any, said: str) -> None:
    torch.save(content if isinstance(content, list) else {"input_ids": IDS, **content}, "rows.pt")
    with pytest.raises(ConfigError, match=said):
        PresetRows("rows.pt", seq_len=4, vocab_size=100)


@pytest.mark.parametrize("kind", [torch.int32, torch.bool])
def test_prepared_rows_may_be_padded_behind_the_text_which_then_has_no_labels(kind: torch.dtype) -> None:
    labels = IDS.clone()
    labels[1, 3] = 999  # of padding, so that it does not matter
    labels[0, 0] = -100
    torch.save({"input_ids": IDS.int(), "labels": labels, "attention_mask": MASK.to(kind)}, "rows.pt")
    rows = PresetRows("rows.pt", seq_len=5, vocab_size=100)
    assert rows.labels_NS.tolist() == [[-100, 6, 7, 8, -100], [1, 2, -100, -100, -100]]
    assert rows.input_NS[:, :4].equal(IDS)


def test_log_steps_and_what_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hp_trainer")
    trainer = train(
        train__max_steps=4,
        train__logging={"log_steps": 2, "report_throughput": False, "model_flops_per_token": 10, "peak_tflops": 1.0},
        train__memory_monitor={"enabled": True, "log_steps": 2},
    )
    lines = [record.message for record in caplog.records]
    assert [line.split("  ")[0] for line in lines if "grad_norm" in line] == ["step 1/4", "step 2/4", "step 4/4"]
    assert not any("tokens/s" in line or "mfu" in line for line in lines)
    assert sum("peak memory of rank 0" in line for line in lines) == 2
    assert trainer.result.reason == "finished"
    train(train__logging={"log_steps": 1, "model_flops_per_token": 10**9, "peak_tflops": 1e-3})
    assert any("tokens/s  mfu" in record.message for record in caplog.records)


def test_tensorboard_and_a_trace_are_written_where_the_file_says() -> None:
    train(
        train__max_steps=4,
        train__tensorboard={"enabled": True, "output_dir": "curves"},
        train__profile={"enabled": True, "output_dir": "traces", "wait_steps": 1, "active_steps": 2},
    )
    assert list(Path("curves").glob("events.*"))
    assert [path.parent.name for path in Path("traces").glob("*/rank0*.json")] == ["iteration_4"]


def test_wandb_gets_the_project_and_the_name_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """`enabled`, `project`, `run_name`; and every `log_steps` a point, and one at the end."""
    import wandb

    seen: dict[str, Any] = {}
    steps: list[int] = []
    started = wandb.init

    def start(**given: Any) -> Any:
        seen.update(given)
        run = started(**given)
        log = run.log
        monkeypatch.setattr(run, "log", lambda data, **how: steps.append(how["step"]) or log(data, **how))
        return run

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb, "init", start)
    wanted = {"enabled": True, "project": "mine", "run_name": "first", "log_steps": 2}
    train(train__wandb=wanted, train__max_steps=5)
    assert (seen["project"], seen["name"]) == ("mine", "first")
    assert steps == [2, 4, 5]
    assert list(Path("outputs/wandb").glob("offline-run-*"))


def test_weights_are_written_for_transformers_and_training_starts_from_such_a_folder() -> None:
    first = train(train__checkpoint={"save_hf_weights": True}, train__optimizer={"lr": 0.1})
    folder = "outputs/checkpoint/step-2-hf"
    assert Path(folder, "model.safetensors").is_file()
    second = build(model__weights_path=folder)
    assert second.state.step == 0
    assert all(torch.equal(value, weights(first)[name]) for name, value in weights(second).items())
    second.close()


def test_the_backend_of_the_process_group_and_the_shuffled_order_are_the_files_own() -> None:
    one = build(train__comm_backend="gloo", data__train_size=32)
    assert torch.distributed.get_backend() == "gloo"
    shuffled = next(iter(one.dataloader))["input"]
    one.close()
    two = build(data__train_size=32, data__shuffle=False, data__num_workers=1, data__prefetch_factor=2)
    assert not torch.equal(next(iter(two.dataloader))["input"], shuffled)
    two.close()
    with pytest.raises(ConfigError, match=r"train\.comm_backend"):
        build(train__comm_backend="smoke_signals")


def test_gradients_that_are_not_finite_are_named_and_the_step_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    trainer = build(train__debug={"check_nan_inf": True}, train__max_steps=1)
    before = weights(trainer)
    with torch.no_grad():
        trainer.model.layers[1].mlp.up_proj.weight.register_hook(lambda grad: grad * float("nan"))
    trainer.train()
    health = next(one for one in trainer.callbacks if isinstance(one, GradientHealthCallback))
    assert health.bad == ["layers.1.mlp.up_proj.weight"]
    assert "gradients that are not finite: layers.1.mlp.up_proj.weight" in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    trainer.close()


def test_the_moe_monitor_counts_each_token_once_and_lifts_experts_that_have_few() -> None:
    router = torch.nn.Module()
    router.register_buffer("tokens_per_expert", torch.tensor([8, 4, 0]))
    router.register_buffer("expert_bias", torch.zeros(3))
    environment = SimpleNamespace(sum_over_data=lambda tensor: tensor)
    monitor = MoEMonitorCallback(lr=0.5, num_recomputations=2)
    monitor.on_pre_optimizer_step(SimpleNamespace(model=router, environment=environment))  # type: ignore[arg-type]
    assert router.expert_bias.tolist() == [-0.5, 0.0, 0.5]
    assert list(monitor.load.values()) == [2.0]
    assert router.tokens_per_expert.tolist() == [0, 0, 0]


def test_progress_is_shown_on_a_terminal_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, pipe = Terminal(), io.StringIO()
    train(ProgressCallback(terminal), ProgressCallback(pipe))
    assert "2/2" in terminal.getvalue()
    assert pipe.getvalue() == ""


def test_memory_is_pinned_where_there_is_an_accelerator_unless_the_file_says_no(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for pin in (True, False):
        trainer = build(data__pin_memory=pin)
        assert not trainer.data_config.prefetch(0, 0).pin_memory or torch.accelerator.is_available()
        with monkeypatch.context() as patch:
            patch.setattr(torch.accelerator, "is_available", lambda: True)
            assert trainer.data_config.prefetch(0, 0).pin_memory is pin
        trainer.close()
