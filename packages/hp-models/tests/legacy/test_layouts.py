"""Real gloo processes: the bare model trains in every layout to the bits of v2, and as one process does, to rounding.

Losses and norms of two clipped AdamW steps of two micro-batches, the first gradients and the last weights.
"""

from __future__ import annotations

import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from hp_models._legacy.parallelize import parallelize_bare_model
from hp_models._legacy.spec import build_qwen3_5
from hp_models.qwen3_5_v2 import parallelize_qwen3_5_v2, qwen3_5_config
from hp_protocols.distributed import (
    ParallelDims,
    SequenceAxis,
    canonical_fqn,
    canonical_named_parameters,
    clip_grad_norm_,
)
from hp_protocols.errors import ConfigError
from hp_protocols.local_pieces import local_piece
from hp_protocols.testing import run_world

VOCABULARY = 61  # No multiple of any number of ranks.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_theta": 10_000.0,
    "layer_types": ("linear_attention", "full_attention"),
}
ROWS, LENGTH, STEPS, MICRO_BATCHES = 4, 140, 2, 2  # Two chunks of linear attention in half of a row.


def sections(dims: ParallelDims, *, mixed: bool = False, ac: str = "none") -> Any:
    """The parts of a trainer config that the models read."""
    training = {"mixed_precision_param": "bfloat16" if mixed else "float32", "mixed_precision_reduce": "float32"}
    return SimpleNamespace(
        training=SimpleNamespace(seq_len=LENGTH, dtype="float32", enable_cpu_offload=False, **training),
        parallelism=SimpleNamespace(
            tensor_parallel_degree=dims.tp,
            context_parallel_degree=dims.cp,
            enable_sequence_parallel=False,
            disable_loss_parallel=False,
            fsdp_reshard_after_forward="default",
        ),
        activation_checkpoint=SimpleNamespace(
            mode=ac, preserve_rng_state=True, determinism_check="default", early_stop=False, debug=False
        ),
        compile=SimpleNamespace(mode="none", backend="eager"),
    )


def values(tied: bool) -> dict[str, torch.Tensor]:
    """Weights of which none is at a value that would hide a mistake; slow decay, so that stretches matter."""
    torch.manual_seed(0)
    model = build_qwen3_5(**SIZES, num_hidden_layers=2, tie_word_embeddings=tied)
    model.init_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
            if "A_log" in name:
                parameter.mul_(0.3).sub_(2.0)
    return model.state_dict()


def built(kind: str, dims: ParallelDims, *, tied: bool, plan: dict[str, str] | None, **options: Any) -> torch.nn.Module:
    """The trainer's order: meta device, parallelize, memory, values."""
    run = sections(dims, **options)
    with torch.device("meta"):
        if kind == "bare":
            bare = build_qwen3_5(**SIZES, num_hidden_layers=2, tie_word_embeddings=tied, tp_plan=plan)
            names = list(bare.state_dict())
        else:
            config = qwen3_5_config(**SIZES, mrope_section=(1, 1, 0), tie_word_embeddings=tied)
            config.update_from_config(trainer_config=run)
            declared = config.build()
    if kind == "bare":
        model: Any = parallelize_bare_model(bare, parallel_dims=dims, trainer_config=run)
        assert [canonical_fqn(name) for name in model.state_dict()] == names
    else:
        model = parallelize_qwen3_5_v2(declared, parallel_dims=dims, trainer_config=run)
    model.to_empty(device="cpu")
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    if kind == "v2":
        model.init_states(buffer_device=torch.device("cpu"), seed=0)
    state = values(tied)
    with torch.no_grad():
        for name, parameter in canonical_named_parameters(model):
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                place = (parameter.placements, tuple(mesh.shape), mesh.get_coordinate())
                parameter.to_local().copy_(local_piece(state[name], *place))
            else:
                parameter.copy_(state[name])
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(
    kind: str,
    world_size: int,
    dims: dict[str, int],
    *,
    tied: bool = False,
    padded: bool = False,
    plan: Any = None,
    **options: Any,
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(loss, norm) of each step, the first step's gradients, the weights at the end; gathered."""
    layout = ParallelDims(world_size=world_size, **dims)
    model = built(kind, layout, tied=tied, plan=plan, **options)
    named = [(canonical_fqn(name), parameter) for name, parameter in model.named_parameters()]
    optimizer = torch.optim.AdamW([parameter for _, parameter in named], lr=3e-3, foreach=False)
    count = ROWS // layout.batch
    first = count * (layout.get_mesh("batch").get_local_rank() if layout.batch > 1 else 0)
    generator = torch.Generator().manual_seed(7)
    padding = torch.arange(LENGTH) >= torch.tensor([[0], [3], [LENGTH // 2 + 5], [0]])
    mask = padding[first : first + count] if padded else None
    seen, gradients = [], {}
    for step in range(STEPS):
        total = torch.zeros(())
        for _ in range(MICRO_BATCHES):
            ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)[first : first + count]
            labels = ids[:, 1:]
            if layout.cp > 1:
                labels = SequenceAxis(layout.get_mesh("cp")).cut(labels, 1)
            logits = whole(model(ids[:, :-1], attention_mask=mask)).float()
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss / (MICRO_BATCHES * ROWS * LENGTH)
            loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        if step == 0:
            gradients = {name: whole(parameter.grad).clone() for name, parameter in named}
        optimizer.step()
        optimizer.zero_grad()
        if layout.loss > 1:
            torch.distributed.all_reduce(total, group=layout.get_mesh("loss").get_group())
        seen.append((total.item(), norm.item()))
    return seen, gradients, {name: whole(parameter).detach().clone() for name, parameter in named}


TP, CP, HSDP = {"tp": 2}, {"cp": 2}, {"dp_replicate": 2}
MIXED, RECOMPUTED = {"mixed": True}, {"ac": "full"}
ATTENTION_WHOLE = {"layers.*.self_attn.*": "replicate", "lm_head": "replicate"}
# World size → case → degrees and options.
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tp 2": {"dims": TP},
        "tp 2, recomputed": {"dims": TP, **RECOMPUTED},
        "tp 2, mixed precision": {"dims": TP, **MIXED},
        "tp 2, tied": {"dims": TP, "tied": True},
        "cp 2": {"dims": CP},
        "cp 2, recomputed": {"dims": CP, **RECOMPUTED},
    },
    4: {
        "tp 2 x fsdp 2": {"dims": TP},
        "tp 2 x fsdp 2, mixed and recomputed": {"dims": TP, **MIXED, **RECOMPUTED},
        "cp 2 x fsdp 2": {"dims": CP},
        "cp 2 x fsdp 2, mixed and recomputed": {"dims": CP, **MIXED, **RECOMPUTED},
        "cp 2 x tp 2, padded": {"dims": CP | TP, "padded": True},
        "cp 4": {"dims": {"cp": 4}},  # A third stretch is the first with a state that two others made.
        "hsdp 2 x 2": {"dims": HSDP},
        "ddp 4": {"dims": {"dp_replicate": 4}},
        "ddp 2 x tp 2": {"dims": HSDP | TP},
    },
}


def run_cases(rank: int, world_size: int) -> dict[str, Any]:
    """Every case in one world, which takes seconds to start. Results, and tracebacks of cases that failed."""
    found: dict[str, Any] = {}
    for case, options in CASES[world_size].items():
        try:
            found[case] = [train(kind, world_size, **options) for kind in ("bare", "v2")]
        except Exception:
            found[case] = traceback.format_exc()
    if world_size == 2:
        # Fewer matrices than the plan of the model cuts: v2 has nothing like it.
        found["attention whole"] = train("bare", 2, TP, plan=ATTENTION_WHOLE)
    return found


@pytest.fixture(scope="module")
def worlds() -> dict[int, Any]:
    return {world_size: run_world(run_cases, world_size, timeout=300) for world_size in CASES}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One process, by what changes the result."""
    return {"": train("bare", 1, {}), **{what: train("bare", 1, {}, **{what: True}) for what in ("tied", "padded")}}


def assert_close(found: Any, expected: Any) -> None:
    for step, other in zip(found[0], expected[0], strict=True):
        assert step == pytest.approx(other, rel=1e-5)
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize(("world_size", "case"), [(size, case) for size in CASES for case in CASES[size]])
def test_a_layout_trains_to_the_bits_of_v2_and_as_one_process_does(
    worlds: Any, alone: Any, world_size: int, case: str
) -> None:
    options = CASES[world_size][case]
    for result in worlds[world_size]:
        if isinstance(result[case], str):
            pytest.fail(result[case], pytrace=False)
        bare, declared = result[case]
        assert bare[0] == declared[0]
        for ours, theirs in zip(bare[1:], declared[1:], strict=True):
            assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
        if not options.get("mixed"):
            assert_close(bare, alone[next((what for what in ("tied", "padded") if what in options), "")])


def test_recomputation_changes_no_bit(worlds: Any) -> None:
    for axis in ("tp 2", "cp 2"):
        plain, recomputed = (worlds[2][0][case][0] for case in (axis, f"{axis}, recomputed"))
        assert plain[0] == recomputed[0]
        assert all(torch.equal(recomputed[2][name], weight) for name, weight in plain[2].items())


def test_what_a_plan_takes_out_is_computed_whole_by_every_rank(worlds: Any, alone: Any) -> None:
    for result in worlds[2]:
        assert_close(result["attention whole"], alone[""])


def refusal(dims: dict[str, int], **options: Any) -> str:
    """What is said of a layout, before a process group is needed."""
    model = build_qwen3_5(**{**SIZES, "num_hidden_layers": 2, **options})
    layout = ParallelDims(**{"dp_shard": 1, **dims})
    with pytest.raises(ConfigError) as refused:
        parallelize_bare_model(model, parallel_dims=layout, trainer_config=sections(layout))
    return str(refused.value)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"layers.*.mlp.gate_prj": "colwise"}, "model.tp_plan[layers.*.mlp.gate_prj]: matches no Linear"),
        ({"layers.*.up_proj": "colwise"}, "matches no Linear, no Embedding and no parameter of the model"),
        ({"lm_head": "colwse"}, "'colwse' is no way to split a matrix; allowed: colwise, rowwise, replicate"),
        ({"layers.0.mlp.down_proj": "colwise"}, "layers.0.mlp: gate_proj colwise, up_proj colwise, down_proj colwise"),
        ({"layers.*.mlp.up_proj": "replicate"}, "layers.0.mlp (and 1 more): gate_proj colwise, up_proj replicate"),
        ({"layers.*.input_layernorm.weight": "colwise"}, "allowed: weight replicate; or all replicate"),
        ({"embed_tokens": "rowwise"}, "model.tp_plan[embed_tokens]: rowwise: the vocabulary is dim 0"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(plan: dict[str, str], said: str) -> None:
    # Also where nothing is split: the same file is meant for several layouts.
    for dims in ({}, {"tp": 2, "world_size": 2}):
        assert said in refusal(dims, tp_plan=plan)


def test_tied_matrices_are_cut_alike() -> None:
    said = refusal({}, tp_plan={"lm_head": "replicate"}, tie_word_embeddings=True)
    assert "embed_tokens colwise, lm_head replicate: they are one matrix (tied)" in said


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("core",), "'core' matches no module; allowed: layers.*.self_attn.core, layers.*.linear_attn.core"),
        (("layers.*.mlp",), "layers.0.mlp does not mix tokens"),
        (("layers.*.self_attn.core",), "layers.0.linear_attn.core mixes tokens and is not named"),
    ],
)
def test_modules_for_context_parallelism_that_do_not_fit_are_refused(names: tuple[str, ...], said: str) -> None:
    assert said in refusal({"cp": 2, "world_size": 2}, cp_modules=names)


def test_what_ranks_cannot_share_is_refused_with_a_way_out() -> None:
    said = refusal({"tp": 4, "world_size": 4})
    assert "train.accelerator.tp: 4 ranks cannot share num_key_value_heads 2 evenly; allowed: 1, 2" in said
    assert "model.tp_plan: {'layers.*.self_attn.*': replicate}" in said
    assert "linear_num_key_heads 2" in said
    assert "intermediate_size" not in said
    assert "one would have none of 5 tokens" in refusal({"tp": 4, "world_size": 4}, vocab_size=5)
    assert "train.accelerator.pp: 2: the bare model" in refusal({"pp": 2, "world_size": 2})
