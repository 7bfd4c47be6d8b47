"""The step runs the same operations as the graph's own code, without looking them up in every call."""

from __future__ import annotations

import graph_zoo as zoo
import torch

from hp_compile import GraphTrainer, PassConfig
from hp_compile.training.bound_code import bound_forward


def test_the_bound_code_gives_the_bits_of_the_graph_and_names_no_operation_by_its_path():
    case = zoo.build("decoder")
    trainer = GraphTrainer(case.model, case.train_fn, PassConfig(), device="cpu")
    input, label = case.batch(0)
    trainer.compile(input, label)
    graph_module = trainer.graph_module
    bound = bound_forward(graph_module)
    state = [tensor.detach() for tensor in (*case.model.parameters(), *case.model.buffers())]
    with torch.no_grad():
        expected, found = graph_module(*state, input, label), bound(*state, input, label)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert "ops" in graph_module.forward.__func__.__code__.co_names
    assert "ops" not in bound.__func__.__code__.co_names


def test_text_that_mentions_an_operation_is_left_alone():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    said = graph.call_function(max, (" = torch.ops.aten.mm.default(", ""))
    total = graph.call_function(torch.ops.aten.add.Tensor, (x, 1))
    graph.output((total, said))
    bound = bound_forward(torch.fx.GraphModule(torch.nn.Module(), graph))
    total, said = bound(torch.ones(2))
    assert torch.equal(total, torch.full((2,), 2.0))
    assert said == " = torch.ops.aten.mm.default("
