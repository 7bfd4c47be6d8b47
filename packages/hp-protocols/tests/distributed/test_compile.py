"""apply_compile: blocks are compiled in place, give the same numbers, and keep their names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hp_protocols.distributed import apply_ac, apply_compile
from hp_protocols.errors import ConfigError


class Block(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.breaks = breaks

    def forward(self, x):
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.tanh(self.linear(x)) + x


def test_compiled_blocks_give_the_same_numbers_under_the_same_names():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    names, x = list(model.state_dict()), torch.ones(3, 4, requires_grad=True)
    plain = model(x)
    blocks = list(model)
    assert apply_compile(blocks=model, backend="eager") == blocks == list(model)
    counters = torch._dynamo.utils.counters
    counters.clear()
    assert torch.equal(model(x), plain)
    # Two blocks of one class share one graph.
    assert counters["stats"]["unique_graphs"] == 1
    assert list(model.state_dict()) == names


def test_a_recomputed_block_can_be_compiled():
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block())
    model = nn.Sequential(Block(), Block())
    model.load_state_dict(plain.state_dict())
    apply_compile(blocks=apply_ac(model, blocks=list(model), mode="selective"), backend="aot_eager")
    for one in (plain, model):
        one(torch.ones(3, 4)).square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    assert all(torch.equal(a.grad, b) for a, b in zip(plain.parameters(), grads, strict=True))


def test_a_block_that_breaks_the_graph_is_an_error_unless_allowed():
    torch._dynamo.reset()
    apply_compile(blocks=(blocks := [Block(breaks=True)]), backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        blocks[0](torch.ones(1, 4))
    torch._dynamo.reset()
    apply_compile(blocks=(blocks := [Block(breaks=True)]), backend="eager", fullgraph=False)
    blocks[0](torch.ones(1, 4))


def test_an_unknown_compiler_is_named_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"compile\.backend: 'inducter' is no compiler here; allowed: .*inductor"):
        apply_compile(blocks=[Block()], backend="inducter")
