"""What a step leaves behind in Python would be left once, at capture: it is refused by name, and taken back."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from hp_compile import trace_model_graph


def square(model, input, label):
    return model(input).square().mean()


class Log:
    def __init__(self):
        self.n, self.seen = 0, {"shapes": []}


class Leaving(nn.Module):
    """Does `work(self, y)` in forward."""

    def __init__(self, work):
        super().__init__()
        self.linear, self.work = nn.Linear(4, 4), work
        self.counts, self.history, self.log, self.note = Counter(n=0), [1], Log(), SimpleNamespace(n=0)
        self.deep = {"a": [0.5]}

    def forward(self, x):
        y = self.linear(x)
        self.work(self, y)
        return y


LEFT = {
    "counts": lambda self, y: self.counts.update(n=1),
    "history": lambda self, y: self.history.append(y.shape),
    "log": lambda self, y: setattr(self.log, "n", self.log.n + 1),
    "log ": lambda self, y: self.log.seen["shapes"].append(y),
    "note": lambda self, y: setattr(self.note, "n", 1),
    "deep": lambda self, y: self.deep["a"].append(float("nan")),
    "steps": lambda self, y: setattr(self, "steps", getattr(self, "steps", 0) + 1),
    "kept": lambda self, y: setattr(self, "kept", {"y": y}),
    "history ": lambda self, y: delattr(self, "history"),
}


@pytest.mark.parametrize("said", LEFT)
def test_counters_and_tensors_in_attributes_lists_and_objects_are_refused_and_taken_back(said):
    model = Leaving(LEFT[said])
    objects = model.history, model.log, model.deep
    with pytest.raises(
        RuntimeError, match=rf"stores values in plain attributes \({said.strip()}\).*buffers in __init__"
    ):
        trace_model_graph(model, square, torch.ones(2, 4), None)
    assert (model.counts, model.history, model.note.n, model.deep) == ({"n": 0}, [1], 0, {"a": [0.5]})
    assert (model.log.n, model.log.seen) == (0, {"shapes": []})
    assert all(now is then for now, then in zip((model.history, model.log, model.deep), objects, strict=True))
    assert not hasattr(model, "steps")
    assert not hasattr(model, "kept")


def test_what_says_nothing_of_data_may_come_and_go():
    def work(self, y):
        self.empty, self.function, self.nothing = [], torch.relu, None
        self.history = list(self.history)

    trace_model_graph(Leaving(work), square, torch.ones(2, 4), None)


def test_a_traced_tensor_in_a_closed_over_or_global_list_is_refused_by_name():
    losses = []

    def closes_over(model, input, label):
        loss = square(model, input, label)
        losses.append(loss.detach())
        return loss

    with pytest.raises(RuntimeError, match=r"leaves a tensor of the step in 'losses'.*train_step's result"):
        trace_model_graph(nn.Linear(4, 4), closes_over, torch.ones(2, 4), None)


def seed_inside(seed):
    with torch.random.fork_rng():
        seed()
        return torch.randn(2, 4)


DRAWS = {
    r"draws from Python's random;.*Python value": lambda: random.random(),
    r"draws from numpy\.random;": lambda: numpy.random.rand(),
    r"sets torch's random generator \(torch\.manual_seed\).*Seed outside": lambda: torch.manual_seed(7),
    r"generator \(torch\.manual_seed\)": lambda: seed_inside(lambda: torch.manual_seed(7)),
    r"generator \(torch\.set_rng_state\)": lambda: seed_inside(lambda: torch.set_rng_state(torch.get_rng_state())),
    r"generator \(its state moved\)": lambda: torch.default_generator.manual_seed(7),
}


@pytest.mark.parametrize("said", DRAWS)
def test_random_numbers_of_python_and_seeds_inside_the_step_are_refused_and_undone(said):
    model, input = nn.Linear(4, 4), torch.ones(2, 4)
    states = random.getstate(), torch.get_rng_state(), str(numpy.random.get_state())
    plain = torch.manual_seed, torch.random.set_rng_state

    def train_fn(model, input, label):
        DRAWS[said]()
        return square(model, input, label)

    with pytest.raises(RuntimeError, match=said):
        trace_model_graph(model, train_fn, input, None)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert str(numpy.random.get_state()) == states[2]
    assert (torch.manual_seed, torch.random.set_rng_state) == plain
