"""Every optimizer of torch by name: the same bits as torch's own, exact resume, and nothing that is passed over."""

import logging

import pytest
import torch
from torch import nn

from hp_components import OptimizersContainer, ParamGroupConfig
from hp_components.optimizer_kinds import kind_names
from hp_protocols.errors import ConfigError

# Arguments away from their defaults, so that a lost one would show; Muon trains matrices only.
ARGUMENTS = {
    "Adafactor": {"eps": [None, 2e-3], "beta2_decay": -0.5},
    "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.3},
    "Adam": {"amsgrad": True},
    "AdamW": {"amsgrad": True},
    "ASGD": {"lambd": 1e-2, "t0": 1.0},
    "Muon": {"momentum": 0.8, "nesterov": False},
    "NAdam": {"momentum_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {"etas": [0.4, 1.3]},
    "SGD": {"momentum": 0.9, "nesterov": True},
}
LR = 1e-2


def net(seed=0, matrices_only=False):
    torch.manual_seed(seed)
    bias = not matrices_only
    return nn.ModuleDict({"used": nn.Linear(5, 4, bias=bias), "idle": nn.Linear(3, 3, bias=bias)})


def model_for(name, seed=0):
    return net(seed, matrices_only=name == "Muon")


def train(model, step, steps, offset=0):
    for number in range(offset, offset + steps):
        model["used"](torch.linspace(-1, 1 + number, 10).reshape(2, 5)).square().mean().backward()
        step()
        model.zero_grad()


def build(name, model, **changes):
    fields = {"lr": LR, "kwargs": ARGUMENTS.get(name, {}), "decay_keywords": ()}
    return OptimizersContainer.Config(name=name, **fields | changes).build(model_parts=[model])


def torchs_own(name, model):
    """The same optimizer as a user of torch would write it."""
    config = OptimizersContainer.Config()
    arguments = {"lr": LR}
    if name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam"):
        arguments |= {"betas": config.betas}
    if name != "Adafactor":
        arguments |= {} if name in ("ASGD", "Rprop", "SGD") else {"eps": config.eps}
    if name != "Rprop":
        arguments |= {"weight_decay": config.weight_decay}
    if name != "Muon":
        arguments |= {"foreach": False}
    for key, value in ARGUMENTS.get(name, {}).items():
        arguments[key] = tuple(value) if isinstance(value, list) else value
    return getattr(torch.optim, name)(model.parameters(), **arguments)


def assert_same_parameters(left, right):
    for (name, a), (_, b) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", kind_names())
def test_every_optimizer_steps_like_torchs_own(name):
    ours, theirs = model_for(name), model_for(name)
    opt, reference = build(name, ours), torchs_own(name, theirs)
    for number in range(4):
        train(ours, opt.step, 1, number)
        train(theirs, reference.step, 1, number)
        assert_same_parameters(ours, theirs)


@pytest.mark.parametrize("name", kind_names())
def test_looking_at_the_state_of_any_optimizer_before_it_has_one_changes_nothing(name):
    looked, plain = model_for(name), model_for(name)
    opt, reference = build(name, looked), build(name, plain)
    opt.state_dict()
    assert_same_parameters(looked, plain)
    for number in range(3):
        train(looked, opt.step, 1, number)
        train(plain, reference.step, 1, number)
        opt.state_dict()
        assert_same_parameters(looked, plain)


@pytest.mark.parametrize("name", kind_names())
def test_any_optimizer_resumes_to_the_bit(name):
    whole = model_for(name)
    opt = build(name, whole)
    train(whole, opt.step, 3)
    resumed = model_for(name, seed=1)
    resumed.load_state_dict(whole.state_dict())
    again = build(name, resumed)
    saved = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in opt.state_dict().items()}
    assert saved.keys() == again.state_dict().keys()
    again.load_state_dict(saved)
    # The idle layer's first gradient comes now, in both runs.
    for model, step in ((whole, opt.step), (resumed, again.step)):
        model["idle"](torch.ones(1, 3)).sum().backward()
        train(model, step, 3, 3)
    assert_same_parameters(whole, resumed)


def test_plain_sgd_has_no_state_to_save():
    opt = build("SGD", net(), kwargs={})
    assert not any(key.startswith("state.") for key in opt.state_dict())


def faults(**config):
    with pytest.raises(ConfigError) as caught:
        OptimizersContainer.Config(**config).build(model_parts=[net()])
    return [str(fault) for fault in caught.value.faults]


def test_an_unknown_argument_lists_what_the_optimizer_takes():
    (text,) = faults(name="SGD", kwargs={"momentun": 0.9})
    assert text == (
        "optimizer.kwargs.momentun: SGD takes no 'momentun'; allowed: momentum, dampening, nesterov, maximize\n"
        "    → did you mean 'momentum'?"
    )


def test_a_field_that_the_optimizer_does_not_take_is_refused_unless_it_is_at_its_default():
    build("SGD", net())
    first, second = faults(name="Rprop", betas=(0.8, 0.9), weight_decay=0.3)
    assert first.startswith("optimizer.betas: Rprop takes no betas\n    → leave it at its default")
    assert second.startswith("optimizer.weight_decay: Rprop takes no weight_decay\n")
    (text,) = faults(name="Adafactor", eps=1e-5)
    assert "takes another kind of eps" in text
    assert "like (None, 0.001)" in text
    (text,) = faults(name="Adadelta", fused=True)
    assert text.startswith("optimizer.fused: Adadelta takes no fused")


@pytest.mark.parametrize(
    ("name", "reason"), [("LBFGS", "a closure"), ("SparseAdam", "sparse gradients"), ("Adan", "did you mean 'Adam'?")]
)
def test_optimizers_that_cannot_be_are_refused_by_name(name, reason):
    (text,) = faults(name=name)
    assert text.startswith("optimizer.name: ")
    assert reason in text


def test_arguments_are_checked_for_their_type_and_by_the_optimizer_itself():
    assert faults(name="SGD", kwargs={"nesterov": 1, "momentum": "much"}) == [
        "optimizer.kwargs.nesterov: 1 is neither true nor false",
        "optimizer.kwargs.momentum: 'much' is no number",
    ]
    assert faults(name="SGD", kwargs={"nesterov": True}) == [
        "optimizer.kwargs: SGD says: Nesterov momentum requires a momentum and zero dampening"
    ]
    assert faults(name="Rprop", kwargs={"etas": [0.5]}) == ["optimizer.kwargs.etas: [0.5] is not 2 values"]
    assert "cannot be resumed exactly" in faults(name="SGD", kwargs={"momentum": 0.9, "dampening": 0.1})[0]
    assert faults(kwargs={"lr": 1.0, "differentiable": True, "params": []}) == [
        "optimizer.kwargs.lr: lr is a field of the optimizer\n    → set it there, not in optimizer.kwargs",
        "optimizer.kwargs.differentiable: differentiable is for differentiating through a step, it cannot be given",
        "optimizer.kwargs.params: params is what the groups are made of, it cannot be given",
    ]


def test_numbers_that_yaml_reads_as_text_are_numbers():
    opt = build("SGD", net(), kwargs={"momentum": "5e-1"})
    assert opt.param_groups[0]["momentum"] == 0.5


def test_an_optimizer_that_cannot_train_this_model_says_why():
    (text,) = faults(name="Muon")
    assert text.startswith("optimizer.name: Muon trains matrices only, and used.bias has 1 dimensions")


# Groups


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.norm = nn.LayerNorm(5)
        self.lm_head = nn.Linear(5, 7)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.lm_head(self.norm(x))


def grouped(model, *groups, **config):
    opt = OptimizersContainer.Config(**{"lr": LR, **config}, param_groups=list(groups)).build(model_parts=[model])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return opt, [{names[id(p)] for p in group["params"]} for group in opt.param_groups]


def test_the_first_pattern_that_matches_a_name_has_it_and_keywords_hold_within_a_group():
    opt, names = grouped(
        Model(),
        ParamGroupConfig(pattern=r"^layers\.0\.", lr=3e-3, betas=(0.5, 0.6)),
        ParamGroupConfig(pattern=r"layers|lm_head", lr_multiplier=0.5, weight_decay_multiplier=2.0, eps=1e-5),
        ParamGroupConfig(pattern="norm", weight_decay=0.7, kwargs={"amsgrad": True}),
        weight_decay=0.25,
    )
    seen = [
        (group["lr"], group["weight_decay"], group["betas"], group["eps"], group["amsgrad"], found)
        for group, found in zip(opt.param_groups, names, strict=True)
    ]
    betas = (0.9, 0.95)
    assert seen == [
        (LR, 0.25, betas, 1e-8, False, {"embed.weight"}),
        (3e-3, 0.25, (0.5, 0.6), 1e-8, False, {"layers.0.weight"}),
        (3e-3, 0.0, (0.5, 0.6), 1e-8, False, {"layers.0.bias"}),
        (LR / 2, 0.5, betas, 1e-5, False, {"layers.1.weight", "lm_head.weight"}),
        (LR / 2, 0.0, betas, 1e-5, False, {"layers.1.bias", "lm_head.bias"}),
        # What a group says of its weight decay holds for all of it.
        (LR, 0.7, betas, 1e-8, True, {"norm.weight", "norm.bias"}),
    ]


def test_groups_step_like_the_groups_of_torchs_own_optimizer():
    ours, theirs = Model(), Model()
    opt, _ = grouped(
        ours, ParamGroupConfig(pattern="embed", lr=0.1), ParamGroupConfig(pattern="layers", betas=(0.5, 0.6))
    )
    named = dict(theirs.named_parameters())

    def group(part, weight_decay, **settings):
        pick = [
            p for n, p in named.items() if n.startswith(part) and ("bias" in n or "norm" in n) == (not weight_decay)
        ]
        return {"params": pick, "weight_decay": weight_decay, **settings}

    reference = torch.optim.AdamW(
        [
            group(("embed",), 0.1, lr=0.1),
            *(group(("layers",), decay, betas=(0.5, 0.6)) for decay in (0.1, 0.0)),
            *(group(("norm", "lm_head"), decay) for decay in (0.1, 0.0)),
        ],
        lr=LR,
        betas=(0.9, 0.95),
        foreach=False,
    )
    for number in range(3):
        for model, step in ((ours, opt.step), (theirs, reference.step)):
            model(torch.arange(6).reshape(2, 3) * (number + 1) % 7).square().mean().backward()
            step()
            model.zero_grad()
        assert_same_parameters(ours, theirs)


def test_a_tied_weight_belongs_to_the_group_of_its_first_name():
    model = Model()
    model.lm_head.weight = model.embed.weight
    _, names = grouped(model, ParamGroupConfig(pattern="embed", lr=0.1))
    assert sum("embed.weight" in found for found in names) == 1
    assert names[-1] == {"embed.weight"}


def test_a_pattern_that_matches_nothing_names_what_there_is():
    with pytest.raises(ConfigError) as caught:
        grouped(Model(), ParamGroupConfig(pattern=r"layer\.\d+\.wieght"), ParamGroupConfig(pattern="lm-head"))
    first, second = caught.value.faults
    assert first.where == "optimizer.param_groups.0.pattern"
    assert "layers." in first.hint
    assert "lm_head.weight" in second.hint


def test_a_pattern_of_which_nothing_is_left_says_who_has_it():
    with pytest.raises(ConfigError, match=r"'norm\\\.' matches only what 'norm' has taken"):
        grouped(Model(), ParamGroupConfig(pattern="norm"), ParamGroupConfig(pattern=r"norm\."))
    model = Model()
    model.embed.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"'embed' matches only frozen parameters, such as embed\.weight"):
        grouped(model, ParamGroupConfig(pattern="embed"))


def test_every_fault_of_a_group_is_told_at_once():
    bad = ParamGroupConfig(
        pattern="(", lr=-1.0, weight_decay=0.1, weight_decay_multiplier=2.0, kwargs={"momentum": 0.9}
    )
    with pytest.raises(ConfigError) as caught:
        grouped(Model(), bad, ParamGroupConfig(pattern=""))
    assert {fault.where.removeprefix("optimizer.param_groups.") for fault in caught.value.faults} == {
        "0.pattern", "0.lr", "0.weight_decay", "0.kwargs.momentum", "1.pattern",
    }  # fmt: skip


def test_patterns_and_keywords_are_judged_over_all_model_parts():
    parts = [nn.ModuleDict({"first": nn.Linear(2, 2)}), nn.ModuleDict({"second": nn.Linear(2, 2)})]
    config = OptimizersContainer.Config(
        decay_keywords=("second",), param_groups=[ParamGroupConfig(pattern="first", lr=0.5)]
    )
    opt = config.build(model_parts=parts)
    assert [(group["lr"], group["weight_decay"]) for group in opt.param_groups] == [(0.5, 0.1), (3e-4, 0.0)]


def test_a_model_part_that_is_frozen_as_a_whole_needs_no_optimizer():
    parts = [
        nn.ModuleDict({"first": nn.Linear(2, 2)}).requires_grad_(False),
        nn.ModuleDict({"second": nn.Linear(2, 2)}),
    ]
    opt = OptimizersContainer.Config().build(model_parts=parts)
    assert len(opt) == 1
    assert {key.split(".")[1] for key in opt.state_dict()} == {"second"}


def test_a_weight_that_two_model_parts_share_is_stepped_and_saved_by_the_first():
    shared = nn.Linear(2, 2, bias=False)
    parts = [nn.ModuleDict({"embed": shared}), nn.ModuleDict({"lm_head": shared, "norm": nn.LayerNorm(2)})]
    opt = OptimizersContainer.Config().build(model_parts=parts)
    assert sum(p is shared.weight for group in opt.param_groups for p in group["params"]) == 1
    state = opt.state_dict()
    assert {key.split(".")[1] for key in state} == {"embed", "norm"}
    opt.load_state_dict(state)


def test_other_groups_on_resume_are_followed_and_told(caplog):
    saved, _ = grouped(Model(), ParamGroupConfig(pattern="embed", lr=0.1))
    again, _ = grouped(Model(), ParamGroupConfig(pattern="embed", lr=0.2), ParamGroupConfig(pattern="norm", eps=1e-4))
    with caplog.at_level(logging.WARNING):
        again.load_state_dict(saved.state_dict())
    assert sorted({group["lr"] for group in again.param_groups}) == [LR, 0.2]
    assert "lr was 0.1 when the checkpoint was saved and is 0.2 now" in caplog.text
    assert "eps was 1e-08 when the checkpoint was saved and is 0.0001 now" in caplog.text
