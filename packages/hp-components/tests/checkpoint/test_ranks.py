"""Several ranks: saves beside training that communicates, a rank that fails alone, and 8 → 2 → 1 with every layout's
oddities: empty shards, a frozen parameter, a tied one, a buffer."""

import logging
import os
import resource
import threading

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_components import CheckpointManager, OptimizersContainer
from hp_components.checkpoint import list_checkpoints
from hp_protocols.testing import run_world


class Net(nn.Module):
    """Seven rows: fewer than ranks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.fixed = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, ids):
        self.seen += 1
        return self.head(torch.tanh(self.fixed(self.embed(ids))))


class Run:
    def __init__(self, folder, world_size, seed=0, **config):
        torch.manual_seed(seed)
        self.model = Net()
        if world_size > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",)))
        self.optimizers = OptimizersContainer.Config(lr=1e-2).build(model_parts=[self.model])
        self.manager = CheckpointManager.Config(**({"interval": 1} | config)).build(
            run_folder=folder, model_parts=[self.model], optimizers=self.optimizers
        )

    def step(self):
        self.model(torch.arange(6).reshape(2, 3)).square().mean().backward()
        self.optimizers.step()
        self.optimizers.zero_grad()

    def contents(self):
        state = {name: value.detach() for name, value in self.model.named_parameters()}
        state |= {"seen": self.model.seen, **self.optimizers.state_dict()}
        whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
        return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in whole.items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key], key


def load_and_look(folder, world_size, step):
    run = Run(folder, world_size, seed=5)
    assert run.manager.load() == step
    return run, run.contents()


# Beside training


def hold_up_the_disk():
    """It answers a save in the background when the event is set."""
    free, fsync = threading.Event(), os.fsync

    def wait(fd):
        if threading.current_thread() is not threading.main_thread():
            assert free.wait(60)
        fsync(fd)

    os.fsync = wait
    return free


def told_to(logger_name):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger(logger_name).addHandler(handler)
    return lines


def beside_training(rank, world_size, folder):
    lines = told_to("hp_components")
    disk_is_free = hold_up_the_disk()
    run = Run(folder / "run", world_size, async_mode="async")
    run.step()
    run.manager.save(1)
    at_the_time = run.contents()
    steps_meanwhile = 0
    saved = torch.tensor(0.0)
    while not saved:
        run.step()  # FSDP's own messages, while the ranks agree on the save
        steps_meanwhile += 1
        if steps_meanwhile == 4:
            disk_is_free.set()
        saved.fill_(run.manager.latest() is not None)
        torch.distributed.all_reduce(saved)  # all ranks do the same number of steps
    run.manager.close()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    assert run.manager.save(2) is True
    run.step()
    run.manager.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    kept = [info.step for info in list_checkpoints(folder / "run/checkpoint")]
    run.manager.save(3)
    run.manager.close()
    return at_the_time, steps_meanwhile, lines, kept


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beside")
    return folder, run_world(beside_training, 2, folder)


def test_a_sharded_save_is_of_its_step_while_training_communicates(beside):
    folder, ranks = beside
    for at_the_time, steps_meanwhile, _, _ in ranks:
        assert steps_meanwhile >= 4  # before them it was not written
        run = Run(folder / "run", 1, seed=5, load_step=1)
        assert run.manager.load() == 1
        assert_same(run.contents(), at_the_time)


def test_a_rank_that_fails_in_the_background_fails_the_save_for_all_and_training_goes_on(beside):
    folder, ranks = beside
    lines = ranks[0][2]
    (line,) = [line for line in lines if "NOT saved" in line]
    assert line.startswith("checkpoint of step 2 NOT saved: cannot write ")
    assert "rank 1: OSError: [Errno 27] File too large" in line
    assert line.endswith("Training goes on; the newest checkpoint is still step-1")
    assert not any("NOT saved" in line for line in ranks[1][2])
    assert ranks[0][3] == ranks[1][3] == [1]
    assert sorted(path.name for path in (folder / "run/checkpoint").iterdir()) == ["step-1", "step-3"]


# Another number of ranks


def train_and_save(rank, world_size, folder):
    run = Run(folder / "eight", world_size)
    for _ in range(3):
        run.step()
    run.manager.save(3)
    run.step()
    run.manager.save(4)  # the second save of a process uses the first one's plan
    return run.contents()


def load_train_and_save(rank, world_size, folder):
    run, loaded = load_and_look(folder / "eight", world_size, 4)
    run.step()
    start = {"initial_load_path": str(folder / "eight/checkpoint/step-4"), "initial_load_model_only": False}
    two = Run(folder / "two", world_size, **start)
    two.manager.load()
    two.step()
    two.manager.save(5)
    return loaded, run.contents(), two.contents()


def test_eight_ranks_to_two_to_one_to_the_bit(tmp_path):
    eight = run_world(train_and_save, 8, tmp_path)
    two = run_world(load_train_and_save, 2, tmp_path)
    for rank in eight[1:]:
        assert_same(eight[0], rank)
    assert "state.embed.weight.exp_avg" in eight[0]
    assert not any("fixed" in name for name in eight[0] if name.startswith("state."))
    for loaded, went_on, started_from in two:
        assert_same(eight[0], loaded)
        assert_same(went_on, started_from)
    assert_same(two[0][2], load_and_look(tmp_path / "two", 1, 5)[1])
