"""ChunkedCELoss against the loss of whole logits: the same numbers, and never the whole logits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_components import ChunkedCELoss, CrossEntropyLoss
from hp_protocols.distributed import apply_fsdp
from hp_protocols.errors import ConfigError
from hp_protocols.testing import run_world

ROWS, LENGTH, WIDTH, VOCAB = 3, 10, 6, 31


class Model(nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=dtype)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.lm_head = nn.Linear(WIDTH, VOCAB, dtype=dtype)

    def forward(self, ids_BS, *, output_fn=None):
        hidden_BSD = self.norm(self.embed(ids_BS))
        return self.lm_head(hidden_BSD) if output_fn is None else output_fn(self.lm_head, hidden_BSD)


def batch():
    generator = torch.Generator().manual_seed(1)
    ids_BS, labels_BS = torch.randint(VOCAB, (2, ROWS, LENGTH), generator=generator)
    labels_BS[0] = -100
    labels_BS[1, 1:] = -100
    return ids_BS, labels_BS


def chunked(num_chunks=4, **config):
    return ChunkedCELoss.Config(num_chunks=num_chunks, **config).build()


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def by_hand(model, ids_BS, labels_BS, ignore_index=-100):
    logits = model(ids_BS).flatten(0, 1)
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)),
        labels_BS.flatten(),
        reduction="sum",
        ignore_index=ignore_index,
    )


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 7, 10, 99])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 3e-2)]
)
def test_any_number_of_chunks_gives_the_loss_and_gradients_of_whole_logits(num_chunks, dtype, tolerance):
    ids_BS, labels_BS = batch()
    ours, theirs = Model(dtype), Model(dtype)
    loss = chunked(num_chunks).run_model(ours, labels_BS, ids_BS)
    reference = by_hand(theirs, ids_BS, labels_BS)
    assert loss.dtype == reference.dtype
    torch.testing.assert_close(loss, reference, rtol=tolerance, atol=tolerance)
    (loss / 11).backward()
    (reference / 11).backward()
    for name, gradient in gradients(theirs).items():
        torch.testing.assert_close(gradients(ours)[name], gradient, rtol=tolerance, atol=tolerance, msg=name)


def test_gradients_are_the_slopes_of_the_loss():
    ids_BS, labels_BS = batch()
    model, loss_fn = Model(), chunked(3)
    loss_fn.run_model(model, labels_BS, ids_BS).backward()
    for name, parameter in model.named_parameters():
        direction = torch.randn_like(parameter)
        at = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * 1e-6)
                at.append(loss_fn.run_model(model, labels_BS, ids_BS).item())
                parameter.sub_(direction, alpha=sign * 1e-6)
        slope = (parameter.grad * direction).sum().item()
        assert (at[0] - at[1]) / 2e-6 == pytest.approx(slope, rel=1e-6, abs=1e-6), name


def test_gradients_of_micro_batches_add_up():
    ids_BS, labels_BS = batch()
    ours, theirs = Model(), Model()
    for row in range(ROWS):
        chunked().run_model(ours, labels_BS[row : row + 1], ids_BS[row : row + 1]).backward()
    by_hand(theirs, ids_BS, labels_BS).backward()
    for name, gradient in gradients(theirs).items():
        torch.testing.assert_close(gradients(ours)[name], gradient, rtol=1e-12, atol=1e-12)


def test_a_scaled_loss_scales_the_gradients_of_both_paths_alike():
    ids_BS, labels_BS = batch()
    ours, theirs = Model(), Model()
    (chunked().run_model(ours, labels_BS, ids_BS) * 3.5).backward()
    (by_hand(theirs, ids_BS, labels_BS) * 3.5).backward()
    for name, gradient in gradients(theirs).items():
        torch.testing.assert_close(gradients(ours)[name], gradient, rtol=1e-12, atol=1e-12)


def test_a_tied_projection_gets_both_of_its_gradients():
    ids_BS, labels_BS = batch()
    models = Model(), Model()
    for model in models:
        model.lm_head.weight = model.embed.weight
    chunked().run_model(models[0], labels_BS, ids_BS).backward()
    by_hand(models[1], ids_BS, labels_BS).backward()
    torch.testing.assert_close(models[0].embed.weight.grad, models[1].embed.weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", ["embed norm", "lm_head", "lm_head.bias"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(frozen):
    ids_BS, labels_BS = batch()
    models = Model(), Model()
    for model in models:
        for name in frozen.split():
            part = model.get_parameter(name) if "." in name else model.get_submodule(name)
            part.requires_grad_(False)
    chunked().run_model(models[0], labels_BS, ids_BS).backward()
    by_hand(models[1], ids_BS, labels_BS).backward()
    for name, gradient in gradients(models[1]).items():
        if gradient is None:
            assert gradients(models[0])[name] is None, name
        else:
            torch.testing.assert_close(gradients(models[0])[name], gradient, rtol=1e-12, atol=1e-12)


def test_forward_leaves_gradients_of_the_weights_alone_and_no_graph_without_need():
    ids_BS, labels_BS = batch()
    model = Model()
    chunked().run_model(model, labels_BS, ids_BS)
    assert all(gradient is None for gradient in gradients(model).values())
    with torch.no_grad():
        loss = chunked().run_model(model, labels_BS, ids_BS)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, by_hand(model, ids_BS, labels_BS).detach(), rtol=1e-12, atol=1e-12)


def test_gradients_can_be_taken_once_and_a_second_time_says_so():
    ids_BS, labels_BS = batch()
    loss = chunked().run_model(Model(), labels_BS, ids_BS)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be taken once"):
        loss.backward()


def test_without_a_valid_token_loss_and_gradients_are_zero():
    ids_BS, labels_BS = batch()
    model = Model(torch.float32)
    loss = chunked().run_model(model, torch.full_like(labels_BS, -100), ids_BS)
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients(model).values())


def test_another_ignore_index_is_followed():
    ids_BS, labels_BS = batch()
    labels_BS = labels_BS.clamp(min=0)
    model = Model()
    loss = chunked(ignore_index=0).run_model(model, labels_BS, ids_BS)
    torch.testing.assert_close(loss, by_hand(model, ids_BS, labels_BS, 0), rtol=1e-12, atol=1e-12)


def test_given_logits_it_is_the_ordinary_loss():
    ids_BS, labels_BS = batch()
    logits_BSV = Model()(ids_BS)
    assert torch.equal(chunked()(logits_BSV, labels_BS), CrossEntropyLoss.Config().build()(logits_BSV, labels_BS))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation has returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def test_the_logits_never_exist_as_a_whole():
    ids_BS = torch.zeros(4, 64, dtype=torch.int64)
    largest = {}
    for name, loss_fn in (("whole", CrossEntropyLoss.Config().build()), ("chunked", chunked(16))):
        with Largest() as largest[name]:
            loss_fn.run_model(Model(torch.float32), ids_BS, ids_BS).backward()
    assert largest["whole"].elements == 4 * 64 * VOCAB
    assert largest["chunked"].elements == max(4 * 64 // 16 * VOCAB, 4 * 64 * WIDTH)


def test_a_model_that_cannot_hand_out_its_projection_is_refused():
    with pytest.raises(ConfigError, match=r"takes output_fn; Sequential takes none\n.*use CrossEntropyLoss"):
        chunked().check_model(nn.Sequential())
    chunked().check_model(Model())
    CrossEntropyLoss.Config().build().check_model(nn.Sequential())


def test_the_field_and_the_class_make_the_same_thing():
    loss_fn = CrossEntropyLoss.Config(num_chunks=3).build()
    assert type(loss_fn) is ChunkedCELoss
    assert loss_fn.num_chunks == 3
    assert type(CrossEntropyLoss.Config().build()) is CrossEntropyLoss
    assert copy.deepcopy(loss_fn).num_chunks == 3
    assert copy.deepcopy(CrossEntropyLoss.Config(ignore_index=7).build()).ignore_index == 7


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"loss\.num_chunks: -1 is no number of parts; allowed: 0 or more"):
        CrossEntropyLoss.Config(num_chunks=-1).build()
    with pytest.raises(ConfigError, match=r"loss\.num_chunks: 0 is no number of parts"):
        chunked(0)
    ids_BS, labels_BS = batch()
    with pytest.raises(ValueError, match=r"labels \(3, 9\) do not fit hidden states of 10 positions"):
        chunked().run_model(Model(), labels_BS[:, 1:], ids_BS)


def collectives(rank, world_size):
    """How often the ranks exchange in one step, for each loss and policy."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    ids_BS, labels_BS = batch()
    counts = {}
    for policy in ("default", "always", "never"):
        for name, loss_fn in (("whole", CrossEntropyLoss.Config().build()), ("chunked", chunked(5))):
            model = Model()
            units = [model.embed, [model.norm, model.lm_head]]
            apply_fsdp(model, mesh=mesh, units=units, reshard_after_forward=policy)
            with CommDebugMode() as comm:
                loss_fn.run_model(model, labels_BS, ids_BS).backward()
            counts[policy, name] = {str(op): number for op, number in comm.get_comm_counts().items() if number}
    return counts


def test_chunks_do_not_make_data_parallelism_gather_or_reduce_more_often():
    counts = run_world(collectives, 2)[0]
    for policy in ("default", "always", "never"):
        assert counts[policy, "whole"]
        assert counts[policy, "chunked"] == counts[policy, "whole"], policy
