"""Real gloo processes: every layout starts from the same bits, and units, dtypes and recomputation are as asked for.

What tensor and context parallelism compute is compared with one process in test_layouts.py.
"""

import traceback
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_models.qwen3_5_v2 import parallelize_qwen3_5_v2, qwen3_5_config
from hp_protocols.distributed import ParallelDims, canonical_fqn
from hp_protocols.errors import ConfigError
from hp_protocols.testing import run_world

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["full_attention", "linear_attention"],
    "mrope_section": (1, 1, 0),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
EVEN, UNEVEN = 64, 61
"""Vocabularies that two ranks can and cannot cut into equal halves."""


def run_config(*, tp=1, cp=1, sp=True, loss_parallel=True, **changes):
    """The sections of a trainer config that the model reads."""
    given = {
        "dtype": "float32",
        "param": "float32",
        "reduce": "float32",
        "offload": False,
        "ac": "none",
        "compile": "none",
        "reshard": "default",
        "seq_len": 8,
    }
    given.update(changes)
    return SimpleNamespace(
        training=SimpleNamespace(
            seq_len=given["seq_len"],
            dtype=given["dtype"],
            mixed_precision_param=given["param"],
            mixed_precision_reduce=given["reduce"],
            enable_cpu_offload=given["offload"],
        ),
        parallelism=SimpleNamespace(
            tensor_parallel_degree=tp,
            context_parallel_degree=cp,
            enable_sequence_parallel=sp,
            disable_loss_parallel=not loss_parallel,
            fsdp_reshard_after_forward=given["reshard"],
        ),
        activation_checkpoint=SimpleNamespace(
            mode=given["ac"], preserve_rng_state=True, determinism_check="default", early_stop=False, debug=False
        ),
        compile=SimpleNamespace(mode=given["compile"], backend="eager"),
    )


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def build(world_size, *, dims=None, vocab_size=UNEVEN, tied=False, seed=5, **run):
    """The trainer's order: meta device, parallelize, memory, initialise."""
    parallel_dims = ParallelDims(world_size=world_size, **(dims or {}))
    config = qwen3_5_config(vocab_size=vocab_size, tie_word_embeddings=tied, **SIZES)
    trainer_config = run_config(tp=parallel_dims.tp, **run)
    config.update_from_config(trainer_config=trainer_config)
    with torch.device("meta"):
        model = config.build()
    model = parallelize_qwen3_5_v2(model, parallel_dims=parallel_dims, trainer_config=trainer_config)
    model.to_empty(device="cpu")
    model.init_states(buffer_device=torch.device("cpu"), seed=seed)
    return model, parallel_dims


def move_norms(model):
    """Away from zero, by values that depend on the name only, so that a wrong norm would show."""
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if "norm" in name:
                parameter.add_(0.1 * (index % 7 + 1))
            elif "A_log" in name:
                parameter.mul_(0.3).sub_(2.0)  # Slow decay: fast ones have hardly a gradient.


def gathered(model):
    return {canonical_fqn(name): whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def initial_state(world_size, **options):
    model, _ = build(world_size, **options)
    return gathered(model), list(model.state_dict())


def step(world_size, **options):
    """Logits, and gathered gradients, of one batch; each data-parallel rank computes its share of the rows."""
    model, dims = build(world_size, **options)
    move_norms(model)
    share = slice(None)
    if dims.batch > 1:
        rows, index = 4 // dims.batch, dims.get_mesh("batch").get_local_rank()
        share = slice(index * rows, (index + 1) * rows)
    ids = torch.randint(0, UNEVEN, (4, 8), generator=torch.Generator().manual_seed(0))
    logits = model(ids[share])
    weight = torch.randn(4, 8, UNEVEN, generator=torch.Generator().manual_seed(1))[share]
    # The sum over ranks of their losses is the loss of the whole batch.
    (whole(logits).float() * weight).sum().backward()
    gradients = {canonical_fqn(name): whole(p.grad).clone() for name, p in model.named_parameters()}
    return whole(logits).detach().clone(), gradients


def units(world_size, **options):
    """The modules that FSDP gathers together, and those alone."""
    model, _ = build(world_size, **options)
    return [canonical_fqn(name) for name, module in model.named_modules() if hasattr(module, "unshard")]


def dtypes(world_size, **options):
    model, _ = build(world_size, **options)
    kept = {parameter.dtype for parameter in model.parameters()}
    logits = model(torch.zeros(1, 8, dtype=torch.int64))
    return kept, logits.dtype, model.rotary_emb.inv_freq.dtype


def still_gathered(world_size, **options):
    """Which units hold whole parameters between forward and backward."""
    model, _ = build(world_size, **options)
    model(torch.zeros(1, 8, dtype=torch.int64))
    states = {canonical_fqn(name): isinstance(p, DTensor) for name, p in model.named_parameters()}
    return [unit for unit in ("embed_tokens", "layers.0", "layers.1", "lm_head") if not states[first_of(states, unit)]]


def first_of(names, unit):
    return next(name for name in names if name.startswith(unit))


def block_calls(world_size, **options):
    """How often the first feed-forward block runs in one step, and whether its layer is compiled."""
    model, _ = build(world_size, **options)
    calls = []
    block = model.layers[0]
    while not hasattr(block, "mlp"):
        (block,) = block.children()
    if options.get("compile") != "blocks":  # A hook would be compiled away.
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    return len(calls), any(module._compiled_call_impl is not None for module in model.layers)


def reduced_in(world_size, **options):
    """Whether every gradient is a bf16 number, as it is when ranks sum them in bf16."""
    model, _ = build(world_size, **options)
    ids = torch.randint(0, UNEVEN, (2, 8), generator=torch.Generator().manual_seed(0))
    model(ids).float().square().sum().backward()
    return all(torch.equal(whole(p.grad).bfloat16().to(p.grad.dtype), whole(p.grad)) for p in model.parameters())


BETWEEN_BLOCKS = ("embed_tokens", "layers.0", "layers.0.self_attn", "layers.0.mlp", "layers.1.linear_attn", "norm")
WITHIN_BLOCKS = (
    *("layers.0.self_attn.q_proj", "layers.0.self_attn.k_norm", "layers.0.mlp.up_proj"),
    *("layers.1.linear_attn.in_proj_q", "layers.1.linear_attn.in_proj_a", "layers.1.linear_attn.norm"),
)
PARTS = (*BETWEEN_BLOCKS, *WITHIN_BLOCKS, "lm_head")


def layouts(world_size, **options):
    """How the output of each part lies on the tensor-parallel axis."""
    model, _ = build(world_size, **options)
    found = {}

    def note(name, output):
        (placement,) = output.placements
        found[name] = placement

    for name in PARTS:
        model.get_submodule(name).register_forward_hook(lambda _module, _inputs, output, name=name: note(name, output))
    model(torch.zeros(1, 8, dtype=torch.int64))
    return found


def is_distributed(world_size, **options):
    model, _ = build(world_size, **options)
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def refusal(world_size, **options):
    try:
        build(world_size, **options)
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def run_cases(rank, world_size, cases_name):
    """Every case in one world, which takes seconds to start. Returns results, and tracebacks of cases that failed.

    The cases are named, not sent: a new process may not know this module by the name that pytest gave it.
    """
    results, failures = {}, {}
    for name, (function, options) in globals()[cases_name].items():
        try:
            results[name] = function(world_size, **options)
        except Exception:
            failures[name] = traceback.format_exc()
    return results, failures


def assert_same_bits(states, reference):
    assert states.keys() == reference.keys()
    for name, value in reference.items():
        assert torch.equal(states[name], value), name


def assert_agrees(results, reference, *, tolerance=1e-5):
    """Every rank has the whole gradients; the logits of data-parallel ranks are the rows of the batch, in order."""
    expected_logits, expected = reference
    logits = torch.cat([r[0] for r in results]) if results[0][0].shape[0] < 4 else results[0][0]
    assert (logits - expected_logits).norm() <= tolerance * expected_logits.norm()
    for _, gradients in results:
        assert gradients.keys() == expected.keys()
        for name, value in expected.items():
            assert (gradients[name] - value).norm() <= tolerance * value.norm(), name


DDP = {"dp_replicate": 2, "dp_shard": 1}
TP = {"tp": 2, "dp_shard": 1}
SHAPES = {"uneven": {}, "even": {"vocab_size": EVEN}, "tied": {"tied": True}}
LAYOUTS = {"fsdp": {}, "ddp": {"dims": DDP}, "tp": {"dims": TP}}
EXTRAS = {
    "plain": {},
    "tied": {"tied": True},
    "selective": {"ac": "selective"},
    "full": {"ac": "full"},
    "compiled": {"compile": "blocks"},
    "compiled full": {"compile": "blocks", "ac": "full"},
    "never reshard": {"reshard": "never"},
}
OFF_ONE = {"tied"}
"""What changes the computation itself, and so the reference."""

CASES_OF_TWO = {
    **{f"init {n}, {s}": (initial_state, {**LAYOUTS[n], **SHAPES[s]}) for n in LAYOUTS for s in SHAPES},
    **{f"step fsdp, {extra}": (step, options) for extra, options in EXTRAS.items()},
    **{f"step ddp, {extra}": (step, {"dims": DDP, **EXTRAS[extra]}) for extra in ("plain", "tied")},
    "step tp, tied": (step, {"dims": TP, "tied": True}),
    "units": (units, {"ac": "full"}),
    "bf16": (dtypes, {"param": "bfloat16"}),
    **{f"gathered, {policy}": (still_gathered, {"reshard": policy}) for policy in ("default", "always", "never")},
    **{f"calls, {mode}": (block_calls, {"ac": mode}) for mode in ("none", "selective", "full")},
    "calls, compiled": (block_calls, {"compile": "blocks"}),
    **{f"reduce, {dtype}": (reduced_in, {"reduce": dtype}) for dtype in ("float32", "bfloat16")},
    **{f"reduce ddp, {dtype}": (reduced_in, {"dims": DDP, "reduce": dtype}) for dtype in ("float32", "bfloat16")},
    **{
        f"layouts, {sp}, {cut}": (layouts, {"dims": TP, "sp": sp, "loss_parallel": cut})
        for sp in (False, True)
        for cut in (False, True)
    },
    "graph": (is_distributed, {"compile": "graph"}),
}
CASES_OF_ONE = {"bf16": CASES_OF_TWO["bf16"]}
CASES_OF_FOUR = {
    **{f"init {s}": (initial_state, {"dims": {"tp": 2, "dp_shard": 2}, **SHAPES[s]}) for s in SHAPES},
    "step": (step, {"dims": {"tp": 2, "dp_shard": 2}}),
    "step hsdp": (step, {"dims": {"dp_replicate": 2, "dp_shard": 2}}),
    "step replicated tp": (step, {"dims": {"dp_replicate": 2, "tp": 2, "dp_shard": 1}}),
}


class Results:
    """By case, what each process returned; reading a case that failed fails the test with its traceback."""

    def __init__(self, world_size, cases_name):
        self.by_rank = run_world(run_cases, world_size, cases_name, timeout=300)

    def __getitem__(self, case):
        for _, failures in self.by_rank:
            if case in failures:
                pytest.fail(failures[case], pytrace=False)
        return [results[case] for results, _ in self.by_rank]


@pytest.fixture(scope="module")
def of_two():
    return Results(2, "CASES_OF_TWO")


@pytest.fixture(scope="module")
def of_four():
    return Results(4, "CASES_OF_FOUR")


def assert_starts_alike(results, shape):
    reference, names = initial_state(1, **SHAPES[shape])
    for states, its_names in results:
        assert_same_bits(states, reference)
        assert its_names == names


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_start_from_the_bits_of_one_and_keep_its_names(of_two, layout, shape):
    assert_starts_alike(of_two[f"init {layout}, {shape}"], shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_and_data_parallelism_together_start_from_the_bits_of_one_process(of_four, shape):
    assert_starts_alike(of_four[f"init {shape}"], shape)


@pytest.mark.parametrize("case", [name for name in CASES_OF_TWO if name.startswith("step ")])
def test_two_processes_compute_what_one_does(of_two, case):
    _, options = CASES_OF_TWO[case]
    reference = step(1, **{name: value for name, value in options.items() if name in OFF_ONE})
    assert_agrees(of_two[case], reference)


@pytest.mark.parametrize("case", ["step", "step replicated tp"])
def test_tensor_and_data_parallelism_together_compute_what_one_process_does(of_four, case):
    results = of_four[case]
    # Ranks 0 and 1 share the first half of the rows, ranks 2 and 3 the second.
    assert_agrees([results[0], results[2]], step(1))
    assert_agrees([results[1], results[3]], step(1))


def test_sharding_within_replicas_computes_what_one_process_does(of_four):
    assert_agrees(of_four["step hsdp"], step(1))


def test_recomputation_changes_no_bit(of_two):
    for case in ("step fsdp, selective", "step fsdp, full"):
        for mine, plain in zip(of_two[case], of_two["step fsdp, plain"], strict=True):
            assert torch.equal(mine[0], plain[0])
            assert_same_bits(mine[1], plain[1])


@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("cut", [False, True], ids=["gathered logits", "cut logits"])
def test_activations_lie_on_the_tensor_parallel_axis_as_declared(of_two, sp, cut):
    expected = {
        **dict.fromkeys(BETWEEN_BLOCKS, Shard(1) if sp else Replicate()),
        # Heads, and hidden channels: for k_norm dim 2 of [batch, sequence, heads, channels], else the last dim.
        **dict.fromkeys(WITHIN_BLOCKS, Shard(2)),
        "lm_head": Shard(2) if cut else Replicate(),
    }
    for found in of_two[f"layouts, {sp}, {cut}"]:
        assert found == expected


def test_blocks_are_recomputed_or_compiled_where_the_run_says_so(of_two):
    for case, expected in {"none": (1, False), "selective": (2, False), "full": (2, False)}.items():
        assert of_two[f"calls, {case}"] == [expected, expected], case
    assert of_two["calls, compiled"] == [(0, True), (0, True)]


@pytest.mark.parametrize(
    ("policy", "gathered"),
    [("default", ["lm_head"]), ("always", []), ("never", ["embed_tokens", "layers.0", "layers.1", "lm_head"])],
)
def test_units_stay_gathered_after_forward_as_the_policy_says(of_two, policy, gathered):
    assert of_two[f"gathered, {policy}"] == [gathered, gathered]


@pytest.mark.parametrize("kind", ["reduce", "reduce ddp"])
def test_gradients_are_summed_in_the_dtype_that_the_run_says(of_two, kind):
    assert of_two[f"{kind}, float32"] == [False, False]
    assert of_two[f"{kind}, bfloat16"] == [True, True]


def test_the_embedding_each_block_and_the_last_layers_are_gathered_on_their_own(of_two):
    assert of_two["units"][0] == ["", "embed_tokens", "layers.0", "layers.1", "norm", "lm_head"]


def test_one_process_in_one_dtype_stays_a_plain_model():
    assert not is_distributed(1)


def test_mixed_precision_computes_in_bf16_and_keeps_fp32_with_two_processes_and_with_one(of_two):
    of_one = Results(1, "CASES_OF_ONE")
    for result in (*of_one["bf16"], *of_two["bf16"]):
        assert result == ({torch.float32}, torch.bfloat16, torch.float32)


def test_under_graph_mode_data_parallelism_is_left_to_the_graph(of_two):
    assert of_two["graph"] == [False, False]


@pytest.mark.parametrize(
    ("dims", "where"),
    [({"pp": 2}, "parallelism.pipeline_parallel_degree"), ({"ep": 2}, "parallelism.expert_parallel_degree")],
)
def test_pipeline_and_expert_parallelism_are_refused_by_name(dims, where):
    assert where in refusal(2, dims=dims)


def test_offloading_without_sharding_is_refused_by_name():
    assert "training.enable_cpu_offload" in refusal(2, dims=DDP, offload=True)
