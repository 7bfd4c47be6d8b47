"""Where a run starts from, what is left out, what is refused, and what the log says about it."""

import logging

import pytest
import torch
from torch import nn

from hp_components import CheckpointManager, LRSchedulersContainer, OptimizersContainer
from hp_components.checkpoint import list_checkpoints, load_model
from hp_protocols.errors import ConfigError


class Run:
    def __init__(self, folder, seed=0, width=3, **config):
        torch.manual_seed(seed)
        self.model = nn.Linear(4, width)
        self.optimizers = OptimizersContainer.Config(lr=1e-2).build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedule = schedule.build(optimizers=self.optimizers, training_steps=50)
        self.manager = CheckpointManager.Config(**({"interval": 2} | config)).build(
            run_folder=folder,
            model_parts=[self.model],
            optimizers=self.optimizers,
            states={"lr_scheduler": self.schedule},
        )

    def train(self, first, last, *, to_the_end=False):
        for step in range(first, last + 1):
            self.model(torch.randn(6, 4)).square().mean().backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedule.step()
            self.manager.save(step, last=to_the_end and step == last)
        self.manager.close()
        return self

    @property
    def weight(self):
        return self.model.weight.detach().clone()

    @property
    def rate(self):
        return self.schedule.get_last_lr()

    @property
    def moment(self):
        return self.optimizers.state_dict()["state.weight.exp_avg"].clone()


@pytest.fixture
def other(tmp_path):
    """A finished run of six steps elsewhere."""
    return Run(tmp_path / "other").train(1, 6)


def step_6(tmp_path):
    return str(tmp_path / "other/checkpoint/step-6")


def entries(folder):
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


# Another run's checkpoint


def test_weights_alone_are_taken_from_another_run(tmp_path, other, caplog):
    run = Run(tmp_path / "new", seed=7, initial_load_path=step_6(tmp_path))
    with caplog.at_level(logging.INFO):
        assert run.manager.load() is None
    assert torch.equal(run.weight, other.weight)
    assert not run.moment.any()
    assert run.rate != other.rate
    assert (
        f"loading the weights of checkpoint {step_6(tmp_path)}: checkpoint.initial_load_path, since there is no "
        in (caplog.text)
    )
    assert "step-6: optimizer, rng, lr_scheduler (only the weights were asked for)" in caplog.text


def test_everything_is_taken_from_another_run_and_saved_in_the_own_folder(tmp_path, other, caplog):
    run = Run(tmp_path / "new", seed=7, initial_load_path=step_6(tmp_path), initial_load_model_only=False)
    with caplog.at_level(logging.INFO):
        assert run.manager.load() == 6
    assert torch.equal(run.weight, other.weight)
    assert torch.equal(run.moment, other.moment)
    assert run.rate == other.rate
    assert "loading everything of checkpoint" in caplog.text
    assert run.manager.save(6, force=True)  # what was loaded is not on disk in this run's folder
    assert entries(tmp_path / "new") == ["step-6"]


def test_own_checkpoints_come_first_and_the_log_says_so(tmp_path, other, caplog):
    options = {"initial_load_path": step_6(tmp_path)}
    first = Run(tmp_path / "new", **options)
    first.manager.load()
    first.train(1, 2)
    again = Run(tmp_path / "new", seed=5, **options)
    with caplog.at_level(logging.WARNING):
        assert again.manager.load() == 2
    assert torch.equal(again.weight, first.weight)
    assert "checkpoint.initial_load_path is not used: this run has checkpoints of its own in" in caplog.text


def refusal(run):
    with pytest.raises(ConfigError) as caught:
        run.manager.load()
    return str(caught.value)


def test_what_is_no_checkpoint_is_refused_with_what_could_have_been_meant(tmp_path, other):
    def start(path, **options):
        return refusal(Run(tmp_path / "new", initial_load_path=str(path), **options))

    assert "there is no folder" in start(tmp_path / "nowhere")
    for folder in (tmp_path / "other", tmp_path / "other/checkpoint"):
        assert f"a folder with some\n    → name one of its checkpoints, for example {step_6(tmp_path)}" in start(folder)
    (tmp_path / "empty").mkdir()
    assert "it has no .metadata" in start(tmp_path / "empty")
    (tmp_path / "empty/model.safetensors").touch()
    assert "--checkpoint.initial_load_in_hf" in start(tmp_path / "empty")
    data = tmp_path / "other/checkpoint/step-6/__0_0.distcp"
    data.write_bytes(data.read_bytes()[:100])
    assert "damaged since it was saved" in start(step_6(tmp_path))
    assert "steps found: none" in start(step_6(tmp_path), load_step=4)


def test_another_models_weights_are_refused_by_name(tmp_path, other):
    text = refusal(Run(tmp_path / "new", width=5, initial_load_path=step_6(tmp_path)))
    assert "model.weight (checkpoint (3, 4), here (5, 4))" in text
    assert "model.bias (checkpoint (3,), here (5,))" in text


def test_a_checkpoint_that_was_renamed_is_still_one(tmp_path, other):
    (tmp_path / "other/checkpoint/step-6").rename(tmp_path / "good")
    run = Run(tmp_path / "new", seed=7, initial_load_path=str(tmp_path / "good"), initial_load_model_only=False)
    assert run.manager.load() == 6
    assert torch.equal(run.moment, other.moment)


# What is left out


def test_excluded_parts_stay_as_they_are_and_the_log_says_so(tmp_path, other, caplog):
    run = Run(tmp_path / "other", seed=7, exclude_from_loading=("optimizer", "lr_scheduler", "rng"))
    draw = torch.get_rng_state()
    with caplog.at_level(logging.INFO):
        assert run.manager.load() == 6
    assert torch.equal(run.weight, other.weight)
    assert not run.moment.any()
    assert run.rate != other.rate
    assert torch.equal(torch.get_rng_state(), draw)
    assert "step-6: optimizer, rng, lr_scheduler (checkpoint.exclude_from_loading)" in caplog.text


def test_the_model_can_be_left_out_too(tmp_path, other):
    run = Run(tmp_path / "other", seed=7, width=3, exclude_from_loading=("model",))
    before = run.weight
    assert run.manager.load() == 6
    assert torch.equal(run.weight, before)
    assert torch.equal(run.moment, other.moment)


def test_a_part_that_is_not_there_cannot_be_left_out(tmp_path):
    with pytest.raises(ConfigError) as caught:
        Run(tmp_path, exclude_from_loading=("optimiser", "tokens"))
    text = str(caught.value)
    assert "no part 'optimiser'; allowed: model, optimizer, rng, lr_scheduler" in text
    assert "did you mean 'optimizer'?" in text
    assert "no part 'tokens'" in text


# The last save


def test_a_last_save_of_the_weights_alone_can_be_started_from_but_not_resumed(tmp_path, caplog):
    run = Run(tmp_path / "run", last_save_model_only=True, export_dtype="bfloat16").train(1, 5, to_the_end=True)
    infos = list_checkpoints(tmp_path / "run/checkpoint")
    assert [(info.step, info.model_only) for info in infos] == [(2, False), (4, False), (5, True)]
    model = nn.Linear(4, 3)
    load_model(model, tmp_path / "run/checkpoint/step-5")
    assert torch.equal(model.weight, run.weight.bfloat16().float())
    with caplog.at_level(logging.INFO):
        assert Run(tmp_path / "run").manager.load() == 4
    assert "step 5 holds only the weights (last_save_model_only), so the run goes on from step 4" in caplog.text
    assert "step 5 in" in refusal(Run(tmp_path / "run", load_step=5))
    started = Run(tmp_path / "new", seed=3, initial_load_path=str(tmp_path / "run/checkpoint/step-5"))
    assert started.manager.load() is None
    assert torch.equal(started.weight, model.weight)
    options = {"initial_load_path": str(tmp_path / "run/checkpoint/step-5"), "initial_load_model_only": False}
    assert "holds only the weights" in refusal(Run(tmp_path / "new", **options))


def test_a_run_that_left_only_weights_says_how_to_use_them(tmp_path):
    Run(tmp_path, interval=100, last_save_model_only=True).train(1, 5, to_the_end=True)
    text = refusal(Run(tmp_path))
    assert "holds only the weights, so no run can go on from it" in text
    assert f"--checkpoint.initial_load_path={tmp_path}/checkpoint/step-5" in text


def test_an_interrupted_run_saves_everything_whatever_its_last_save_would_be(tmp_path):
    run = Run(tmp_path, last_save_model_only=True).train(1, 3)
    assert run.manager.save(3, force=True)
    assert Run(tmp_path).manager.load() == 3


# When


def test_the_first_step_is_saved_where_that_is_asked_for(tmp_path):
    Run(tmp_path, interval=4, enable_first_step_checkpoint=True).train(1, 4)
    assert entries(tmp_path) == ["step-1", "step-4"]


def test_load_only_saves_nothing(tmp_path, other):
    run = Run(tmp_path / "other", load_only=True)
    assert run.manager.load() == 6
    assert run.manager.save(8, force=True) is False
    assert entries(tmp_path / "other") == ["step-2", "step-4", "step-6"]


def test_options_that_say_nothing_or_exclude_each_other_are_refused_together(tmp_path):
    with pytest.raises(ConfigError) as caught:
        Run(tmp_path, initial_load_in_hf=True, initial_load_model_only=False, export_dtype="float16")
    assert {fault.where.removeprefix("checkpoint.") for fault in caught.value.faults} == {
        "initial_load_in_hf", "initial_load_model_only", "export_dtype",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="load_only"):
        Run(tmp_path, load_only=True, last_save_model_only=True)
