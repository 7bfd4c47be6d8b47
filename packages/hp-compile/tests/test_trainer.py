"""GraphTrainer on one process: the loop, the optimizer, the device, what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hp_compile import GraphPass, GraphTrainer, PassConfig, insert_call


def loss_fn(model, input, label):
    return (model(input) - label).square().mean()


def data(count=6):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)]


def trainer(model=None, **options):
    return GraphTrainer(model or nn.Linear(3, 2), loss_fn, options.pop("config", PassConfig()), device="cpu", **options)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_equals_adam_on_plain_autograd(accumulation):
    model = nn.Linear(3, 2)
    eager = copy.deepcopy(model)
    settings = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    run = trainer(model, optimizer_config={**settings, "grad_clip": 0.5})
    optimizer = torch.optim.Adam(eager.parameters(), **settings)
    seen = []
    losses = run.train(
        data(),
        log_interval=1,
        log_fn=lambda step, metrics: seen.append((step, metrics)),
        accumulation_steps=accumulation,
    )
    expected, norms = [], []
    for start in range(0, 6, accumulation):
        parts = [loss_fn(eager, *batch) for batch in data()[start : start + accumulation]]
        for part in parts:
            part.backward()
        norms.append(float(nn.utils.clip_grad_norm_(eager.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(torch.stack(parts).mean().detach()))
    assert losses == expected
    assert seen == [(at + 1, {"loss": expected[at], "grad_norm": norms[at]}) for at in range(len(expected))]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), eager.parameters(), strict=True))


def test_the_loop_counts_optimizer_steps_and_refuses_what_it_cannot_use():
    assert len(trainer().train(data(), max_steps=2)) == 2
    with pytest.raises(ValueError, match="ended after 2 of 4 batches"):
        trainer().train(data(), accumulation_steps=4)
    with pytest.raises(ValueError, match=r"a pair \(input, label\)"):
        trainer().train([torch.ones(1)])
    for bad in (
        {"max_steps": 0},
        {"max_steps": True},
        {"log_interval": -1},
        {"accumulation_steps": 0},
        {"accumulation_steps": True},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            trainer().train(data(), **bad)


def test_optimizer_config_and_factory():
    with pytest.raises(ValueError, match=r"optimizer_config\['momentum'\] is unknown; allowed: lr, betas"):
        trainer(optimizer_config={"momentum": 0.9})
    with pytest.raises(ValueError, match="grad_clip"):
        trainer(optimizer_config={"grad_clip": -1})
    for key, bad in (
        ("lr", "abc"),
        ("lr", -1),
        ("lr", True),
        ("lr", float("nan")),
        ("eps", None),
        ("weight_decay", -0.1),
        ("betas", (0.9, 1.0)),
        ("betas", 0.9),
    ):
        with pytest.raises(ValueError, match=rf"optimizer_config\['{key}'\]=.* is not allowed; allowed: "):
            trainer(optimizer_config={key: bad})
    with pytest.raises(ValueError, match=r"returned LBFGS, whose step runs .* closure; .*needs no closure"):
        _ = trainer(optimizer_factory=torch.optim.LBFGS).optimizer
    run = trainer(optimizer_factory=lambda params: torch.optim.SGD(params, lr=0.1))
    assert isinstance(run.optimizer, torch.optim.SGD)
    assert trainer().optimizer.param_groups[0]["foreach"] is False
    with pytest.raises(TypeError, match="must return a torch Optimizer"):
        _ = trainer(optimizer_factory=lambda params: None).optimizer


def test_a_step_without_gradients_raises():
    run = trainer()
    with pytest.raises(RuntimeError, match="before any train_step"):
        run.optimizer_step()
    run.train_step(*data(1)[0])
    run.optimizer_step()
    with pytest.raises(RuntimeError, match="without gradients"):
        run.optimizer_step()


def test_the_callers_config_is_not_changed():
    config = PassConfig(dp_mode=" DDP ")
    before = copy.copy(config)
    run = trainer(config=config)
    run.train_step(*data(1)[0])
    assert config == before
    assert run.pass_config is not config


def test_eval_step_leaves_no_gradient_and_follows_the_mode():
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    run = trainer(model)
    input, label = data(1)[0]
    model.eval()
    assert torch.equal(run.eval_step(input, label), loss_fn(model, input, label))
    assert model[0].weight.grad is None


def test_a_device_that_is_not_there_is_refused_by_name():
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"device='cuda' was asked for, but no cuda is available"):
            GraphTrainer(nn.Linear(1, 1), loss_fn, PassConfig(), device="cuda")
    with pytest.raises(RuntimeError, match=r"device='npu' was asked for"):
        GraphTrainer(nn.Linear(1, 1), loss_fn, PassConfig(), device="npu")
    with pytest.raises(ValueError, match=r"device='xla' is not supported"):
        GraphTrainer(nn.Linear(1, 1), loss_fn, PassConfig(), device="xla")


def test_an_explicit_degree_without_a_process_group_is_refused():
    for config in (PassConfig(fsdp_degree=2), PassConfig(dp_mode="ddp", dp_replicate_degree=2)):
        with pytest.raises(RuntimeError, match=r"degree=2, but torch\.distributed is not initialised.*torchrun"):
            trainer(config=config).train_step(*data(1)[0])


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="pass_config is a dict"):
        GraphTrainer(nn.Linear(1, 1), loss_fn, {})
    with pytest.raises(TypeError, match="train_fn is a int"):
        GraphTrainer(nn.Linear(1, 1), 3, PassConfig())


def test_mixed_precision_holds_on_one_rank():
    model = nn.Linear(3, 2)
    run = trainer(model, config=PassConfig(param_dtype="bfloat16", reduce_dtype="float32"))
    input, label = data(1)[0]
    half = copy.deepcopy(model).bfloat16()
    loss = run.train_step(input, label)
    expected = loss_fn(half, input.bfloat16(), label)
    expected.backward()
    assert torch.equal(loss, expected)
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight.grad, half.weight.grad.float())


def test_state_of_one_process_goes_into_another():
    run = trainer()
    run.train(data())
    fresh = trainer()
    fresh.load_state_dict(copy.deepcopy(run.state_dict()))
    assert run.train(data(2)) == fresh.train(data(2))
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), fresh.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
        (torch.optim.NAdam, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    ],
)
def test_looking_at_the_state_does_not_change_training(kind, settings):
    """Where an optimizer starts from zeros its state is completed; where not, that is said before its first step."""
    zeros = kind in (torch.optim.Adam, torch.optim.RMSprop) or (kind is torch.optim.SGD and "dampening" not in settings)
    losses = []
    for looks in (False, True):
        torch.manual_seed(0)
        run = trainer(optimizer_factory=lambda params: kind(params, lr=0.1, **settings))
        if looks and zeros:
            assert all(value for value in run.state_dict()["optimizer"]["state"].values())
        elif looks:
            with pytest.raises(RuntimeError, match=rf"{kind.__name__} has no state before its first step"):
                run.state_dict()
        losses.append(run.train(data()))
    assert losses[0] == losses[1]
    state = copy.deepcopy(run.state_dict())
    fresh = trainer(optimizer_factory=lambda params: kind(params, lr=0.7, **settings))
    fresh.load_state_dict(state)
    assert fresh.optimizer.param_groups[0]["lr"] == 0.1
    assert fresh.train(data(2)) == run.train(data(2))


def test_a_state_of_another_optimizer_or_with_holes_is_refused_and_changes_nothing():
    run = trainer()
    run.train(data(2))
    good = run.state_dict()
    other = trainer(optimizer_factory=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    other.train(data(2))
    moments = good["optimizer"]["state"]["weight"]
    faults = {
        "has \\['momentum_buffer'\\], that of Adam": other.state_dict()["optimizer"],
        "'weight' has nothing": {**good["optimizer"], "state": {"bias": good["optimizer"]["state"]["bias"]}},
        "weight.exp_avg in the loaded optimizer has shape \\(2, 1\\)": {
            **good["optimizer"],
            "state": {**good["optimizer"]["state"], "weight": {**moments, "exp_avg": torch.ones(2, 1)}},
        },
        "\\['zzz'\\], which are no parameters": {
            **good["optimizer"],
            "state": {**good["optimizer"]["state"], "zzz": {}},
        },
        "is not {'state'": {},
    }
    before = copy.deepcopy(good)
    for said, optimizer in faults.items():
        with pytest.raises(ValueError, match=said):
            run.load_state_dict({"model": good["model"], "optimizer": optimizer})
    with pytest.raises(ValueError, match="'bias' in the loaded state is a int"):
        run.load_state_dict({"model": {**good["model"], "bias": 3}, "optimizer": good["optimizer"]})
    after = run.state_dict()["optimizer"]["state"]
    assert all(
        torch.equal(after[n][k], v) for n, values in before["optimizer"]["state"].items() for k, v in values.items()
    )


def test_loaded_moments_are_copies():
    run, fresh = trainer(), trainer()
    run.train(data(2))
    kept = copy.deepcopy(run.state_dict())
    fresh.load_state_dict(run.state_dict())
    fresh.train(data())
    now = run.state_dict()
    assert all(torch.equal(now["model"][name], value) for name, value in kept["model"].items())
    assert torch.equal(now["optimizer"]["state"]["weight"]["exp_avg"], kept["optimizer"]["state"]["weight"]["exp_avg"])


def test_inside_full_params_changes_are_dropped_and_what_knows_shards_only_is_refused():
    run = trainer()
    run.train_step(*data(1)[0])
    before = copy.deepcopy(dict(run.model.named_parameters()))
    with run.full_params() as model:
        with torch.no_grad():
            model.weight.zero_()
        assert not model.state_dict()["weight"].any()
        for action in (
            run.state_dict,
            run.optimizer_step,
            lambda: run.train_step(*data(1)[0]),
            lambda: run.eval_step(*data(1)[0]),
            lambda: run.load_state_dict({}),
            lambda: run.full_params().__enter__(),
        ):
            with pytest.raises(RuntimeError, match=r"inside full_params\(\).*leave the context first"):
                action()
    assert all(torch.equal(parameter, before[name]) for name, parameter in run.model.named_parameters())
    run.optimizer_step()


def test_a_log_function_alone_is_called_in_every_step_and_a_factory_wants_no_learning_rate_beside_it():
    seen = []
    trainer().train(data(), log_fn=lambda step, metrics: seen.append(step))
    assert seen == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="optimizer_config has lr, which optimizer_factory would ignore"):
        trainer(optimizer_config={"lr": 1.0}, optimizer_factory=lambda params: torch.optim.SGD(params))


def test_a_hook_before_capture_can_register_a_pytree_node():
    class Pair:
        def __init__(self, a, b):
            self.a, self.b = a, b

    import torch.utils._pytree as pytree

    model = nn.Linear(3, 2)
    run = GraphTrainer(model, lambda m, pair, y: (m(pair.a) - pair.b).square().mean(), PassConfig(), device="cpu")
    called = []

    def register():
        if not called:
            pytree.register_pytree_node(Pair, lambda pair: ([pair.a, pair.b], None), lambda parts, _: Pair(*parts))
        called.append(1)

    run.set_pytree_pre_hook(register)
    input, label = data(1)[0]
    assert torch.equal(run.train_step(Pair(input, label), None), loss_fn(model, input, label))
    assert called


def test_a_pass_that_drops_an_output_is_found_before_anything_is_assigned():
    class Dropping:
        name = "dropping"

        def run(self, graph_module, pass_config, **context):
            output = next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")
            output.args = (output.args[0][:-1],)
            return graph_module

    run = trainer()
    run.pipeline.append(Dropping())
    with pytest.raises(
        RuntimeError, match=r"pass 'dropping' left a graph with 4 placeholders and 2 outputs, not 4 and 3"
    ):
        run.train_step(*data(1)[0])
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_a_gradient_of_another_shape_is_not_assigned():
    class Flattening:
        name = "flattening"

        def run(self, graph_module, pass_config, **context):
            output = next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")
            results = list(output.args[0])
            with graph_module.graph.inserting_before(output):
                results[1] = insert_call(graph_module.graph, torch.ops.aten.view.default, results[1], [-1])
            output.args = (results,)
            return graph_module

    run = trainer()
    run.pipeline.append(Flattening())
    with pytest.raises(RuntimeError, match=r"gradient of 'weight' has shape \(6,\).*nothing was assigned"):
        run.train_step(*data(1)[0])
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_a_compiled_step_does_not_hold_on_to_its_batch():
    import gc
    import weakref

    run = trainer()
    input, label = data(1)[0]
    run.train_step(input, label)
    watched = weakref.ref(input)
    del input, label
    gc.collect()
    assert watched() is None


class Doubling(GraphPass):
    name = "doubling"

    def run(self, graph_module, pass_config, *, joint_graph, **context):
        output = graph_module.graph.output_node()
        loss, *rest = output.args[0]
        with graph_module.graph.inserting_before(output):
            output.args = ([insert_call(graph_module.graph, torch.ops.aten.mul.Tensor, loss, 2.0), *rest],)
        return graph_module


def test_a_pass_that_joins_or_leaves_after_the_first_step_takes_part_from_the_next():
    run = trainer()
    batch = data(1)[0]
    plain = run.train_step(*batch)
    run.pipeline.append(Doubling())
    assert torch.equal(run.train_step(*batch), plain * 2)
    del run.pipeline[-1]
    assert torch.equal(run.train_step(*batch), plain)
