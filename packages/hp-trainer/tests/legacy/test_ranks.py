"""LLMTrainer on two processes against FSDP2 applied by hand, bit for bit; and hp train OLD.yaml --nproc 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_run import build, write_yaml
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_protocols import get_spec
from hp_protocols.testing import run_world
from hp_trainer import Callback

STEPS, LENGTH = 3, 12
OPTIONS: dict[str, Any] = {
    "data__type": "preset_pt",
    "data__train_path": "rows.pt",
    "data__shuffle": False,
    "data__max_seq_len": LENGTH,
    "train__max_steps": STEPS,
    "train__optimizer": {"lr": 1e-2, "lr_decay_style": "constant", "lr_warmup_ratio": 0.0, "max_grad_norm": 0.5},
}


def _whole(model: torch.nn.Module) -> list[torch.Tensor]:
    parameters = (parameter.detach() for parameter in model.parameters())
    return [value.full_tensor() if isinstance(value, DTensor) else value.clone() for value in parameters]


def _trained(rank: int, world_size: int) -> tuple[list[tuple[float, float]], list[torch.Tensor]]:
    trainer = build(**OPTIONS)
    trainer.train()
    assert trainer.environment.watch is not None
    assert "no key of the older file" in trainer.environment.watch.limit_name
    found = _whole(trainer.model)
    trainer.close()
    lines = [json.loads(line) for line in Path("outputs/metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "event" not in line], found


def _by_hand(rank: int, world_size: int) -> tuple[list[tuple[float, float]], list[torch.Tensor]]:
    """Rows as the loader shares them: of each micro-batch of four, a rank has two."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 300, "head_dim": 16}
    model = get_spec("qwen3_5").build_model_fn(**sizes, layer_types=("linear_attention", "full_attention"))
    torch.manual_seed(42)
    model.init_weights()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    units = [[model.norm, model.lm_head], *model.layers, model.embed_tokens, model]
    for unit in units:
        fully_shard(unit, mesh=mesh)
        one = unit[0] if isinstance(unit, list) else unit
        one.set_gradient_divide_factor(1.0)
        one.set_force_sum_reduction_for_comms(True)
    named = list(model.named_parameters())
    plain = [p for n, p in named if "bias" in n or "norm" in n]
    others = [p for n, p in named if "bias" not in n and "norm" not in n]
    groups = [{"params": others, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
    ids = torch.load("rows.pt")["input_ids"]
    seen = []
    for step in range(STEPS):
        rows = ids[4 * step + 2 * rank : 4 * step + 2 * rank + 2]
        labels = F.pad(rows, (0, 1), value=-100)[:, 1:]
        logits = model(rows).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (4 * (LENGTH - 1))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        seen.append((total.item(), norm.full_tensor().item()))  # type: ignore[attr-defined]
    return seen, _whole(model)


def test_two_ranks_train_bitwise_what_fsdp2_by_hand_trains() -> None:
    torch.save({"input_ids": torch.randint(300, (16, LENGTH), generator=torch.Generator().manual_seed(3))}, "rows.pt")
    helpers = {"PYTHONPATH": str(Path(__file__).parent)}
    ours = run_world(_trained, 2, init_process_group=False, env=helpers)
    theirs = run_world(_by_hand, 2, env=helpers)
    assert ours[0][0] == theirs[0][0]
    for found, expected in zip(ours[0][1], theirs[0][1], strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("options", "code", "said"), [([], 0, "Finished 2 steps."), (["--train.seed=x"], 2, "integer")]
)
def test_the_command_starts_the_ranks_and_hands_on_their_exit_code(options: list[str], code: int, said: str) -> None:
    command = [
        sys.executable,
        "-m",
        "hp_trainer",
        "train",
        write_yaml(train__accelerator={"dp_replicate": 2}),
        *options,
    ]
    ended = subprocess.run([*command, "--nproc", "2"], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == code, ended.stderr
    assert said in ended.stdout + ended.stderr


class _Logs(Callback):
    """What was logged, this rank's own loss, the loss and norm of all; from the second step on that of all is asked."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_init_end(self, trainer: Any) -> None:
        weight = trainer.model.layers[0].mlp.up_proj.weight
        self.shape = tuple((weight.to_local() if isinstance(weight, DTensor) else weight).shape)

    def on_log(self, trainer: Any, logs: dict[str, float]) -> None:
        self.seen.append({"logged": logs["loss"], "own": trainer.local_loss})

    def on_step_end(self, trainer: Any, result: Any) -> None:
        self.seen[-1] |= {"all": result.loss, "norm": result.grad_norm}
        trainer.args.train.logging.report_global_loss = True


UNEVEN = {**OPTIONS, "data__train_path": "uneven.pt"}


def _logged(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[dict[str, float]], tuple[int, ...]]:
    logs = _Logs()
    trainer = build(logs, **UNEVEN, **options)
    trainer.train()
    trainer.close()
    return logs.seen, logs.shape


def test_what_only_several_ranks_can_show() -> None:
    """report_global_loss, reduce_dtype, two kinds of data parallelism; a run of one process that two go on with."""
    ids = torch.randint(300, (16, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[::4, 3:] = labels[1::4, 3:] = -100  # the first two of four rows are rank 0's
    torch.save({"input_ids": ids, "labels": labels}, "uneven.pt")
    place = {"output_dir": "one", "save_hf_weights": False, "save_steps": 1}
    alone, whole = _logged(0, 1, {"train__checkpoint": place})
    assert whole == (48, 32)
    # All tokens are this rank's own, and weigh the same, though the micro-batches have different numbers of them.
    assert alone[0]["logged"] == alone[0]["own"] == alone[0]["all"]
    helpers = {"PYTHONPATH": str(Path(__file__).parent)}

    (first, shape), (second, _) = run_world(_logged, 2, {}, init_process_group=False, env=helpers)
    assert shape == (24, 32)
    assert first[0]["logged"] == first[0]["own"] != first[0]["all"]
    assert first[1]["logged"] == first[1]["all"] != first[1]["own"]
    tokens = 2 * 2, 2 * (LENGTH - 1)
    for ours, theirs, one in zip(first, second, alone, strict=True):
        both = (tokens[0] * ours["own"] + tokens[1] * theirs["own"]) / sum(tokens)
        assert ours["all"] == theirs["all"] == pytest.approx(both, rel=1e-6)
        assert (ours["all"], ours["norm"]) == pytest.approx((one["all"], one["norm"]), rel=1e-5)

    options = {
        "train__accelerator": {"dp_replicate": 2},
        "train__mixed_precision": {"enabled": True, "param_dtype": "float32", "reduce_dtype": "bfloat16"},
        "train__checkpoint": {"save_hf_weights": False, "load_path": "one/checkpoint/step-1"},
    }
    (rounded, shape), _ = run_world(_logged, 2, options, init_process_group=False, env=helpers)
    assert shape == (48, 32)
    assert len(rounded) == len(alone) - 1
    assert rounded[0]["all"] == pytest.approx(alone[1]["all"], rel=1e-6)
    # The gradients travel with eight bits.
    assert rounded[0]["norm"] != first[1]["norm"]
    assert abs(rounded[0]["norm"] - first[1]["norm"]) > 1e-6 * first[1]["norm"]
    assert rounded[0]["norm"] == pytest.approx(first[1]["norm"], rel=1e-2)


def _averaged(rank: int, world_size: int, options: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Loss, norm and this rank's own loss of every step, micro-batches weighing the same."""
    logs = _Logs()
    average = {**OPTIONS["train__optimizer"], "loss_aggregation": "rank_average"}
    trainer = build(logs, **{**OPTIONS, "data__train_path": "ten.pt", "train__optimizer": average, **options})
    trainer.train()
    trainer.close()
    return [(one["all"], one["norm"], one["own"]) for one in logs.seen]


def test_micro_batches_of_the_end_of_the_data_that_are_only_padding_do_not_weigh_in_the_average() -> None:
    """Ten rows in micro-batches of two, for two ranks, each of them two that share its rows: the fifth is alone."""
    ids = torch.randint(300, (10, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[2:4, 3:] = -100  # all in the stretch of the first of the ranks that share them
    torch.save({"input_ids": ids, "labels": labels}, "ten.pt")
    alone = _averaged(0, 1, {"train__checkpoint": {"output_dir": "one", "save_hf_weights": False}})
    helpers = {"PYTHONPATH": str(Path(__file__).parent)}
    split = {"train__accelerator": {"cp": 2}}
    ranks = run_world(_averaged, 4, split, init_process_group=False, env=helpers)
    assert len(alone) == STEPS
    for step, (loss, norm, own) in enumerate(alone):
        assert own == loss
        for seen in ranks:
            assert seen[step][:2] == pytest.approx((loss, norm), rel=1e-5)
    owns = [seen[-1][2] for seen in ranks]
    assert (6 * owns[0] + 5 * owns[1]) / 11 == pytest.approx(alone[-1][0], rel=1e-5)
    assert owns[2:] == [0.0, 0.0]
