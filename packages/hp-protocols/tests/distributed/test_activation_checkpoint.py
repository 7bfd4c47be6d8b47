"""apply_ac: the same bits in every mode, the recomputation that the mode promises, and names that do not change."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hp_protocols.distributed import apply_ac, apply_compile, canonical_fqn, canonical_named_parameters
from hp_protocols.errors import ConfigError

WIDTH, LAYERS = 8, 2
ADDMM = torch.ops.aten.addmm.default
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Block(nn.Module):
    """Four linear layers, attention, dropout."""

    def __init__(self, dropout=0.5):
        super().__init__()
        self.dropout = dropout
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x_BSD):
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x_BSD).chunk(3, dim=-1))
        x_BSD = x_BSD + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        hidden_BSD = self.down(torch.tanh(self.up(x_BSD)))
        return x_BSD + (nn.functional.dropout(hidden_BSD, self.dropout) if self.dropout else hidden_BSD)


class Model(nn.Module):
    def __init__(self, dropout=0.5):
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(LAYERS))

    def forward(self, x_BSD):
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return x_BSD


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count[op] += 1
        return op(*args, **(kwargs or {}))


def gradients(model):
    """Output and gradients by canonical name, and how often each operator ran in backward."""
    torch.manual_seed(11)
    out = model(torch.linspace(-1, 1, 3 * 4 * WIDTH).view(3, 4, WIDTH).requires_grad_())
    with CountOps() as ops:
        out.square().sum().backward()
    return {"": out.detach(), **{n: p.grad for n, p in canonical_named_parameters(model)}}, ops.count


def test_recomputed_gradients_are_the_same_bits_and_the_mode_says_what_is_recomputed():
    plain, in_plain_backward = gradients(Model())
    assert in_plain_backward[ADDMM] == 0
    for mode, products, attentions in (("full", 4, 1), ("selective", 2, 0), ("none", 0, 0)):
        model = Model()
        apply_ac(model, blocks=model.blocks, mode=mode)
        found, in_backward = gradients(model)
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], plain[name]) for name in plain), mode
        assert in_backward[ADDMM] == products * LAYERS, mode
        assert in_backward[ATTENTION] == attentions * LAYERS, mode


def test_early_stop_ends_the_recomputation_before_the_last_layer():
    # Nothing after the last layer's product is saved for backward, so that product is not needed again.
    model = Model(dropout=0)
    apply_ac(model, blocks=model.blocks, mode="full", early_stop=True)
    found, in_backward = gradients(model)
    plain, _ = gradients(Model(dropout=0))
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert in_backward[ADDMM] == 3 * LAYERS


def test_without_the_random_state_dropout_draws_anew():
    model = Model()
    apply_ac(model, blocks=model.blocks, mode="full", preserve_rng_state=False)
    found, _ = gradients(model)
    plain, _ = gradients(Model())
    assert torch.equal(found[""], plain[""])
    assert not torch.equal(found["blocks.0.up.weight"], plain["blocks.0.up.weight"])


class Forgetful(nn.Module):
    """Computes in another dtype the second time."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return (x.double() if self.calls > 1 else x).sin().float()


def test_a_block_that_computes_something_else_the_second_time_is_found_out():
    model = nn.Sequential(Forgetful())
    apply_ac(model, blocks=[model[0]], mode="full")
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
        model(torch.ones(2, requires_grad=True)).sum().backward()


def test_wrapped_blocks_stand_in_the_model_and_keep_their_names():
    model = Model()
    names = list(model.state_dict())
    blocks = apply_ac(model, blocks=model.blocks, mode="selective")
    assert list(model.blocks) == blocks
    assert list(model.state_dict()) == names
    assert [name for name, _ in canonical_named_parameters(model)] == names
    assert {canonical_fqn(name) for name, _ in model.named_parameters()} == set(names)
    model.load_state_dict(Model().state_dict())


def test_a_block_that_is_used_twice_is_wrapped_in_both_places():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model.append(model[0])
    nested = nn.ModuleDict({"a": model, "b": model[0]})
    (wrapper,) = apply_ac(nested, blocks=[model[0]], mode="full")
    assert model[0] is wrapper
    assert model[2] is wrapper
    assert nested["b"] is wrapper


def test_modes_and_blocks_that_make_no_sense_are_refused():
    model = Model()
    with pytest.raises(ConfigError, match="'some' is no mode; allowed: none, selective, full, memory_budget"):
        apply_ac(model, blocks=model.blocks, mode="some")
    with pytest.raises(ConfigError, match="'memory_budget' needs compiled blocks"):
        apply_ac(model, blocks=model.blocks, mode="memory_budget")
    with pytest.raises(ConfigError, match=r"1\.5 is no share; allowed: 0 to 1"):
        apply_ac(model, blocks=model.blocks, mode="memory_budget", compile_enabled=True, memory_budget=1.5)
    with pytest.raises(ValueError, match=r"blocks\[0\] \(Block\) is not a module of the model"):
        apply_ac(model, blocks=[Block()], mode="full")
    with pytest.raises(ValueError, match=r"blocks\[0\] is the model itself"):
        apply_ac(model, blocks=[model], mode="full")
    assert all(type(block) is Block for block in model.blocks)


class Chain(nn.Module):
    """A block whose every intermediate result is worth keeping, or cheap to compute again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).sin()
        return x


def test_a_memory_budget_of_zero_keeps_less_for_backward_than_one_of_one():
    import torch._functorch.config as functorch_config

    def kept_numbers(budget):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(Chain())
        before = functorch_config.activation_memory_budget
        try:
            blocks = apply_ac(
                model, blocks=[model[0]], mode="memory_budget", memory_budget=budget, compile_enabled=True
            )
            # Partitioned like inductor's, without its code generation.
            apply_compile(blocks=blocks, backend="aot_eager_decomp_partition")
            kept = {}
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda t: kept.setdefault((t.data_ptr(), t.numel()), t), lambda t: t
            )
            with hooks:
                model(torch.ones(64, 16, requires_grad=True)).sum()
            return sum(numel for _, numel in kept)
        finally:
            functorch_config.activation_memory_budget = before

    assert kept_numbers(0.0) < kept_numbers(1.0)
