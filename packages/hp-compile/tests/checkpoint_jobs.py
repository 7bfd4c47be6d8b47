"""State that is saved, loaded, refused, or drawn for a model on the meta device (G19).

In: a rank and a folder. Out: what differs, or an assertion that fails on this rank.
"""

from __future__ import annotations

from typing import Any

import graph_zoo as zoo
import torch
from graph_jobs import raises, small, whole
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hp_compile import GraphTrainer, PassConfig


def flat_state(state: dict[str, Any]) -> dict[str, Any]:
    """Whole tensors by path: what must be equal on any number of ranks."""
    found = {f"model.{name}": whole(value).clone() for name, value in state["model"].items()}
    for name, values in state["optimizer"]["state"].items():
        for key, value in values.items():
            found[f"{name}.{key}"] = whole(value).clone()
    return found


def train_and_save(rank: int, world: int, name: str, folder: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    case = zoo.build(name)
    trainer = GraphTrainer(case.model, case.train_fn, PassConfig(), optimizer_config={"lr": 1e-2}, device="cpu")
    for step in range(3):
        trainer.train_step(*case.batch(2 * (10 * step + rank)))
        trainer.optimizer_step()
    dcp.save({"trainer": trainer}, checkpoint_id=folder)
    state = flat_state(trainer.state_dict())
    if rank == 0:
        torch.save(state, f"{folder}/whole.pt")
    return {}


def load_and_go_on(rank: int, world: int, name: str, folder: str) -> list[str]:
    """A fresh process, not compiled yet, resumes; it then trains like one that got the same values by hand."""
    import torch.distributed.checkpoint as dcp

    saved = torch.load(f"{folder}/whole.pt")
    trainers = []
    for by_hand in (False, True):
        case = zoo.build(name, seed=7)
        trainer = GraphTrainer(case.model, case.train_fn, PassConfig(), optimizer_config={"lr": 1e-2}, device="cpu")
        if by_hand:
            state = trainer.state_dict()
            state["model"] = {fqn: saved[f"model.{fqn}"] for fqn in state["model"]}
            state["optimizer"]["state"] = {
                fqn: {key: saved[f"{fqn}.{key}"] for key in values}
                for fqn, values in state["optimizer"]["state"].items()
            }
            trainer.load_state_dict(state)
        else:
            dcp.load({"trainer": trainer}, checkpoint_id=folder)
        trainers.append((case, trainer))
    loaded = flat_state(trainers[0][1].state_dict())
    wrong = [f"loaded {key}" for key, value in saved.items() if not torch.equal(loaded[key], value)]
    wrong += [] if set(loaded) == set(saved) else [f"{set(loaded) ^ set(saved)}"]
    for step in range(2):
        losses = []
        for case, trainer in trainers:
            torch.manual_seed(step)
            losses.append(trainer.train_step(*case.batch(2 * step)))
            trainer.optimizer_step()
        wrong += [] if torch.equal(*losses) else [f"loss {step}"]
    first, second = (flat_state(trainer.state_dict()) for _, trainer in trainers)
    return wrong + [f"after {key}" for key in first if not torch.equal(first[key], second[key])]


def misfits(rank: int, world: int) -> None:
    """A state that does not fit changes nothing and is named."""
    _, trainer = small()
    good = trainer.state_dict()
    before = flat_state(good)
    with raises(ValueError, "missing ['norm.weight']"):
        trainer.load_state_dict({**good, "model": {k: v for k, v in good["model"].items() if k != "norm.weight"}})
    with raises(ValueError, "unexpected ['more']"):
        trainer.load_state_dict({**good, "model": {**good["model"], "more": torch.ones(1)}})
    with raises(ValueError, "'norm.weight'", "(17,)", "(16,)"):
        trainer.load_state_dict({**good, "model": {**good["model"], "norm.weight": torch.ones(17)}})
    with raises(ValueError, "parameter groups"):
        trainer.load_state_dict({**good, "optimizer": {**good["optimizer"], "param_groups": []}})
    with raises(ValueError, "{'model': ..., 'optimizer': ...}"):
        trainer.load_state_dict({"model": {}})
    after = flat_state(trainer.state_dict())
    assert all(torch.equal(before[key], after[key]) for key in before)


def model_state_round_trip(rank: int, world: int) -> None:
    """`model.state_dict()` and `model.load_state_dict` speak DTensors and whole tensors."""
    case, trainer = small()
    trainer.train_step(*case.batch(0))
    trainer.optimizer_step()
    kept = {name: whole(value).clone() for name, value in case.model.state_dict().items()}
    other, other_trainer = small()
    _ = other_trainer.optimizer
    other.model.load_state_dict(case.model.state_dict())
    assert all(torch.equal(whole(v), kept[k]) for k, v in other.model.state_dict().items())
    third, third_trainer = small()
    _ = third_trainer.optimizer
    third.model.load_state_dict(kept)
    assert all(torch.equal(whole(v), kept[k]) for k, v in third.model.state_dict().items())


def on_meta(rank: int, world: int) -> None:
    """A model on meta is sharded, then drawn alike on every layout; what cannot be drawn must be loaded."""
    torch.manual_seed(3)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    trainer = GraphTrainer(model, zoo.square_loss, PassConfig(), device="cpu")
    loss = trainer.train_step(torch.ones(2, 5), None)
    assert torch.isfinite(loss)
    values = {name: whole(value) for name, value in model.state_dict().items()}
    assert all(not value.is_meta for value in values.values())
    assert values["0.weight"].std() > 0
    with torch.device("meta"):
        own = zoo.Decoder()
    blank = GraphTrainer(own, zoo.token_loss, PassConfig(), device="cpu")
    batch = zoo._tokens(32)(0)
    with raises(RuntimeError, "layers.0.norm1.weight", "load_state_dict"):
        blank.train_step(*batch)
    _, filled = small()
    blank.load_state_dict(filled.state_dict())
    assert torch.equal(blank.train_step(*batch), filled.train_step(*batch))

    class Turned(nn.Linear):
        """A buffer that is in no state, like the frequencies of a rotary embedding, and drawn the old way."""

        def __init__(self) -> None:
            super().__init__(4, 4, bias=False)
            self.register_buffer("freq", torch.arange(4.0), persistent=False)

        def reset_parameters(self) -> None:
            self.weight.data.normal_()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.freq)

    with torch.device("meta"):
        turned = Turned()
    lacking = GraphTrainer(turned, zoo.square_loss, PassConfig(), device="cpu")
    whole_state = {name: torch.ones(4, 4) for name in ("weight",)}
    for load in (False, True):
        if load:
            lacking.load_state_dict({**lacking.state_dict(), "model": whole_state})
        with raises(RuntimeError, "['freq']", "nothing has filled them"):
            lacking.train_step(torch.ones(2, 4), None)
    turned.freq.copy_(torch.arange(4.0))
    real = Turned()
    nn.init.ones_(real.weight)
    expected = zoo.square_loss(real, torch.ones(2, 4), None)
    assert torch.equal(lacking.train_step(torch.ones(2, 4), None), expected)


def filled_by_function(rank: int, world: int) -> None:
    """`init_fn` sees whole shapes, and only this rank's part has memory; the values are those of an eager model."""
    seen: dict[str, tuple[int, int]] = {}

    def init_fn(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            value = torch.arange(parameter.numel()).view(parameter.shape) / parameter.numel()
            if isinstance(parameter, DTensor):
                part = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(part.to_local())
                seen[name] = parameter.numel(), parameter.to_local().numel()
            else:
                parameter.copy_(value)
                seen[name] = parameter.numel(), parameter.numel()

    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 4))

    with torch.device("meta"):
        model = layers()
        model[1].weight.requires_grad_(False)
    trainer = GraphTrainer(model, zoo.square_loss, PassConfig(), device="cpu", init_fn=init_fn)
    eager = layers()
    with torch.no_grad():
        init_fn(eager)
    seen.clear()
    loss = trainer.train_step(torch.ones(2, 5), None)
    assert torch.equal(loss, zoo.square_loss(eager, torch.ones(2, 5), None))
    assert seen["0.weight"] == (40, 40 // world)
    assert not model[1].weight.requires_grad
    assert all(torch.equal(whole(value), eager.state_dict()[name]) for name, value in model.state_dict().items())

    def replacing(model: nn.Module) -> None:
        model[0].weight = nn.Parameter(torch.ones(8, 5))

    for wrong, words in (
        (replacing, ("init_fn replaced 0.weight", "in place")),
        (lambda model: nn.init.ones_(model[0].bias), ("nothing has filled them", "0.weight")),
    ):
        with torch.device("meta"):
            model = layers()
        with raises(RuntimeError, *words):
            GraphTrainer(model, zoo.square_loss, PassConfig(), device="cpu", init_fn=wrong).train_step(
                torch.ones(2, 5), None
            )
    with raises(ValueError, "has its values already"):
        GraphTrainer(layers(), zoo.square_loss, PassConfig(), device="cpu", init_fn=init_fn)
