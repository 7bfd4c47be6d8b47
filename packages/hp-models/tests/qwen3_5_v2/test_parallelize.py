"""Real gloo processes: every layout starts from the same bits and computes what one process computes."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor

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
    "layer_types": ["full_attention"] * 2,
    "mrope_section": (1, 1, 0),
}
EVEN, UNEVEN = 64, 61
"""Vocabularies that two ranks can and cannot cut into equal halves."""


def run_config(*, tp=1, sp=True, loss_parallel=True, **changes):
    """The sections of a trainer config that the model reads."""
    given = {
        "dtype": "float32",
        "param": "float32",
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
            mixed_precision_reduce="float32",
            enable_cpu_offload=given["offload"],
        ),
        parallelism=SimpleNamespace(
            tensor_parallel_degree=tp,
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


def gathered(model):
    return {canonical_fqn(name): whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def initial_state(rank, world_size, options):
    model, _ = build(world_size, **options)
    return gathered(model), list(model.state_dict())


def inputs(masked, share):
    """Token ids of four rows; `masked` adds a padding mask and packed documents."""
    ids = torch.randint(0, UNEVEN, (4, 8), generator=torch.Generator().manual_seed(0))
    if not masked:
        return ids[share], {}
    padding = torch.ones(4, 8, dtype=torch.int64)
    padding[:, :2] = 0
    rows = len(ids[share])
    bounds = [0, 3, *range(8, 8 * rows + 1, 8)]
    return ids[share], {"attention_mask": padding[share], "cu_seqlens": bounds}


def step(rank, world_size, options, masked=False):
    """Logits, and gathered gradients, of one batch; each data-parallel rank computes its share of the rows."""
    model, dims = build(world_size, **options)
    move_norms(model)
    share = slice(None)
    if dims.batch > 1:
        rows, index = 4 // dims.batch, dims.get_mesh("batch").get_local_rank()
        share = slice(index * rows, (index + 1) * rows)
    ids, extra = inputs(masked, share)
    logits = model(ids, **extra)
    weight = torch.randn(4, 8, UNEVEN, generator=torch.Generator().manual_seed(1))[share]
    # The sum over ranks of their losses is the loss of the whole batch.
    (whole(logits).float() * weight).sum().backward()
    gradients = {canonical_fqn(name): whole(p.grad).clone() for name, p in model.named_parameters()}
    return whole(logits).detach().clone(), gradients


def one_process(options=None, masked=False):
    options = {key: value for key, value in (options or {}).items() if key in ("tied", "vocab_size", "seed")}
    return step(0, 1, options, masked)


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


FSDP2 = {}
DDP2 = {"dims": {"dp_replicate": 2, "dp_shard": 1}}
TP2 = {"dims": {"tp": 2, "dp_shard": 1}, "sp": False, "loss_parallel": False}
TP2_SP = {"dims": {"tp": 2, "dp_shard": 1}}
TP2_FSDP2 = {"dims": {"tp": 2, "dp_shard": 2}}


@pytest.mark.parametrize("shape", [{}, {"vocab_size": EVEN}, {"tied": True}], ids=["uneven", "even", "tied"])
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, FSDP2), (2, DDP2), (2, TP2_SP), (4, TP2_FSDP2)],
    ids=["fsdp2", "ddp2", "tp2", "tp2 fsdp2"],
)
def test_every_layout_starts_from_the_bits_of_one_process(world_size, layout, shape):
    reference, names = initial_state(0, 1, shape)
    for states, its_names in run_world(initial_state, world_size, {**layout, **shape}):
        assert_same_bits(states, reference)
        assert its_names == names


@pytest.mark.parametrize("layout", [FSDP2, DDP2], ids=["fsdp", "ddp"])
@pytest.mark.parametrize(
    "extra",
    [{}, {"tied": True}, {"ac": "selective"}, {"ac": "full"}, {"compile": "blocks"}],
    ids=["plain", "tied", "selective", "full", "compiled"],
)
def test_two_data_parallel_processes_compute_what_one_does(layout, extra):
    assert_agrees(run_world(step, 2, {**layout, **extra}), one_process(extra))


@pytest.mark.parametrize("sp", [False, True], ids=["whole activations", "sequence parallel"])
@pytest.mark.parametrize("loss_parallel", [False, True], ids=["gathered logits", "cut logits"])
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
def test_two_tensor_parallel_processes_compute_what_one_does(sp, loss_parallel, masked):
    layout = {"dims": {"tp": 2, "dp_shard": 1}, "sp": sp, "loss_parallel": loss_parallel}
    assert_agrees(run_world(step, 2, layout, masked), one_process(masked=masked))


def test_a_tied_matrix_keeps_both_gradients_under_tensor_parallelism():
    assert_agrees(run_world(step, 2, {**TP2_SP, "tied": True}), one_process({"tied": True}))


def test_tensor_and_data_parallelism_together_compute_what_one_process_does():
    results = run_world(step, 4, TP2_FSDP2)
    # Ranks 0 and 1 share the first half of the rows, ranks 2 and 3 the second.
    assert_agrees([results[0], results[2]], one_process())
    assert_agrees([results[1], results[3]], one_process())


def units(rank, world_size, options):
    model, _ = build(world_size, **options)
    return [canonical_fqn(name) for name, module in model.named_modules() if hasattr(module, "unshard")]


def test_the_embedding_each_block_and_the_last_layers_are_gathered_on_their_own():
    assert run_world(units, 2, {"ac": "full"})[0] == ["", "embed_tokens", "layers.0", "layers.1", "norm", "lm_head"]


def test_one_process_in_one_dtype_stays_a_plain_model():
    model, _ = build(1)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def mixed_dtypes(rank, world_size):
    model, _ = build(world_size, param="bfloat16")
    logits = model(torch.zeros(1, 8, dtype=torch.int64))
    return {str(p.dtype) for p in model.parameters()}, str(logits.dtype), str(model.rotary_emb.inv_freq.dtype)


def test_mixed_precision_computes_in_bf16_and_keeps_fp32_also_with_one_process():
    for world_size in (1, 2):
        for parameters, logits, frequencies in run_world(mixed_dtypes, world_size):
            assert (parameters, logits, frequencies) == ({"torch.float32"}, "torch.bfloat16", "torch.float32")


def graph_is_plain(rank, world_size):
    model, _ = build(world_size, compile="graph")
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_under_graph_mode_data_parallelism_is_left_to_the_graph():
    assert run_world(graph_is_plain, 2) == [False, False]


def refusal(rank, world_size, options):
    try:
        build(world_size, **options)
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def test_context_parallelism_is_refused_by_name():
    for text in run_world(refusal, 2, {"dims": {"cp": 2}}):
        assert "parallelism.context_parallel_degree" in text
        assert "not available yet" in text


@pytest.mark.parametrize(
    ("dims", "where"),
    [({"pp": 2}, "parallelism.pipeline_parallel_degree"), ({"ep": 2}, "parallelism.expert_parallel_degree")],
)
def test_pipeline_and_expert_parallelism_are_refused_by_name(dims, where):
    assert where in refusal(0, 2, {"dims": dims})


def test_offloading_without_sharding_is_refused_by_name():
    assert "training.enable_cpu_offload" in refusal(0, 2, {**DDP2, "offload": True})
