"""The pass framework: order, insertion, lint, dumps; built without torch (G15, G30)."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

from hp_compile import GraphPass, GraphTrainer, PassConfig, PassPipeline, insert_call, trace_model_graph


class Marking(GraphPass):
    def __init__(self, name, seen):
        self.name = name
        self.seen = seen

    def run(self, graph_module, pass_config, **context):
        self.seen.append((self.name, sorted(context)))
        return graph_module


def test_the_order_follows_the_config():
    assert PassPipeline.from_config(PassConfig()).names() == [
        "dead_code_elimination",
        "canonicalize_graph",
        "fsdp",
        "auto_overlap",
    ]
    plain = PassPipeline.from_config(PassConfig(fsdp_enabled=False, enable_overlap=False))
    assert plain.names() == ["dead_code_elimination", "canonicalize_graph"]


def test_own_passes_go_where_they_are_put_and_get_the_whole_context():
    seen = []
    pipeline = PassPipeline([Marking("b", seen)])
    pipeline.insert_before("b", Marking("a", seen))
    pipeline.insert_after("b", Marking("c", seen))
    model = nn.Linear(2, 2)
    joint = trace_model_graph(model, lambda m, x, y: m(x).sum(), torch.ones(2, 2), None)
    pipeline.run(joint.graph_module, model=model, joint_graph=joint)
    assert [name for name, _ in seen] == ["a", "b", "c"]
    assert seen[0][1] == ["joint_graph", "mesh", "model", "pass_plan"]


def test_a_wrong_name_and_a_wrong_object_are_refused():
    pipeline = PassPipeline.from_config(PassConfig())
    with pytest.raises(ValueError, match=r"'fsdpp'; passes: .*did you mean 'fsdp'"):
        pipeline.insert_before("fsdpp", Marking("x", []))
    with pytest.raises(ValueError, match="is not a pass"):
        pipeline.append(lambda graph: graph)


def test_a_pass_that_breaks_the_graph_is_named():
    class Breaking(GraphPass):
        name = "breaking"

        def run(self, graph_module, pass_config, **context):
            nodes = [n for n in graph_module.graph.nodes if n.op == "call_function"]
            next(iter(graph_module.graph.nodes)).prepend(nodes[-1])
            return graph_module

    class Losing(GraphPass):
        name = "losing"

        def run(self, graph_module, pass_config, **context):
            return None

    model = nn.Linear(2, 2)
    for item, said in (
        (Breaking(), "'breaking' left a graph that does not lint"),
        (Losing(), "'losing' returned NoneType"),
    ):
        joint = trace_model_graph(model, lambda m, x, y: m(x).sum(), torch.ones(2, 2), None)
        with pytest.raises(RuntimeError, match=said):
            PassPipeline([item]).run(joint.graph_module, model=model, joint_graph=joint)


class Doubling(GraphPass):
    """Doubles every gradient, with the helper or without."""

    name = "doubling"

    def __init__(self, helped):
        self.helped = helped

    def run(self, graph_module, pass_config, *, joint_graph, **context):
        output = graph_module.graph.output_node()
        results = list(output.args[0])
        double = torch.ops.aten.mul.Tensor
        with graph_module.graph.inserting_before(output):
            for at in joint_graph.gradient_positions().values():
                if self.helped:
                    results[at] = insert_call(graph_module.graph, double, results[at], 2)
                else:
                    results[at] = graph_module.graph.call_function(double, (results[at], 2))
        output.args = (results,)
        return graph_module


@pytest.mark.parametrize("place", ["fsdp", "auto_overlap"])
def test_a_new_node_without_a_value_is_refused_by_pass_and_node_and_the_helper_gives_it_one(place):
    def run(helped):
        torch.manual_seed(0)
        trainer = GraphTrainer(nn.Linear(2, 2), lambda m, x, y: m(x).sum(), PassConfig(), device="cpu")
        trainer.pipeline.insert_before(place, Doubling(helped))
        trainer.train_step(torch.ones(3, 2), None)
        return trainer

    with pytest.raises(RuntimeError, match=r"pass 'doubling' made node 'mul.*' \(aten.mul.Tensor\).*insert_call"):
        run(False)
    trainer = run(True)
    assert torch.equal(trainer.model.weight.grad, torch.full((2, 2), 6.0))
    made = [node for node in trainer.graph_module.graph.nodes if node.target is torch.ops.aten.mul.Tensor]
    assert [tuple(node.meta["val"].shape) for node in made] == [(2, 2), (2,)]
    assert all(node.meta["hp_backward"] for node in made)


def test_the_helper_names_what_does_not_fit():
    joint = trace_model_graph(nn.Linear(2, 3), lambda m, x, y: m(x).sum(), torch.ones(4, 2), None)
    graph = joint.graph_module.graph
    weight = joint.state_nodes()["weight"]
    before = len(graph.nodes)
    with graph.inserting_before(graph.output_node()):
        with pytest.raises(RuntimeError, match=r"aten.mm.default cannot be computed from .* \(3, 2\)"):
            insert_call(graph, torch.ops.aten.mm.default, weight, weight)
        assert len(graph.nodes) == before
        zeros = insert_call(graph, torch.ops.aten.zeros.default, [5])
        bare = graph.call_function(torch.ops.aten.neg.default, (zeros,))
        with pytest.raises(RuntimeError, match=r"reads node 'neg.*', which has no meta\['val'\]"):
            insert_call(graph, torch.ops.aten.neg.default, bare)
    assert type(zeros.meta["val"]).__name__ == "FakeTensor"


def test_every_stage_is_dumped_as_code_with_a_diff(tmp_path, monkeypatch):
    monkeypatch.setenv("HP_COMPILE_DUMP", str(tmp_path))
    trainer = GraphTrainer(nn.Linear(2, 2), lambda m, x, y: m(x).relu().sum(), PassConfig(), device="cpu")
    trainer.train_step(torch.ones(2, 2), None)
    names = sorted(file.name for file in next(tmp_path.iterdir()).iterdir())
    assert names[:3] == ["00-captured.py", "01-dead_code_elimination.diff", "01-dead_code_elimination.py"]
    assert "04-auto_overlap.py" in names
    assert "def forward" in next(tmp_path.rglob("04-auto_overlap.py")).read_text()
    assert "detach" in next(tmp_path.rglob("02-canonicalize_graph.diff")).read_text()


def test_dead_code_goes_but_writes_and_random_draws_stay():
    class Wasteful(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            x.exp()
            self.norm(x)
            torch.nn.functional.dropout(x, 0.5)
            return self.linear(x)

    model = Wasteful()
    trainer = GraphTrainer(model, lambda m, x, y: m(x).sum(), PassConfig(), device="cpu")
    trainer.train_step(torch.randn(4, 3), None)
    targets = {str(node.target) for node in trainer.graph_module.graph.nodes}
    assert "aten.exp.default" not in targets
    assert {"aten.native_batch_norm.default", "aten.bernoulli_.float"} <= targets
    assert model.norm.num_batches_tracked == 1


def test_the_pipeline_builds_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from hp_compile import GraphPass, PassPipeline, PassConfig\n"
        "class Own(GraphPass):\n    name = 'own'\n    def run(self, graph_module, pass_config, **context): pass\n"
        "pipeline = PassPipeline([Own()], pass_config=PassConfig())\n"
        "pipeline.insert_after('own', Own())\nassert pipeline.names() == ['own', 'own']\n"
        "pipeline = PassPipeline.from_config(PassConfig(enable_overlap=False))\n"
        "pipeline.insert_after('fsdp', Own())\n"
        "assert pipeline.names() == ['dead_code_elimination', 'canonicalize_graph', 'fsdp', 'own']\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pipeline_parallelism_is_refused_until_it_exists():
    with pytest.raises(NotImplementedError, match=r"pp_enabled=True.*not available yet"):
        GraphTrainer(nn.Linear(2, 2), lambda m, x, y: m(x).sum(), PassConfig(pp_enabled=True), device="cpu")


def test_the_first_compile_logs_one_line_and_explain_shows_the_table(caplog):
    trainer = GraphTrainer(nn.Linear(2, 2), lambda m, x, y: m(x).sum(), PassConfig(), device="cpu")
    with pytest.raises(RuntimeError, match="nothing is compiled yet"):
        trainer.explain()
    with caplog.at_level(logging.INFO, logger="hp_compile"):
        trainer.compile(torch.ones(2, 2), None)
        trainer.compile(torch.ones(2, 2), None)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "nodes, captured in" in messages[0]
    assert "already compiled" in messages[1]
    assert "peak memory of a step, estimated" in trainer.explain()
