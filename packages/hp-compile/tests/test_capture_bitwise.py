"""One process: a captured step gives what plain autograd gives, bit for bit (G6)."""

from __future__ import annotations

import copy
import importlib.util

import graph_zoo as zoo
import pytest
import torch

from hp_compile.tracer.capture import run_traced_graph, trace_model_graph

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
CASES = [*zoo.OWN, *(pytest.param(name, marks=needs_transformers) for name in zoo.TRANSFORMERS)]


@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_buffers_are_those_of_eager(name):
    case = zoo.build(name)
    eager = copy.deepcopy(case.model)
    graphs = {}
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (case.model, eager)]
    for step in range(5):
        input, label = case.batch(step)
        use = input["use"] if isinstance(input, dict) else None
        if use not in graphs:
            graphs[use] = trace_model_graph(case.model, case.train_fn, input, label)
        torch.manual_seed(step)
        loss, grads = run_traced_graph(graphs[use], case.model, input, label)
        torch.manual_seed(step)
        expected = case.train_fn(eager, input, label)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected.backward()
        assert torch.equal(loss, expected)
        assert loss.dtype == expected.dtype
        names = dict(eager.named_parameters())
        assert list(grads) == list(names)
        for fqn, parameter in names.items():
            if parameter.grad is None:
                assert grads[fqn] is None, fqn
            else:
                assert torch.equal(grads[fqn], parameter.grad), fqn
                assert grads[fqn].stride() == parameter.grad.stride(), fqn
        for fqn, parameter in case.model.named_parameters():
            parameter.grad = grads[fqn]
        for optimizer in optimizers:
            optimizer.step()
        for (fqn, mine), theirs in zip(case.model.state_dict().items(), eager.state_dict().values(), strict=True):
            assert torch.equal(mine, theirs), fqn


@needs_transformers
@pytest.mark.parametrize("name", ["llama_sdpa", "qwen3_5_sdpa"])
def test_sdpa_with_an_explicit_mask_is_bitwise(name):
    case = zoo.build(name)

    def train_fn(model, input, label):
        length = input.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril().expand(input.shape[0], 1, length, length)
        logits = model(input_ids=input, attention_mask=mask).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), label.flatten())

    input, label = case.batch(0)
    joint = trace_model_graph(case.model, train_fn, input, label)
    loss, grads = run_traced_graph(joint, case.model, input, label)
    expected = train_fn(case.model, input, label)
    expected.backward()
    assert torch.equal(loss, expected)
    assert [fqn for fqn, p in case.model.named_parameters() if not torch.equal(grads[fqn], p.grad)] == []
