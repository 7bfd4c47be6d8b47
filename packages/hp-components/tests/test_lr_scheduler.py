"""The schedule against torch's own schedulers and hand-made tables, and its resume."""

import logging
import math

import pytest
import torch
from torch import nn

from hp_components import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from hp_protocols.errors import ConfigError


def optimizers(lr=2.0):
    return OptimizersContainer.Config(lr=lr, weight_decay=0.0).build(model_parts=[nn.Linear(2, 2)])


def rates(training_steps, *, lr=2.0, more=0, **config):
    """The rate of each step, as the optimizer sees it."""
    opt = optimizers(lr)
    schedule = LRSchedulersContainer.Config(**config).build(optimizers=opt, training_steps=training_steps)
    seen = []
    for _ in range(training_steps + more):
        seen.append(opt.param_groups[0]["lr"])
        assert schedule.get_last_lr() == [group["lr"] for group in opt.param_groups]
        opt.step()
        schedule.step()
    return seen


def torchs_rates(make, training_steps, lr=2.0):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer)
    seen = []
    for _ in range(training_steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_warmup_then_each_decay_follows_a_hand_made_table():
    warmup = [0.5, 1.0, 1.5, 2.0]
    tables = {
        "linear": [2.0, 1.5, 1.0, 0.5],
        "constant": [2.0] * 4,
        "sqrt": [2.0, 2 - 2 * math.sqrt(0.25), 2 - 2 * math.sqrt(0.5), 2 - 2 * math.sqrt(0.75)],
        "cosine": [1 + math.cos(math.pi * progress) for progress in (0, 0.25, 0.5, 0.75)],
    }
    for decay_type, table in tables.items():
        assert rates(8, warmup_steps=4, decay_type=decay_type) == pytest.approx(warmup + table, abs=1e-12), decay_type


def test_cosine_and_linear_equal_torchs_own_schedulers():
    def cosine(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.3)

    def linear(optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=50)

    assert rates(50, warmup_steps=0, lr_min=0.3) == pytest.approx(torchs_rates(cosine, 50), rel=1e-9)
    assert rates(50, warmup_steps=0, decay_type="linear", min_lr_factor=0.1) == pytest.approx(
        torchs_rates(linear, 50), rel=1e-9
    )


def test_the_minimum_is_reached_one_step_behind_the_last_and_kept():
    for floor in ({"min_lr_factor": 0.25}, {"lr_min": 0.5}):
        for decay_type in ("cosine", "linear", "sqrt"):
            seen = rates(10, warmup_steps=2, decay_type=decay_type, more=4, **floor)
            assert seen[9] > 0.5
            assert seen[10:] == [0.5] * 4


def test_decay_ratio_keeps_a_plateau_before_the_decay():
    seen = rates(10, warmup_steps=2, decay_ratio=0.4, decay_type="linear")
    assert seen == pytest.approx([1.0, 2.0] + [2.0] * 5 + [1.5, 1.0, 0.5])
    assert rates(10, warmup_steps=2, decay_ratio=0.0) == pytest.approx([1.0] + [2.0] * 9)


def test_a_warmup_longer_than_the_run_is_clamped_and_logged(caplog):
    with caplog.at_level(logging.WARNING):
        seen = rates(4, warmup_steps=200)
    assert seen == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert "warmup of 200 steps is longer than the run of 4 steps; it is clamped to 4" in caplog.text


def test_a_decay_that_does_not_fit_behind_the_warmup_is_clamped_and_logged(caplog):
    with caplog.at_level(logging.WARNING):
        seen = rates(10, warmup_steps=6, decay_ratio=0.8, decay_type="linear")
    assert seen == rates(10, warmup_steps=6, decay_type="linear")
    assert "the decay is clamped to 4" in caplog.text


def test_total_steps_overrides_the_runs_length():
    assert rates(5, warmup_steps=0, total_steps=10) == rates(10, warmup_steps=0)[:5]


def test_resuming_at_any_step_gives_the_same_rates_to_the_bit():
    config = LRSchedulersContainer.Config(warmup_steps=5, min_lr_factor=0.1)
    whole = rates(20, warmup_steps=5, min_lr_factor=0.1)
    for stop in range(20):
        first = config.build(optimizers=optimizers(), training_steps=20)
        for _ in range(stop):
            first.step()
        opt = optimizers()
        resumed = config.build(optimizers=opt, training_steps=20)
        resumed.load_state_dict(first.state_dict())
        assert resumed.get_last_lr() == [whole[stop]] * len(opt.param_groups)


def test_the_rate_still_reaches_an_optimizer_whose_state_was_loaded():
    opt = optimizers()
    schedule = LRSchedulersContainer.Config(warmup_steps=0).build(optimizers=opt, training_steps=10)
    opt.load_state_dict(opt.state_dict())  # torch replaces the group objects
    schedule.step()
    assert opt.param_groups[0]["lr"] == rates(10, warmup_steps=0)[1] != 2.0


def test_a_changed_schedule_is_told_on_resume_and_followed(caplog):
    opt = optimizers()
    saved = LRSchedulersContainer.Config(warmup_steps=0).build(optimizers=opt, training_steps=10).state_dict()
    longer = LRSchedulersContainer.Config(warmup_steps=0).build(optimizers=opt, training_steps=20)
    with caplog.at_level(logging.WARNING):
        longer.load_state_dict({**saved, "step": 5})
    assert "total_steps was 10 when the checkpoint was saved and is 20 now" in caplog.text
    assert longer.get_last_lr()[0] == rates(20, warmup_steps=0)[5]


@pytest.mark.parametrize("decay_type", ["cosine", "linear", "sqrt"])
@pytest.mark.parametrize(("warmup", "decay_ratio"), [(0, None), (10, None), (7, 0.25), (0, 1.0), (40, 0.5), (59, None)])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_every_step_of_every_shape_is_that_of_transformers(decay_type, warmup, decay_ratio, floor):
    from transformers import get_wsd_schedule

    total = 60
    decay = min(total - warmup, total - warmup if decay_ratio is None else round(total * decay_ratio))

    def reference(optimizer):
        return get_wsd_schedule(
            optimizer,
            num_warmup_steps=warmup,
            num_decay_steps=decay,
            num_training_steps=total,
            decay_type={"sqrt": "1-sqrt"}.get(decay_type, decay_type),
            min_lr_ratio=floor,
        )

    config = {"warmup_steps": warmup, "decay_ratio": decay_ratio, "decay_type": decay_type, "min_lr_factor": floor}
    ours = rates(total, more=5, **config)
    theirs = torchs_rates(reference, total + 5)
    # transformers' warmup begins at the floor (here 0); ours is one step ahead, so that no step is trained at 0.
    warming_up = [2.0 * (step + 1) / warmup for step in range(warmup)]
    assert ours == pytest.approx(warming_up + theirs[warmup:], rel=1e-12, abs=1e-12)


def test_warmup_plateau_and_decay_are_torchs_sequence_of_them():
    def sequence(optimizer):
        schedulers = torch.optim.lr_scheduler
        return schedulers.SequentialLR(
            optimizer,
            [
                schedulers.LinearLR(optimizer, start_factor=1 / 8, end_factor=1.0, total_iters=7),
                schedulers.ConstantLR(optimizer, factor=1.0, total_iters=1),
                schedulers.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.2),
            ],
            milestones=[8, 30],
        )

    ours = rates(50, warmup_steps=8, decay_ratio=0.4, lr_min=0.2)
    assert ours == pytest.approx(torchs_rates(sequence, 50), rel=1e-9)


def test_each_group_follows_the_schedule_at_its_own_height():
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    groups = [ParamGroupConfig(pattern="head", lr=0.5), ParamGroupConfig(pattern="body.bias", lr=0.0)]
    opt = OptimizersContainer.Config(lr=2.0, param_groups=groups).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2, lr_min=0.25, decay_type="linear").build(
        optimizers=opt, training_steps=6
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen = []
    for _ in range(8):
        seen.append({names[id(p)]: group["lr"] for group in opt.param_groups for p in group["params"]})
        schedule.step()
    assert [rates["body.weight"] for rates in seen] == pytest.approx([1, 2, 2, 1.5625, 1.125, 0.6875, 0.25, 0.25])
    assert [rates["head.weight"] for rates in seen] == pytest.approx(
        [0.25, 0.5, 0.5, 0.4375, 0.375, 0.3125, 0.25, 0.25]
    )
    assert all(rates["head.weight"] == rates["head.bias"] and rates["body.bias"] == 0.0 for rates in seen)
    with pytest.raises(
        ConfigError, match=r"0\.6 is above the learning rate 0\.5 \(of the optimizer or one of its param"
    ):
        LRSchedulersContainer.Config(lr_min=0.6).build(optimizers=opt, training_steps=6)


@pytest.mark.parametrize(
    ("before", "after", "step", "told"),
    [
        (
            {"training_steps": 10},
            {"training_steps": 20},
            5,
            "decay_steps was 10 when the checkpoint was saved and is 20 now, total_steps was 10 when the checkpoint "
            "was saved and is 20 now; the rate of step 6 is 1.5 (the schedule before would have it at 1), and from "
            "there it decays (linear) to 0 of its full height at step 20",
        ),
        (
            {"training_steps": 100, "decay_ratio": 0.2},
            {"training_steps": 200, "decay_ratio": 0.2},
            90,
            "decay_steps was 20 when the checkpoint was saved and is 40 now, total_steps was 100 when the checkpoint "
            "was saved and is 200 now; the rate of step 91 is 2 (the schedule before would have it at 1), and from "
            "there it stays until step 160, then decays (linear) to 0 of its full height at step 200",
        ),
        (
            {"training_steps": 10, "warmup_steps": 0},
            {"training_steps": 10, "warmup_steps": 8, "min_lr_factor": 0.25},
            4,
            "decay_steps was 10 when the checkpoint was saved and is 2 now, floors was 0 when the checkpoint was saved "
            "and is 0.25 now, warmup_steps was 0 when the checkpoint was saved and is 8 now; the rate of step 5 is "
            "1.25 (the schedule before would have it at 1.2), and from there it grows to full height at step 8, then "
            "decays (linear) to 0.25 of its full height at step 10",
        ),
        (
            {"training_steps": 10},
            {"training_steps": 4},
            5,
            "decay_steps was 10 when the checkpoint was saved and is 4 now, total_steps was 10 when the checkpoint was "
            "saved and is 4 now; the rate of step 6 is 0 (the schedule before would have it at 1), and from there the "
            "schedule ended at step 4, the rate stays where it is",
        ),
    ],
)
def test_a_changed_schedule_says_old_and_new_and_what_the_rate_does_now(caplog, before, after, step, told):
    def build(training_steps, **config):
        config = {"warmup_steps": 0, "decay_type": "linear", **config}
        return LRSchedulersContainer.Config(**config).build(optimizers=optimizers(), training_steps=training_steps)

    first, resumed = build(**before), build(**after)
    for _ in range(step):
        first.step()
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(first.state_dict())
    assert [record.getMessage() for record in caplog.records] == [f"learning-rate schedule: {told}"]


def test_a_schedule_that_is_shorter_than_the_run_says_how_the_rest_is_trained(caplog):
    with caplog.at_level(logging.WARNING):
        assert rates(6, warmup_steps=0, total_steps=4)[4:] == [0.0, 0.0]
    assert "it ends after 4 of 6 steps; the others are trained at its minimum" in caplog.text


def test_other_groups_alone_are_no_other_schedule(caplog):
    saved = LRSchedulersContainer.Config(warmup_steps=3).build(optimizers=optimizers(), training_steps=10).state_dict()
    groups = [ParamGroupConfig(pattern="bias", lr=0.5)]
    opt = OptimizersContainer.Config(lr=2.0, param_groups=groups).build(model_parts=[nn.Linear(2, 2)])
    with caplog.at_level(logging.WARNING):
        LRSchedulersContainer.Config(warmup_steps=3).build(optimizers=opt, training_steps=10).load_state_dict(saved)
    assert not caplog.records


def test_an_unchanged_schedule_is_resumed_without_a_word(caplog):
    config = LRSchedulersContainer.Config(warmup_steps=3)
    first = config.build(optimizers=optimizers(), training_steps=10)
    with caplog.at_level(logging.WARNING):
        config.build(optimizers=optimizers(), training_steps=10).load_state_dict(first.state_dict())
    assert not caplog.records


def test_every_fault_of_a_config_is_told_at_once():
    config = LRSchedulersContainer.Config(
        warmup_steps=-1, total_steps=0, decay_ratio=1.5, decay_type="cubic", min_lr_factor=-0.1, lr_min=0.1
    )
    with pytest.raises(ConfigError) as caught:
        config.build(optimizers=optimizers(), training_steps=10)
    places = {fault.where for fault in caught.value.faults}
    assert places == {
        f"lr_scheduler.{name}"
        for name in ("warmup_steps", "total_steps", "decay_ratio", "decay_type", "min_lr_factor", "lr_min")
    }


def test_a_minimum_above_the_rate_is_refused():
    with pytest.raises(ConfigError, match=r"3\.0 is above the learning rate 2\.0"):
        LRSchedulersContainer.Config(lr_min=3.0).build(optimizers=optimizers(), training_steps=10)


def test_a_schedule_that_only_warms_up_stands_at_its_end_afterwards():
    seen = rates(4, more=3, warmup_steps=4, min_lr_factor=0.25)
    assert seen == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 0.5, 0.5])
