"""What a capture must get right, and what it refuses by name with the remedy (G1 to G8)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_compile import GraphTrainer, PassConfig, run_traced_graph, trace_model_graph
from hp_compile import _torch_compat as compat


def square(model, input, label):
    return model(input).square().mean()


def trainer(model, train_fn=square, **options):
    return GraphTrainer(model, train_fn, PassConfig(), device="cpu", **options)


def same_gradients(model, train_fn, input, label=None, steps=3):
    """Graph and eager side by side on one model, gradients compared bit for bit."""
    eager = copy.deepcopy(model)
    joint = trace_model_graph(model, train_fn, input, label)
    for _ in range(steps):
        loss, grads = run_traced_graph(joint, model, input, label)
        expected = train_fn(eager, input, label)
        names = dict(eager.named_parameters())
        theirs = torch.autograd.grad(expected, list(names.values()), allow_unused=True)
        assert torch.equal(loss, expected)
        assert list(grads) == list(names)
        for fqn, mine, grad in zip(names, grads.values(), theirs, strict=True):
            assert (mine is None) == (grad is None), fqn
            assert mine is None or torch.equal(mine, grad), fqn
    return joint


class Twice(nn.Module):
    """One weight, used twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(self.linear(x))


def left_fake(model):
    values = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        for value in module.__dict__.values():
            values += value if isinstance(value, list) else [value]
    return [value for value in values if compat.is_fake(value)]


# ---- G1, G2 ----


def test_state_is_leading_placeholders_and_no_parameter_is_an_attribute():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    joint = trace_model_graph(model, square, torch.randn(5, 4), None)
    assert joint.state_fqns == (*dict(model.named_parameters()), *dict(model.named_buffers()))
    assert joint.state_is_param == (True,) * 4 + (False,) * 3
    assert set(joint.params) == set(dict(model.named_parameters()))
    assert [label.kind for label in joint.outputs] == ["loss"] + ["grad"] * 4
    nodes = list(joint.graph_module.graph.nodes)
    assert sum(node.op == "placeholder" for node in nodes) == 8
    assert not any(isinstance(getattr(joint.graph_module, str(n.target), None), nn.Parameter) for n in nodes)


def test_backward_nodes_are_tagged_and_carry_the_module_of_their_forward_node():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    joint = trace_model_graph(model, square, torch.randn(5, 4), None)
    marks = {
        (n.meta["hp_module"], bool(n.meta.get("hp_backward")))
        for n in joint.graph_module.graph.nodes
        if n.op == "call_function" and "mm" in str(n.target)
    }
    assert {("0", False), ("0", True), ("2", False), ("2", True)} <= marks


def test_a_missing_private_api_names_the_torch_that_has_it():
    with pytest.raises(RuntimeError, match=r"torch 2\..* has no torch\.compiler\._nowhere.*install torch>=2\.13"):
        compat.lookup("torch.compiler._nowhere")


# ---- G4, G5 ----


@pytest.mark.parametrize(("input", "path"), [({"x": [torch.ones(2), object()]}, r"input\['x'\]\[1\]"), (1j, "input")])
def test_a_leaf_that_is_not_allowed_is_named_by_its_path(input, path):
    with pytest.raises(TypeError, match=rf"^{path} is a .*Close over .* register its class as a pytree"):
        trace_model_graph(nn.Linear(2, 2), square, input, None)


def test_primitives_are_allowed_and_part_of_the_signature_by_value():
    def scaled(model, input, label):
        return model(input["x"]).square().mean() * input["scale"] if input["on"] else model(input["x"]).mean()

    model = nn.Linear(3, 3)
    run = trainer(model, scaled)
    x = torch.randn(4, 3)
    for scale, on in ((2.0, True), (0.5, True), (0.5, False), (2.0, True)):
        given = {"x": x, "scale": scale, "on": on, "note": "text", "none": None}
        assert torch.equal(run.train_step(given, 1), scaled(model, given, 1))
    assert len(run._graphs) == 3


def test_an_input_that_asks_for_a_gradient_is_refused():
    with pytest.raises(ValueError, match=r"label\[0\] requires a gradient.*detached"):
        trace_model_graph(nn.Linear(2, 2), square, torch.ones(2), [torch.ones(2, requires_grad=True)])


@pytest.mark.parametrize(
    ("train_fn", "said"),
    [
        (lambda m, x, y: m(x), r"shape \(4, 2\).*floating scalar.*mean"),
        (lambda m, x, y: m(x).sum().long(), r"dtype torch\.int64"),
        (lambda m, x, y: 3.0, "returned float, not a tensor"),
        (lambda m, x, y: m(x).detach().sum(), "needs no gradient"),
    ],
)
def test_a_loss_that_is_no_floating_scalar_is_refused(train_fn, said):
    with pytest.raises(ValueError, match=said):
        trace_model_graph(nn.Linear(2, 2), train_fn, torch.ones(4, 2), None)


def test_a_branch_on_data_names_the_line_of_the_user():
    class Branching(nn.Linear):
        def forward(self, x):
            if x.sum() > 0:  # the line
                x = x + 1
            return super().forward(x)

    with pytest.raises(
        RuntimeError, match=r"test_capture_contract\.py:\d+: `if x\.sum\(\) > 0:  # the line`.*torch\.where"
    ):
        trace_model_graph(Branching(2, 2), square, torch.ones(4, 2), None)
    with pytest.raises(RuntimeError, match=r"`return m\(x\[x > 0\]\)\.sum\(\)`|shape that depends on values"):
        trace_model_graph(nn.Linear(2, 2), lambda m, x, y: m(x[x > 0]).sum(), torch.ones(4, 2), None)


def test_numpy_and_items_are_questions_to_data_too():
    for train_fn in (lambda m, x, y: m(x).sum() * float(x.numpy().sum()), lambda m, x, y: m(x).sum() * x.sum().item()):
        with pytest.raises(RuntimeError, match=r"test_capture_contract\.py:\d+.*reads the data of a tensor"):
            trace_model_graph(nn.Linear(2, 2), train_fn, torch.ones(2, 2), None)


def test_a_fault_of_the_model_is_told_with_the_line_of_the_user():
    with pytest.raises(RuntimeError) as caught:
        trace_model_graph(nn.Linear(2, 2), square, torch.ones(2, 3), None)
    assert any("while the step was captured, at" in note and ".py" in note for note in caught.value.__notes__)


# ---- G6: right ----


def test_a_reentrant_checkpoint_is_refused_with_the_remedy():
    class Recomputing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return checkpoint(self.b, self.a(x), use_reentrant=True)

    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        trace_model_graph(Recomputing(), square, torch.randn(4, 6), None)


def test_gradients_inside_the_step_are_captured():
    def penalty(model, x, y):
        x = x.detach().requires_grad_()
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return slope.square().sum() + out

    same_gradients(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), penalty, torch.randn(3, 4))


def test_a_weight_used_twice_and_one_module_under_two_names_have_one_gradient():
    same_gradients(Twice(), square, torch.randn(4, 6))
    model = nn.ModuleDict({"a": nn.Linear(6, 6)})
    model["b"] = model["a"]
    joint = same_gradients(model, lambda m, x, y: m["b"](m["a"](x)).square().mean(), torch.randn(4, 6))
    assert joint.aliases == {"b.weight": "a.weight", "b.bias": "a.bias"}
    assert not left_fake(model)


def test_two_views_of_one_storage_train_as_in_eager():
    base = torch.randn(6, 4)
    model = nn.Module()
    model.a, model.b = nn.Parameter(base[:3]), nn.Parameter(base[3:])
    assert model.a.untyped_storage().data_ptr() == model.b.untyped_storage().data_ptr()

    def loss(model, input, label):
        return (model.a * model.b * input).sum()

    same_gradients(model, loss, torch.randn(3, 4))


def test_parameters_whose_gradients_are_one_tensor_do_not_share_it_after_accumulation():
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    run = trainer(model, lambda m, x, y: ((m.a + m.b) * x).sum())
    x = torch.randn(3)
    run.train_step(x, None)
    run.train_step(x, None)
    assert model.a.grad.untyped_storage().data_ptr() != model.b.grad.untyped_storage().data_ptr()
    assert torch.equal(model.a.grad, x + x)
    assert torch.equal(model.b.grad, x + x)


def test_the_loss_owns_its_storage_and_nothing_builds_an_autograd_graph():
    model = nn.Module()
    model.w = nn.Parameter(torch.tensor(2.0))
    run = trainer(model, lambda m, x, y: m.w.view(()))
    loss = run.train_step(torch.ones(1), None)
    assert loss.grad_fn is None
    assert loss.data_ptr() != model.w.data_ptr()
    assert model.w.grad.grad_fn is None


def test_a_rebound_buffer_is_carried():
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("n", torch.zeros(()))
            self.register_buffer("moved", torch.zeros(2))

        def forward(self, x):
            self.n = self.n + 1
            self.moved.add_(x.sum(0))
            return super().forward(x) * self.n

    model = Counting()
    eager = copy.deepcopy(model)
    run = trainer(model)
    for _ in range(3):
        x = torch.randn(3, 2)
        assert torch.equal(run.train_step(x, None), square(eager, x, None))
    assert model.n == 3
    assert torch.equal(model.moved, eager.moved)


def test_an_lstm_keeps_its_own_weights_after_capture():
    model = nn.LSTM(4, 4, batch_first=True)
    same_gradients(model, lambda m, x, y: m(x)[0].square().mean(), torch.randn(2, 3, 4))
    assert not left_fake(model)


def test_autocast_inside_the_step_keeps_eagers_weight_cache():
    def mixed(model, input, label):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(input)
        return out.float().square().mean()

    same_gradients(Twice(), mixed, torch.randn(4, 6))


def test_checkpoint_recomputes_in_backward():
    class Recomputing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.b(checkpoint(lambda y: torch.tanh(self.a(y)), x, use_reentrant=False, preserve_rng_state=False))

    model = Recomputing()
    joint = same_gradients(model, square, torch.randn(4, 6))
    run = trainer(model)
    run.train_step(torch.randn(4, 6), None)
    for graph in (joint.graph_module.graph, run.graph_module.graph):
        tanhs = [bool(n.meta.get("hp_backward")) for n in graph.nodes if n.target is torch.ops.aten.tanh.default]
        assert tanhs == [False, True]


def test_activations_with_strides_of_their_own_run_as_traced():
    class Transposing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x):
            y = torch.nn.functional.softplus(self.a(x).view(2, 3, 6))
            return torch.nn.functional.elu(y.transpose(1, 2)).transpose(1, 2) @ y.transpose(1, 2)

    same_gradients(Transposing(), square, torch.randn(6, 6))


# ---- G6: refused ----


def test_dropout_inside_checkpoint_is_refused_with_its_module():
    class Recomputing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

        def forward(self, x):
            return checkpoint(lambda y: self.drop(self.a(y)), x, use_reentrant=False, preserve_rng_state=False)

    with pytest.raises(RuntimeError, match=r"draws random numbers .*torch\.utils\.checkpoint.*Move the dropout"):
        trace_model_graph(Recomputing(), square, torch.randn(4, 6), None)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_hook_is_refused_by_name(kind):
    model = nn.Sequential(nn.Linear(2, 2))
    getattr(model[0].weight, kind)(lambda *given: None)
    with pytest.raises(RuntimeError, match=rf"'0\.weight' has a hook \({kind}\)"):
        trace_model_graph(model, square, torch.ones(2, 2), None)


def test_a_module_backward_hook_is_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_full_backward_hook(lambda *given: None)
    with pytest.raises(RuntimeError, match="'0' has a backward hook"):
        trace_model_graph(model, square, torch.ones(2, 2), None)


def test_a_forward_hook_that_only_has_effects_is_refused_and_one_that_returns_is_captured():
    seen = []
    model = nn.Sequential(nn.Linear(2, 2))

    def remember(module, args, output):
        seen.append(1)

    handle = model[0].register_forward_hook(remember)
    with pytest.raises(RuntimeError, match=r"return nothing .*remember on '0'; remove"):
        trace_model_graph(model, square, torch.ones(2, 2), None)
    handle.remove()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    same_gradients(model, square, torch.randn(3, 2))


def test_a_compiled_function_inside_the_step_is_traced_through():
    double = torch.compile(lambda x: x * 2, backend="eager")
    model = nn.Linear(2, 2)
    joint = trace_model_graph(model, lambda m, x, y: double(m(x)).sum(), torch.ones(3, 2), None)
    loss, _ = run_traced_graph(joint, model, torch.ones(3, 2), None)
    assert torch.equal(loss, (model(torch.ones(3, 2)) * 2).sum())


def test_autocast_around_the_step_is_refused():
    run = trainer(nn.Linear(2, 2))
    run.train_step(torch.ones(2, 2), None)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="Open it inside train_fn"):
        run.train_step(torch.ones(2, 2), None)


def test_values_left_in_attributes_are_refused_and_put_back():
    class Leaving(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            self.last = x
            return super().forward(x)

    model = Leaving()
    with pytest.raises(RuntimeError, match=r"plain attributes \(calls, last\).*register tensors as buffers"):
        trace_model_graph(model, square, torch.ones(2, 2), None)
    assert model.calls == 0
    assert not hasattr(model, "last")


def calls_backward(model, input, label):
    loss = square(model, input, label)
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("module", "train_fn", "said"),
    [
        (torch.jit.script(nn.Linear(2, 2)), square, r"module '0' is a torch\.jit script.*the Python module"),
        (nn.Embedding(4, 2, sparse=True), square, r"parameter '0\.weight' would have a sparse gradient.*sparse=False"),
        (nn.Linear(2, 2), calls_backward, r"train_fn calls backward\(\); return the loss instead"),
    ],
)
def test_habits_that_a_graph_cannot_take_are_refused_with_the_remedy(module, train_fn, said):
    model, backward = nn.Sequential(module), torch.autograd.backward
    with pytest.raises(RuntimeError, match=said):
        trainer(model, train_fn).train_step(torch.ones(2, 2), None)
    with pytest.raises(RuntimeError, match=said):
        trace_model_graph(model, train_fn, torch.ones(2, 2), None)
    assert torch.autograd.backward is backward


def test_a_parameter_of_another_model_is_refused():
    other = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="belongs to no parameter of the model"):
        trace_model_graph(nn.Linear(2, 2), lambda m, x, y: other(m(x)).sum(), torch.ones(2, 2), None)


def test_a_parameter_assigned_in_forward_is_refused():
    class Assigning(nn.Linear):
        def forward(self, x):
            del self.weight
            self.weight = torch.ones(2, 2)
            return super().forward(x)

    with pytest.raises(RuntimeError, match="weight"):
        trace_model_graph(Assigning(2, 2), square, torch.ones(2, 2), None)


# ---- G6: changes after capture ----


def test_modes_and_requires_grad_are_captured_anew():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    eager = copy.deepcopy(model)
    run = trainer(model)
    x = torch.randn(8, 4)

    def step():
        torch.manual_seed(0)
        loss = run.train_step(x, None)
        torch.manual_seed(0)
        expected = square(eager, x, None)
        expected.backward()
        assert torch.equal(loss, expected)
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad)

    step()
    for both in (model, eager):
        both.eval()
    step()
    for both in (model, eager):
        both.train()
        both[0].weight.requires_grad_(False)
        both.zero_grad()
    step()
    assert model[0].weight.grad is None
    assert len(run._graphs) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(1))), "has 3 parameters"),
        (lambda m: setattr(m, "weight", nn.Parameter(torch.ones(2, 2))), "'weight' was replaced"),
        (lambda m: m.add_module("more", nn.Linear(1, 1)), "1 submodules"),
        (lambda m: setattr(m, "bias", None), "'bias' was replaced"),
    ],
)
def test_a_changed_model_is_an_error_and_never_a_stale_graph(change, said):
    model = nn.Linear(2, 2)
    run = trainer(model)
    run.train_step(torch.ones(2, 2), None)
    change(model)
    with pytest.raises(RuntimeError, match=rf"the model changed since it was compiled.*{said}"):
        run.train_step(torch.ones(2, 2), None)
