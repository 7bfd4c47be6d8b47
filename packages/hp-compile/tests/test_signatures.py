"""Each signature and state of the model has its own graph; what makes captures repeat is said (G7)."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from hp_compile import GraphTrainer, PassConfig, run_traced_graph, trace_model_graph


def square(model, input, label):
    return model(input).square().mean()


def trainer(model, train_fn=square, **options):
    return GraphTrainer(model, train_fn, PassConfig(), device="cpu", **options)


def test_another_signature_is_captured_anew_and_kept():
    model = nn.Embedding(4, 4)
    run = trainer(model)
    ids = torch.arange(8).view(2, 4) % 4
    # Another shape, another dtype, other strides of the same shape; the first again is no new one.
    for count, x in enumerate([ids, ids[:1], ids.int(), ids.view(4, 2).t(), torch.cat([ids, ids], 1)[:, :4]], start=1):
        assert torch.equal(run.train_step(x, None), square(model, x, None))
        assert len(run._graphs) == count
    run.train_step(ids.clone(), None)
    assert len(run._graphs) == 5


def test_the_graph_that_was_used_longest_ago_goes_first():
    captures = []

    def counted(model, x, _):
        captures.append(tuple(x.shape))
        return square(model, x, None)

    run = GraphTrainer(nn.Linear(4, 4), counted, PassConfig(), device="cpu", max_graphs=2)
    for rows in (1, 2, 1, 3, 1, 2):
        run.train_step(torch.randn(rows, 4), None)
    assert captures == [(1, 4), (2, 4), (3, 4), (2, 4)]
    assert len(run._graphs) == 2
    with pytest.raises(ValueError, match="max_graphs=0"):
        trainer(nn.Linear(1, 1), max_graphs=0)


def test_the_stride_of_a_dim_of_size_one_makes_no_new_graph():
    run = trainer(nn.Linear(4, 4))
    run.train_step(torch.randn(1, 4), None)
    run.train_step(torch.randn(3, 4)[1:2], None)
    run.train_step(torch.randn(1, 8).as_strided((1, 4), (7, 1)), None)
    assert len(run._graphs) == 1


def test_a_float_that_changes_every_step_is_warned_about_once(caplog):
    run = trainer(nn.Linear(2, 2), lambda m, x, y: m(x).sum() * y)
    with caplog.at_level(logging.WARNING, logger="hp_compile"):
        for scale in (0.1, 0.2, 0.3):
            run.train_step(torch.ones(2, 2), scale)
    assert sum("0-d tensor" in record.message for record in caplog.records) == 1


def test_an_int_that_changes_every_step_and_a_graph_that_went_too_early_are_warned_about_once(caplog):
    with caplog.at_level(logging.WARNING, logger="hp_compile"):
        run = trainer(nn.Linear(2, 2), lambda m, x, y: m(x).sum() * y)
        for scale in (0, 1, 0, 1, 2):
            run.train_step(torch.ones(2, 2), scale)
        assert not caplog.records
        for scale in (3, 4):
            run.train_step(torch.ones(2, 2), scale)
        assert ["an int in input" in record.message for record in caplog.records] == [True]
        caplog.clear()
        run = trainer(nn.Linear(2, 2), max_graphs=2)
        for rows in (1, 2, 3):
            run.train_step(torch.ones(rows, 2), None)
        assert not caplog.records
        for rows in (1, 2, 3):
            run.train_step(torch.ones(rows, 2), None)
    assert ["max_graphs=2 is captured again; raise max_graphs" in record.message for record in caplog.records] == [True]


def test_running_a_captured_graph_on_another_shape_is_refused():
    model = nn.Linear(2, 2)
    joint = trace_model_graph(model, square, torch.ones(3, 2), None)
    with pytest.raises(ValueError, match="differ in structure, shape"):
        run_traced_graph(joint, model, torch.ones(4, 2), None)


CHANGES = {
    "mode": lambda model: model.eval(),
    "flag": lambda model: model[0].weight.requires_grad_(False),
    "number": lambda model: setattr(model[1], "p", 0.25),
    "kind": lambda model: model.__setitem__(1, nn.AlphaDropout(0.5)),
    "hook": lambda model: model[0].register_forward_hook(lambda module, args, output: output * 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_running_a_captured_graph_on_a_changed_model_is_refused(change):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    joint = trace_model_graph(model, square, torch.ones(3, 2), None)
    run_traced_graph(joint, copy.deepcopy(model), torch.ones(3, 2), None)
    CHANGES[change](model)
    with pytest.raises(ValueError, match=r"the model differs .*capture again with trace_model_graph"):
        run_traced_graph(joint, model, torch.ones(3, 2), None)
