"""Every key of the older file, one by one: a run with another value differs in what the key is about, or names it."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import test_knobs
import test_ranks
import torch
from observed import Observed, observe
from tiny_run import build

from hp_config import HyperTrainerConfig
from hp_protocols.errors import ConfigError

Look = Callable[[Observed], Any]
SIZES = {"model__config_overrides": {"head_dim": 16}}
TEXT = {"data__type": "json_file", "data__train_path": "{files}/text.jsonl"}
CHATS = {
    "data__max_seq_len": 64,
    "data__type": "json_file",
    "data__train_path": "{files}/chats.jsonl",
    "data__template": "default",
}
SUBSETS = {"data__type": "hf_datasets", "data__train_path": "{files}/subsets"}
UNEVEN = {"data__type": "preset_pt", "data__train_path": "{files}/uneven.pt"}
EVAL = {**TEXT, "train__max_steps": 4, "train__eval": {"eval_steps": 2, "eval_dataset": "{files}/text.jsonl"}}
LONGER = {"train__max_steps": 6}
HALF = {"train__mixed_precision": {"enabled": True}}
PEAK = {"train__logging": {"log_steps": 1, "model_flops_per_token": 10**6, "peak_tflops": 1.0}}
CURVES = {**LONGER, "train__tensorboard": {"enabled": True}}
TRACE = {
    "train__max_steps": 7,
    "train__profile": {"enabled": True, "wait_steps": 1, "warmup_steps": 1, "active_steps": 2},
}
MEMORY = {"train__max_steps": 4, "train__memory_monitor": {"enabled": True, "log_steps": 2}}


@dataclass(frozen=True)
class Acts:
    """A key, another value, what to look at, what it is then.

    `beside`: options of both runs; `also`: of the one with the other value.
    """

    key: str
    value: Any
    look: Look
    expected: Any = None
    beside: dict[str, Any] = field(default_factory=dict)
    also: dict[str, Any] = field(default_factory=dict)


def losses(run: Observed) -> list[float]:
    return run.curve("loss")


def rates(run: Observed) -> list[float]:
    return run.curve("lr")


def end(run: Observed) -> str:
    return str([float(value.double().sum()) for value in run.end.values()])


def data(run: Observed) -> str:
    return str(run.trainer.dataloader)


def rows(run: Observed) -> str:
    return run.trainer.dataloader.fingerprint


def moment(name: str) -> Look:
    return lambda run: run.moments[name]


def told(name: str) -> Look:
    return lambda run: run.moments["loader"].get(name)


def shape(name: str, dim: int) -> Look:
    return lambda run: run.end[name].shape[dim]


def curve_steps(run: Observed) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = next(path for path in (run.folder.parent / "tb_traces", run.folder.parent / "own") if path.exists())
    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.step for event in events.Scalars("loss")]


def trace(run: Observed) -> tuple[str, int]:
    (file,) = run.folder.parent.glob("profiler_traces/*/rank0*.json")
    events = json.loads(file.read_text())["traceEvents"]
    return file.parent.name, len({event["name"] for event in events if event["name"].startswith("ProfilerStep")})


ACTS = [
    Acts("model.weights_path", "{files}/weights", lambda r: float(r.start["embed_tokens.weight"].sum())),
    Acts("model.tokenizer_path", "{files}/tokenizer", rows, beside=TEXT),
    Acts(
        "model.freeze_modules", ["embed"],
        lambda r: torch.equal(r.start["embed_tokens.weight"], r.end["embed_tokens.weight"]), True,
    ),
    Acts("model.tp_plan", {"lm_head": "colwise"}, lambda r: len(r.said("model.tp_plan splits nothing")), 1),
    Acts("model.cp_modules", ["layers.*.*.core"], lambda r: len(r.said("model.cp_modules splits nothing")), 1),
    Acts("model.num_hidden_layers", 3, lambda r: len(r.trainer.model.layers), 3, SIZES),
    Acts("model.hidden_size", 16, shape("embed_tokens.weight", 1), 16),
    Acts("model.intermediate_size", 24, shape("layers.0.mlp.up_proj.weight", 0), 24),
    Acts("model.num_attention_heads", 2, shape("layers.1.self_attn.o_proj.weight", 1), 32),
    Acts("model.num_key_value_heads", 1, shape("layers.1.self_attn.k_proj.weight", 0), 16),
    Acts("model.vocab_size", 200, shape("lm_head.weight", 0), 200),
    Acts("model.config_overrides", {"hidden_size": 64}, shape("embed_tokens.weight", 1), 64),
    Acts("data.type", "preset_pt", losses, also={"data__train_path": "{files}/uneven.pt"}),
    Acts("data.train_path", "{files}/other.jsonl", losses, beside=TEXT),
    Acts("data.subset", "de", lambda r: re.findall(r"\d+ documents", data(r)), ["9 documents"],
         {**SUBSETS, "data__subset": "en"}),
    Acts("data.max_seq_len", 32, lambda r: r.trainer.state.tokens_seen, 256),
    Acts("data.text_key", "body", rows, beside=TEXT),
    Acts("data.train_size", 8, lambda r: "8 documents" in data(r), True, TEXT),
    Acts("data.template", "default", rows, beside={**CHATS, "data__template": "empty", "data__text_key": "text"}),
    Acts("data.messages_key", "turns", rows, beside=CHATS),
    Acts("data.num_workers", 1, moment("workers"), 1),
    Acts("data.prefetch_factor", 3, told("prefetch_factor"), 3, {"data__num_workers": 1}),
    Acts("data.shuffle", False, losses, beside={"data__train_size": 32}),
    Acts("train.max_steps", 3, lambda r: r.result.step, 3),
    Acts("train.num_train_epochs", 3, lambda r: (r.result.step, r.result.reason), (3, "data_exhausted"),
         {"data__train_size": 4, "train__max_steps": 9}),
    Acts("train.global_batch_size", 8, lambda r: r.trainer.state.tokens_seen, 256),
    Acts("train.micro_batch_size", 1, lambda r: r.substeps, 8),
    Acts("train.seed", 1, lambda r: (end(r), losses(r))),
    Acts("train.init_device", "cpu", lambda r: r.built_on, "cpu"),
    Acts("train.local_rank", 1, moment("local_rank"), "1"),
    Acts("train.comm_backend", "cpu:gloo", moment("backend"), "cpu:gloo"),
    Acts("train.accelerator.reshard_after_forward", False, moment("behind_the_layer"), False, HALF),
    Acts("train.accelerator.zero_stage", 3, moment("behind_the_model"), True, HALF),
    Acts("train.mixed_precision.enabled", True, losses),
    Acts("train.mixed_precision.param_dtype", "float16", losses, beside=HALF),
    Acts("train.mixed_precision.output_dtype", "float32", moment("logits"), torch.float32, HALF),
    Acts("train.gradient_checkpointing.activation_checkpoint", "full", lambda r: r.layer_calls, 8),
    Acts("train.optimizer.type", "SGD", end),
    Acts("train.optimizer.lr", 3e-4, rates),
    Acts("train.optimizer.lr_min", 5e-5, rates, beside=LONGER),
    Acts("train.optimizer.lr_decay_style", "linear", rates, beside=LONGER),
    Acts("train.optimizer.lr_warmup_ratio", 0.5, rates, beside=LONGER),
    Acts("train.optimizer.loss_aggregation", "rank_average", losses, beside=UNEVEN),
    Acts("train.optimizer.weight_decay", 0.5, end),
    Acts("train.optimizer.max_grad_norm", 0.1, end),
    Acts("train.optimizer.eps", 1e-2, end),
    Acts("train.optimizer.betas", [0.5, 0.6], end),
    Acts("train.checkpoint.output_dir", "own", lambda r: r.folder.name, "own"),
    Acts("train.checkpoint.save_steps", 2, lambda r: r.checkpoints, ["step-2", "step-4", "step-6"], LONGER),
    Acts("train.checkpoint.save_hf_weights", True, lambda r: r.checkpoints, ["step-2", "step-2-hf"]),
    Acts("train.checkpoint.load_path", "{files}/run/step-2", lambda r: r.trainer.first_step, 2, LONGER),
    Acts("train.checkpoint.save_async", True, lambda r: "hp-checkpoint-step-2" in r.threads, True,
         {**LONGER, "train__checkpoint": {"save_hf_weights": False, "save_steps": 2}}),
    Acts("train.logging.report_to", "tensorboard", lambda r: (r.folder.parent / "tb_traces").exists(), True),
    Acts("train.logging.log_steps", 2, lambda r: [record["step"] for record in r.records], [1, 2, 4, 6], LONGER),
    Acts("train.logging.report_throughput", False, lambda r: len(r.said("tokens/s")), 0),
    Acts("train.logging.model_flops_per_token", 10**12, lambda r: r.curve("mfu")[-1] > 1, True, PEAK),
    Acts("train.logging.peak_tflops", 1e-9, lambda r: r.curve("mfu")[-1] > 1, True, PEAK),
    Acts("train.tensorboard.enabled", True, lambda r: (r.folder.parent / "tb_traces").exists(), True),
    Acts("train.tensorboard.output_dir", "own", lambda r: (r.folder.parent / "own").exists(), True, CURVES),
    Acts("train.tensorboard.log_steps", 4, curve_steps, [4, 6], CURVES),
    Acts("train.profile.enabled", True, lambda r: (r.folder.parent / "profiler_traces").exists(), True,
         {"train__max_steps": 7}),
    Acts("train.profile.output_dir", "own", lambda r: (r.folder.parent / "own").exists(), True, TRACE),
    Acts("train.profile.wait_steps", 2, trace, ("iteration_5", 2), TRACE),
    Acts("train.profile.warmup_steps", 3, trace, ("iteration_6", 2), TRACE),
    Acts("train.profile.active_steps", 3, trace, ("iteration_5", 3), TRACE),
    Acts("train.memory_monitor.enabled", True, lambda r: len(r.said("peak memory")), 2,
         {"train__max_steps": 4, "train__memory_monitor": {"log_steps": 2}}),
    Acts("train.memory_monitor.log_steps", 1, lambda r: len(r.said("peak memory")), 4, MEMORY),
    Acts("train.eval.eval_steps", 1, lambda r: [event["step"] for event in r.events("validation")], [1, 2, 3, 4], EVAL),
    Acts("train.eval.eval_dataset", "{files}/other.jsonl", lambda r: r.events("validation")[0]["nll"], beside=EVAL),
    Acts("train.debug.deterministic", True, moment("deterministic"), True),
    Acts("train.debug.deterministic_warn_only", True, moment("warn_only"), True,
         {"train__debug": {"deterministic": True}}),
    Acts("train.debug.check_nan_inf", True, lambda r: len(r.said("layers.0.mlp.down_proj.weight")), 2,
         {"poison": True}),
    Acts("train.debug.gc_steps", 2, moment("garbage"), False),
]  # fmt: skip

REFUSED: list[tuple[str, Any, str]] = [
    ("model.name", "qwen3_6", "did you mean"),
    ("model.ep_modules", ["experts"], "mixture-of-experts"),
    ("model.max_position_embeddings", 8, "max_position_embeddings 8"),
    ("data.image_key", "picture", "vision model"),
    ("data.image_token_id", 1, "vision model"),
    ("data.vl_grid_t", 1, "vision model"),
    ("data.vl_grid_h", 1, "vision model"),
    ("data.vl_grid_w", 1, "vision model"),
    ("data.streaming", True, "cannot be resumed exactly"),
    ("train.backend", "mindspore", "only torch"),
    ("train.comm_backend", "fake", "is no backend of torch"),
    ("train.init_device", "npu", "this run is on"),
    ("train.accelerator.dp", 2, "dp_shard 2 = 2, but the world has 1"),
    ("train.accelerator.dp_replicate", 2, "dp_replicate 2 .* but the world has 1"),
    ("train.accelerator.dp_shard", 2, "dp_shard 2 = 2, but the world has 1"),
    ("train.accelerator.tp", 2, "tp 2 .* but the world has 1"),
    ("train.accelerator.cp", 2, "cp 2 .* but the world has 1"),
    ("train.accelerator.pp", 2, "pipeline parallelism"),
    ("train.accelerator.ep", 2, "mixture-of-experts"),
    ("train.accelerator.etp", 2, "mixture-of-experts"),
    ("train.accelerator.async_cp", True, "overlapped"),
    ("train.accelerator.ulysses_degree", 2, "head-parallel"),
    ("train.accelerator.comm_fusion", False, "one transformer block"),
    ("train.optimizer.bsz_warmup_ratio", 0.1, "lr_warmup_ratio warms up the rate"),
    ("train.memory_monitor.reset_peak_each_step", True, "cannot be reset"),
    ("train.moe_monitor.enabled", True, "mixture-of-experts"),
    ("train.moe_monitor.lr", 0.0, "is not positive"),
    ("train.moe_monitor.num_recomputations", 0, "is not positive"),
]

BESIDE_REFUSED = {"train.memory_monitor.reset_peak_each_step": {"train__memory_monitor__enabled": True}}

# Keys whose effect takes several ranks, an accelerator or another program to see.
ELSEWHERE: dict[str, Callable[..., Any]] = {
    "data.pin_memory": test_knobs.test_memory_is_pinned_where_there_is_an_accelerator_unless_the_file_says_no,
    "train.mixed_precision.reduce_dtype": test_ranks.test_what_only_several_ranks_can_show,
    "train.logging.report_global_loss": test_ranks.test_what_only_several_ranks_can_show,
    "train.wandb.enabled": test_knobs.test_wandb_gets_the_project_and_the_name_of_the_file,
    "train.wandb.project": test_knobs.test_wandb_gets_the_project_and_the_name_of_the_file,
    "train.wandb.run_name": test_knobs.test_wandb_gets_the_project_and_the_name_of_the_file,
    "train.wandb.log_steps": test_knobs.test_wandb_gets_the_project_and_the_name_of_the_file,
}


def option(path: str, value: Any) -> dict[str, Any]:
    return {path.replace(".", "__"): value}


def filled(options: Any, files: Path) -> Any:
    if isinstance(options, dict):
        return {key: filled(value, files) for key, value in options.items()}
    return options.replace("{files}", str(files)) if isinstance(options, str) else options


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, conversations, subsets, prepared rows, a tokenizer, weights and a run to go on with."""
    folder = tmp_path_factory.mktemp("files")
    for name, word, count in (("text", "number", 40), ("other", "letter", 30)):
        lines = [{"text": f"the {word} {n} and the {word} {n + 1}", "body": f"{word} {n}"} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def turns(answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]

    chats = [{"text": f"no {n}", "messages": turns(f"no {n}"), "turns": turns(f"yes {n}")} for n in range(20)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "subsets").mkdir()
    for name, count in (("en", 12), ("de", 9)):
        lines = [{"text": f"{name} one two three {n}"} for n in range(count)]
        (folder / "subsets" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("en", "de"))
    (folder / "subsets" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    ids = torch.randint(300, (16, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[::3, 4:] = -100
    torch.save({"input_ids": ids, "labels": labels}, folder / "uneven.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HP_CACHE_DIR", str(folder / "cache"))
        patch.setenv("LOCAL_RANK", "0")
        text = {"data__type": "json_file", "data__train_path": str(folder / "other.jsonl")}
        made = observe(folder / "made", **text, train__checkpoint={"save_hf_weights": True})
        observe(folder / "run", train__max_steps=6, train__checkpoint={"save_hf_weights": False, "save_steps": 2})
    (folder / "run" / "outputs" / "checkpoint" / "step-2").rename(folder / "run" / "step-2")
    (made.folder / "tokenizer").rename(folder / "tokenizer")
    (made.folder / "checkpoint" / "step-2-hf").rename(folder / "weights")
    return folder


BASES: dict[str, Observed] = {}


@pytest.mark.parametrize("case", ACTS, ids=lambda case: case.key)
def test_another_value_changes_what_the_key_is_about(
    case: Acts, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK")
    if case.key == "data.subset":
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    beside = filled(case.beside, files)
    poison = beside.pop("poison", False)
    known = json.dumps(beside) + str(poison)
    if known not in BASES:
        BASES[known] = observe(files / f"base-{len(BASES)}", poison=poison, **beside)
    value = filled(option(case.key, case.value), files)
    changed = {**beside, **filled(case.also, files), **value}
    other = observe(tmp_path / "other", poison=poison, **changed)
    before, after = case.look(BASES[known]), case.look(other)
    assert after != before
    if case.expected is not None:
        assert after == case.expected


@pytest.mark.parametrize(("key", "value", "said"), REFUSED, ids=[key for key, _, _ in REFUSED])
def test_a_value_that_could_not_act_is_refused_under_the_name_of_its_key(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        build(**option(key, value), **BESIDE_REFUSED.get(key, {}))
    assert key.rpartition(".")[2] in str(caught.value)


def leaves(node: Any, path: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in vars(node).items():
        full = f"{path}.{name}" if path else name
        found |= leaves(value, full) if hasattr(value, "__dataclass_fields__") else {full}
    return found


def test_no_key_is_without_a_test_of_its_effect_or_its_refusal() -> None:
    acting, refused = {case.key for case in ACTS}, {key for key, _, _ in REFUSED}
    assert acting | refused | set(ELSEWHERE) == leaves(HyperTrainerConfig())
    for key, function in ELSEWHERE.items():
        assert key.rpartition(".")[2] in inspect.getsource(inspect.getmodule(function) or function)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "sqrt"])
def test_the_rate_follows_the_formula_of_each_style(style: str) -> None:
    remains = {
        "constant": lambda done: 1.0,
        "linear": lambda done: 1.0 - done,
        "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
        "sqrt": lambda done: 1.0 - done**0.5,
    }[style]
    optimizer = {"lr": 1e-2, "lr_warmup_ratio": 0.3, "lr_decay_style": style}
    run = observe(Path.cwd() / style, train__max_steps=8, train__optimizer=optimizer)
    warmup = 3  # of 8 · 0.3, rounded up
    expected = [1e-2 * (step + 1) / warmup for step in range(warmup)]
    expected += [1e-5 + (1e-2 - 1e-5) * remains((step - warmup) / (8 - warmup)) for step in range(warmup, 8)]
    assert rates(run) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["adam", "AdamW", "adamax", "nadam", "radam", "adagrad", "adadelta", "rmsprop", "sgd"])
def test_every_kind_of_optimizer_takes_the_steps_of_torchs_own(kind: str) -> None:
    """The first gradient is the same for all: so the first step is what torch's class makes of it."""
    seen: dict[str, torch.Tensor] = {}
    trainer = build(train__max_steps=1, train__optimizer={"type": kind, "lr": 0.1, "lr_warmup_ratio": 0.0})
    name = "layers.1.mlp.up_proj.weight"
    weight = dict(trainer.model.named_parameters())[name]
    start = weight.detach().clone()
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (seen.update(grad=weight.grad.clone()), step())  # type: ignore[method-assign]
    trainer.train()
    trainer.close()
    cls = next(cls for cls in vars(torch.optim).values() if getattr(cls, "__name__", "").lower() == kind.lower())
    plain = torch.nn.Parameter(start.clone())
    takes = inspect.signature(cls).parameters
    given = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    theirs = cls([plain], lr=0.1, **{key: value for key, value in given.items() if key in takes}, foreach=False)
    plain.grad = seen["grad"]
    theirs.step()
    assert torch.equal(weight, plain)
    assert not torch.equal(weight, start)
