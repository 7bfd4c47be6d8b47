"""Checkpoints across layouts: saved by two FSDP ranks and loaded by one process, and back, to the bit."""

import logging
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_components import CheckpointManager, LRSchedulersContainer, OptimizersContainer
from hp_protocols.errors import ConfigError
from hp_protocols.testing import run_world


class Net(nn.Module):
    """Uneven rows (7 over 2 ranks), a tied head, a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, ids):
        self.seen += 1
        return self.head(torch.tanh(self.body(self.embed(ids))))


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


class Run:
    def __init__(self, folder, world_size, seed=0, wrapped=False):
        torch.manual_seed(seed)
        self.model = Net()
        if wrapped:
            self.model.body = checkpoint_wrapper(self.model.body)
        if world_size > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",)))
        self.optimizers = OptimizersContainer.Config(lr=1e-2).build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedule = schedule.build(optimizers=self.optimizers, training_steps=20)
        self.manager = CheckpointManager.Config(interval=1).build(
            run_folder=folder,
            model_parts=[self.model],
            optimizers=self.optimizers,
            states={"lr_scheduler": self.schedule},
        )

    def train(self, steps):
        for number in range(steps):
            ids = torch.arange(6).reshape(2, 3) * (number + 1) % 7
            self.model(ids).square().mean().backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedule.step()

    def contents(self):
        """Everything that matters, gathered; the tied weight under one name."""
        state = {name: whole(value).detach().clone() for name, value in self.model.named_parameters()}
        state["seen"] = self.model.seen.clone()
        state |= {key: whole(value) for key, value in self.optimizers.state_dict().items()}
        state["lr"] = self.schedule.get_last_lr()
        return {key.replace("_checkpoint_wrapped_module.", ""): value for key, value in state.items()}


def same(left, right):
    assert left.keys() == right.keys()
    for key, value in left.items():
        equal = torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]
        assert equal, key
    return True


def train_and_save(world_size, folder, wrapped=False):
    run = Run(folder, world_size, wrapped=wrapped)
    run.train(3)
    run.manager.save(3)
    return run.contents()


def load_and_look(world_size, folder):
    run = Run(folder, world_size, seed=5)
    assert run.manager.load() == 3
    return run.contents()


def refusal_of_another_model(folder):
    model = nn.ModuleDict({"embed": nn.Embedding(7, 5)})
    try:
        CheckpointManager.Config(interval=1).build(run_folder=folder, model_parts=[model]).load()
    except ConfigError as error:
        return str(error)


def draws():
    return random.random(), np.random.rand(), torch.rand(1).item()


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_manager(folder):
    return CheckpointManager.Config(interval=1).build(run_folder=folder, model_parts=[nn.Linear(2, 2)])


def save_random(folder, seed):
    manager = random_manager(folder)
    seed_all(seed)
    draws()
    manager.save(1)
    return draws()


def load_random(folder, seed):
    """What is drawn after loading, and what the log said about random numbers."""
    manager = random_manager(folder)
    seed_all(seed)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("hp_components").addHandler(handler)
    manager.load()
    logging.getLogger("hp_components").removeHandler(handler)
    return draws(), [line for line in lines if "random numbers" in line]


def on_two_ranks(rank, world_size, folder):
    """Everything that two ranks do, in one world: starting one costs seconds."""
    return {
        "trained": train_and_save(world_size, folder / "two"),
        "wrapped": train_and_save(world_size, folder / "wrapped", wrapped=True),
        "loaded": load_and_look(world_size, folder / "one"),
        "refusal": refusal_of_another_model(folder / "one"),
        "random": save_random(folder / "random", seed=3 + rank),
        "common": save_random(folder / "common", seed=3),
        "random again": load_random(folder / "random", seed=99),
    }


def on_three_ranks(rank, world_size, folder):
    """Everything that three ranks do with what two have saved."""
    return {
        "loaded": load_and_look(world_size, folder / "wrapped"),
        "random": load_random(folder / "random", seed=99),
        "random again": load_random(folder / "random", seed=5 + rank),
        "common": load_random(folder / "common", seed=99 + rank),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def one(folder):
    return train_and_save(1, folder / "one")


@pytest.fixture(scope="module")
def two(folder, one):
    return run_world(on_two_ranks, 2, folder)


@pytest.fixture(scope="module")
def three(folder, two):
    return run_world(on_three_ranks, 3, folder)


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key, value in left.items():
        equal = torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]
        assert equal, key


def test_two_fsdp_ranks_to_one_process(folder, two):
    loaded = load_and_look(1, folder / "two")
    assert "state.body.weight.exp_avg" in loaded
    assert_same(two[0]["trained"], loaded)


def test_one_process_to_two_fsdp_ranks(one, two):
    for rank in two:
        assert_same(one, rank["loaded"])


def test_two_wrapped_ranks_to_three_plain_ones(two, three):
    assert_same(two[0]["trained"], two[0]["wrapped"])
    for rank in three:
        assert_same(two[0]["wrapped"], rank["loaded"])


def test_every_rank_refuses_another_models_checkpoint_with_the_same_words(two):
    first, second = (rank["refusal"] for rank in two)
    assert first == second
    assert "names in the checkpoint are unknown to this run: " in first
    assert "model.body.weight" in first


def test_every_rank_gets_its_own_random_numbers_back(two):
    assert two[0]["random"] != two[1]["random"]
    for rank in two:
        assert rank["random again"] == (rank["random"], [])


def test_with_another_number_of_ranks_random_numbers_are_derived_anew_and_the_log_says_so(two, three):
    numbers = [rank["random"][0] for rank in three]
    assert len(set(numbers)) == 3
    assert not set(numbers) & {rank["random"] for rank in two}
    assert [rank["random again"][0] for rank in three] == numbers
    (line,) = three[0]["random"][1]
    assert "saved by 2 ranks and is loaded by 3; each rank's generators are derived anew" in line
    assert three[1]["random"][1] == three[2]["random"][1] == []


def test_ranks_with_one_common_seed_keep_having_one(two, three):
    assert two[0]["common"] == two[1]["common"]
    assert len({rank["common"][0] for rank in three}) == 1
