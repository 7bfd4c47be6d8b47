"""Real gloo processes: a hybrid model computes in every layout what one process computes, to rounding.

Loss, logits of each rank's rows and tokens, every gradient gathered, and the gradient norm: fp64 to 1e-10, fp32 to
1e-5; with padding and packed documents too. In fp64 nothing but the order of sums may differ.
"""

import traceback
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor

from hp_models.qwen3_5_v2 import parallelize_qwen3_5_v2, qwen3_5_config
from hp_protocols.distributed import ParallelDims, SequenceAxis, canonical_fqn, clip_grad_norm_
from hp_protocols.testing import run_world

VOCABULARY = 61  # No multiple of any number of ranks.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mrope_section": (1, 1, 0),
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
ROWS = 8


def run_config(dims, length, *, dtype, sp, gathered, ac, compiled):
    """The sections of a trainer config that the model reads."""
    return SimpleNamespace(
        training=SimpleNamespace(
            seq_len=length,
            dtype=dtype,
            mixed_precision_param=dtype,
            mixed_precision_reduce=dtype,
            enable_cpu_offload=False,
        ),
        parallelism=SimpleNamespace(
            tensor_parallel_degree=dims.tp,
            context_parallel_degree=dims.cp,
            enable_sequence_parallel=sp,
            disable_loss_parallel=gathered,
            fsdp_reshard_after_forward="default",
        ),
        activation_checkpoint=SimpleNamespace(
            mode=ac, preserve_rng_state=True, determinism_check="default", early_stop=False, debug=False
        ),
        compile=SimpleNamespace(mode="blocks" if compiled else "none", backend="eager"),
    )


def build(dims, length, *, dtype, sp=True, gathered=False, ac="none", compiled=False):
    """The trainer's order: meta device, parallelize, memory, initialise."""
    config = qwen3_5_config(**SIZES)
    trainer_config = run_config(dims, length, dtype=dtype, sp=sp, gathered=gathered, ac=ac, compiled=compiled)
    config.update_from_config(trainer_config=trainer_config)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device("meta"):
        model = config.build()
    torch.set_default_dtype(torch.float32)
    model = parallelize_qwen3_5_v2(model, parallel_dims=dims, trainer_config=trainer_config)
    model.to_empty(device="cpu")
    model.init_states(buffer_device=torch.device("cpu"), seed=5)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if "norm" in name:
                parameter.add_(0.1 * (index % 7 + 1))
            elif "A_log" in name:
                parameter.mul_(0.3).sub_(2.0)  # Slow decay: what happened many tokens ago still matters.
    return model


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def inputs(rows, length):
    """Padding on both sides, and three documents in every row, the last of which crosses every middle."""
    padding = torch.ones(ROWS, length, dtype=torch.int64)
    padding[1, :3], padding[2, -3:] = 0, 0
    count = len(padding[rows])
    bounds = sorted({row * length + start for row in range(count) for start in (0, 1, 3)} | {count * length})
    return {"attention_mask": padding[rows], "cu_seqlens": bounds}


def step(world_size, *, dims=None, dtype="float64", length=8, masked=True, **options):
    """Loss of the whole batch, logits of this rank and where they are, gathered gradients, their norm."""
    dims = ParallelDims(world_size=world_size, **(dims or {}))
    model = build(dims, length, dtype=dtype, **options)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (ROWS, length), generator=generator)
    weight = torch.randn(ROWS, length, VOCABULARY, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
    rows = tokens = slice(None)
    if dims.batch > 1:
        count, index = ROWS // dims.batch, dims.get_mesh("batch").get_local_rank()
        rows = slice(index * count, (index + 1) * count)
    if dims.cp > 1:
        tokens = slice(*SequenceAxis(dims.get_mesh("cp")).bounds(length))
    # The model takes whole rows; its logits are those of this rank's tokens.
    logits = whole(model(ids[rows], **(inputs(rows, length) if masked else {})))
    loss = (logits * weight[rows, tokens]).sum()
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), float("inf"))
    gradients = {canonical_fqn(name): whole(p.grad).clone() for name, p in model.named_parameters()}
    total = loss.detach().clone()
    if dims.loss > 1:
        torch.distributed.all_reduce(total, group=dims.get_mesh("loss").get_group())
    laid_out = all(
        parameter.grad.placements == parameter.placements
        for parameter in model.parameters()
        if isinstance(parameter, DTensor)
    )
    return total, (rows, tokens), logits.detach().clone(), gradients, norm, laid_out


KINDS = {
    # Over 4 ranks a stretch of 2 tokens: shorter than the reach of a convolution.
    "fp64": {"dtype": "float64"},
    "fp64, several chunks": {"dtype": "float64", "length": 160, "masked": False},
    "fp32": {"dtype": "float32"},
}
TP2, TP4 = {"tp": 2, "dp_shard": 1}, {"tp": 4, "dp_shard": 1}
CP2, CP4 = {"cp": 2, "dp_shard": 1}, {"cp": 4, "dp_shard": 1}
TP2_FSDP4, ALL = {"tp": 2, "dp_shard": 4}, {"tp": 2, "cp": 2, "dp_shard": 2}
# World size → layout → options. These in fp64 and fp32, and in several chunks where stretches are exchanged …
LAYOUTS = {
    2: {"fsdp 2": {}, "tp 2": {"dims": TP2}, "cp 2": {"dims": CP2}},
    # Tensor parallelism over more ranks than key/value heads.
    4: {"tp 4": {"dims": TP4}, "cp 4": {"dims": CP4}},
    8: {"fsdp 8": {}, "tp 2 x fsdp 4": {"dims": TP2_FSDP4}, "tp 2 x cp 2 x fsdp 2": {"dims": ALL}},
}
# … and these in one.
VARIANTS = {
    2: {
        "tp 2, whole activations": {"dims": TP2, "sp": False},
        "tp 2, gathered logits": {"dims": TP2, "gathered": True},
        "tp 2, recomputed": {"dims": TP2, "ac": "full"},
        "tp 2, compiled": {"dims": TP2, "compiled": True},
        "cp 2, recomputed": {"dims": CP2, "ac": "full"},
        "cp 2, half recomputed": {"dims": CP2, "ac": "selective"},
        "cp 2, compiled": {"dims": CP2, "compiled": True},
    },
    4: {
        "tp 4, whole activations": {"dims": TP4, "sp": False},
        "tp 2 x fsdp 2": {"dims": {"tp": 2, "dp_shard": 2}},
        "cp 2 x tp 2": {"dims": {"cp": 2, "tp": 2, "dp_shard": 1}},
        "replicated 2 x cp 2": {"dims": {"dp_replicate": 2, "cp": 2, "dp_shard": 1}},
    },
    8: {"tp 2 x fsdp 4, whole activations": {"dims": TP2_FSDP4, "sp": False}},
}
CASES = {
    world_size: {
        **{
            (layout, kind): options
            for layout, options in LAYOUTS[world_size].items()
            for kind in KINDS
            if "chunks" not in kind or "cp" in layout
        },
        **{(layout, "fp64"): options for layout, options in VARIANTS[world_size].items()},
    }
    for world_size in LAYOUTS
}
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def run_cases(rank, world_size):
    """Every case in one world, which takes seconds to start. Results, and tracebacks of cases that failed."""
    results = {}
    for (layout, kind), options in CASES[world_size].items():
        try:
            results[layout, kind] = step(world_size, **options, **KINDS[kind])
        except Exception:
            results[layout, kind] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def worlds():
    """By world size the results of its ranks; a world runs when its first case is asked for."""
    ran = {}

    def of(world_size):
        if world_size not in ran:
            ran[world_size] = run_world(run_cases, world_size, timeout=400)
        return ran[world_size]

    return of


@pytest.fixture(scope="module")
def references():
    return {kind: step(1, **options) for kind, options in KINDS.items()}


def differs(value, expected):
    return (value - expected).norm() / expected.norm()


@pytest.mark.parametrize(
    ("world_size", "layout", "kind"), [(size, layout, kind) for size in CASES for layout, kind in CASES[size]]
)
def test_a_layout_computes_what_one_process_does(worlds, references, world_size, layout, kind):
    loss, _, logits, gradients, norm, _ = references[kind]
    tolerance = TOLERANCE[KINDS[kind]["dtype"]]
    for results in worlds(world_size):
        mine = results[layout, kind]
        if isinstance(mine, str):
            pytest.fail(mine, pytrace=False)
        assert differs(mine[0], loss) <= tolerance
        assert differs(mine[2], logits[mine[1]]) <= tolerance
        assert mine[3].keys() == gradients.keys()
        wrong = {name: differs(mine[3][name], value) for name, value in gradients.items()}
        assert {name: by for name, by in wrong.items() if not by <= tolerance} == {}
        assert differs(mine[4], norm) <= tolerance
        assert mine[5], "a gradient that is not laid out as its parameter"
