"""What changed since capture is captured anew or refused: no graph runs for a model or inputs it was not made for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hp_compile import GraphTrainer, PassConfig


def square(model, input, label):
    return (model(input) - label).square().mean()


def start(model, train_fn=square):
    return GraphTrainer(model, train_fn, PassConfig(), device="cpu")


def batch(seed=0, width=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 8, generator=generator), torch.randn(4, width, generator=generator)


def test_one_tensor_given_as_two_leaves_does_not_make_one_of_later_two():
    for pack in (lambda a, b: (a, b), lambda a, b: ({"p": a, "q": b}, None)):

        def train_fn(model, input, label):
            a, b = (input["p"], input["q"]) if isinstance(input, dict) else (input, label)
            return (model(a) - b).square().mean()

        model = nn.Linear(8, 8)
        trainer = start(model, train_fn)
        same = batch()[0]
        trainer.compile(*pack(same, same))
        other = pack(*batch(1))
        assert torch.equal(trainer.train_step(*other), train_fn(model, *other))
        again = pack(same, same)
        assert torch.equal(trainer.train_step(*again), train_fn(model, *again))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5))
        self.scale, self.act, self.mask = 1.0, torch.relu, torch.ones(8)
        self.hook = self.inner[1].register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x):
        y = self.act(self.inner(x)) * self.scale * self.mask
        return y + 1 if getattr(self, "extra", False) else y


def swap_hooks(model):
    model.hook.remove()
    model.inner[1].register_forward_hook(lambda module, args, output: output * 5)


CHANGES = {
    "a plain number": lambda model: setattr(model, "scale", 3.0),
    "a number of a torch module": lambda model: setattr(model.inner[2], "p", 0.0),
    "a function": lambda model: setattr(model, "act", torch.tanh),
    "a tensor": lambda model: setattr(model, "mask", torch.zeros(8)),
    "a new attribute": lambda model: setattr(model, "extra", True),
    "a hook in place of another": swap_hooks,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_forward_reads_is_captured_anew_when_it_changes(change):
    torch.manual_seed(0)
    model = Scaled()
    trainer = start(model)
    input, label = batch()
    trainer.train_step(input, label)
    CHANGES[change](model)
    for _ in range(2):
        torch.manual_seed(1)
        loss = trainer.train_step(input, label)
        torch.manual_seed(1)
        assert torch.equal(loss, square(model, input, label))
    assert len(trainer._graphs) == 2


REFUSED = {
    "submodule 'inner.1' was replaced": lambda model: model.inner.__setitem__(1, nn.Tanh()),
    "buffer 'offset' was set to None": lambda model: setattr(model, "offset", None),
    "parameter 'inner.0.weight' has a hook": lambda model: model.inner[0].weight.register_hook(lambda grad: grad),
    "register_post_accumulate_grad_hook": lambda model: model.inner[0].bias.register_post_accumulate_grad_hook(print),
    "module 'inner.0' has a backward hook": lambda model: model.inner[0].register_full_backward_hook(lambda *_: None),
    "forward hooks that return nothing": lambda model: model.inner[0].register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_a_graph_cannot_follow_is_refused_after_compile_as_before(said):
    model = Scaled()
    model.register_buffer("offset", torch.zeros(8))
    trainer = start(model)
    trainer.train_step(*batch())
    grads = copy.deepcopy([parameter.grad for parameter in model.parameters()])
    REFUSED[said](model)
    with pytest.raises(RuntimeError, match=said):
        trainer.train_step(*batch())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))


def test_a_lstms_own_lists_do_not_cause_captures():
    class Last(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0]

    trainer = start(Last(8, 8))
    for seed in range(3):
        trainer.train_step(*batch(seed))
        trainer.optimizer_step()
    assert len(trainer._graphs) == 1
