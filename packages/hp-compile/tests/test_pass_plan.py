"""PassPlan: lookup order, units, merge, strict YAML."""

from __future__ import annotations

import pytest

from hp_compile import FSDPModuleConfig, PassPlan, create_sharding_plan_from_yaml

MODULES = [
    "",
    "embed",
    "layers",
    "layers.0",
    "layers.0.attn",
    "layers.0.mlp",
    "layers.0.mlp.up",
    "layers.1",
    "layers.1.attn",
    "act",
]
PARAMS = ["embed.weight", "layers.0.attn.weight", "layers.0.mlp.up.weight", "layers.0.mlp.up.bias"]
PARAMS += ["layers.1.attn.weight", "scale"]


def plan(*patterns: str, modules: tuple[str, ...] = ()) -> PassPlan:
    return PassPlan(
        {name: FSDPModuleConfig() for name in modules}, {pattern: FSDPModuleConfig() for pattern in patterns}
    )


def test_lookup_takes_the_exact_name_first_then_the_first_pattern():
    exact, first, second = FSDPModuleConfig(), FSDPModuleConfig(), FSDPModuleConfig()
    found = PassPlan({"layers.0": exact}, {"layers.*": first, "*": second})
    assert found.lookup("layers.0") is exact
    assert found.lookup("layers.1.attn") is first
    assert found.lookup("embed") is second
    assert PassPlan().lookup("embed") is None


def test_a_pattern_gives_one_unit_per_layer_not_one_per_linear():
    units = plan("layers.*").resolve(MODULES, PARAMS).unit_of
    assert units == {
        "layers.0.attn.weight": "layers.0",
        "layers.0.mlp.up.weight": "layers.0",
        "layers.0.mlp.up.bias": "layers.0",
        "layers.1.attn.weight": "layers.1",
    }


def test_of_several_marked_ancestors_the_deepest_is_the_unit():
    units = plan("layers.*", modules=("layers.0.mlp",)).resolve(MODULES, PARAMS).unit_of
    assert units["layers.0.mlp.up.bias"] == "layers.0.mlp"
    assert units["layers.0.attn.weight"] == "layers.0"


def test_a_parameter_may_be_named_itself():
    units = plan("*.bias", modules=("embed.weight",)).resolve(MODULES, PARAMS).unit_of
    assert units == {"embed.weight": "embed.weight", "layers.0.mlp.up.bias": "layers.0.mlp.up.bias"}


def test_a_star_marks_each_top_level_name_and_not_the_root():
    units = plan("*").resolve(MODULES, PARAMS).unit_of
    assert units["scale"] == "scale"
    assert units["embed.weight"] == "embed"
    assert units["layers.1.attn.weight"] == "layers"


def test_patterns_respect_case():
    assert plan("LAYERS.*").resolve(MODULES, PARAMS).unmatched == ("LAYERS.*",)


def test_an_entry_that_covers_no_parameter_is_an_error_with_near_names():
    wrong = plan("blocks.*", modules=("embedd", "act", "embed"))
    assert wrong.resolve(MODULES, PARAMS).unmatched == ("embedd", "act", "blocks.*")
    with pytest.raises(ValueError, match=r"(?s)'embedd'; near names: embed.*'act'.*'blocks\.\*'"):
        wrong.check_matches(MODULES, PARAMS)
    assert plan("layers.*").check_matches(MODULES, PARAMS) == plan("layers.*").resolve(MODULES, PARAMS)


def test_merge_returns_a_new_plan_in_which_the_other_wins():
    mine, other = plan("a.*", modules=("x",)), plan("b.*", modules=("x", "y"))
    merged = mine.merge(other)
    assert list(merged.fsdp_patterns) == ["a.*", "b.*"]
    assert merged.fsdp_modules["x"] is other.fsdp_modules["x"]
    assert list(mine.fsdp_modules) == ["x"]
    assert list(other.fsdp_patterns) == ["b.*"]


def test_a_plan_does_not_follow_the_dict_it_was_built_from():
    entries = {"x": FSDPModuleConfig()}
    built = PassPlan(entries)
    entries["y"] = FSDPModuleConfig()
    assert list(built.fsdp_modules) == ["x"]


@pytest.mark.parametrize("bad", [{"": FSDPModuleConfig()}, {3: FSDPModuleConfig()}, {"x": None}, ["x"]])
def test_a_plan_checks_its_entries(bad):
    with pytest.raises(ValueError, match=r"fsdp_modules.*allowed"):
        PassPlan(fsdp_modules=bad)
    with pytest.raises(ValueError, match=r"fsdp_patterns.*allowed"):
        PassPlan(fsdp_patterns=bad)


def test_yaml_lists_modules_and_patterns(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text('fsdp:\n  enabled: true\n  modules:\n  - name: embed\n  patterns:\n  - pattern: "layers.*"\n')
    assert create_sharding_plan_from_yaml(file) == plan("layers.*", modules=("embed",))
    assert create_sharding_plan_from_yaml(str(file)) == plan("layers.*", modules=("embed",))


def test_enabled_defaults_to_something_is_listed():
    listed = {"modules": [{"name": "embed"}]}
    assert create_sharding_plan_from_yaml({"fsdp": listed}) == plan(modules=("embed",))
    assert create_sharding_plan_from_yaml({"fsdp": {**listed, "enabled": False}}) == PassPlan()
    assert create_sharding_plan_from_yaml({"fsdp": {}}) == PassPlan()


def test_the_rest_is_a_choice_in_code_and_in_yaml():
    read = create_sharding_plan_from_yaml({"fsdp": {"modules": [{"name": "embed"}], "rest": True}})
    assert read == PassPlan({"embed": FSDPModuleConfig()}, fsdp_rest=True)
    assert create_sharding_plan_from_yaml({"fsdp": {"rest": True}}) == PassPlan(fsdp_rest=True)
    assert plan(modules=("embed",)).merge(read).fsdp_rest
    with pytest.raises(ValueError, match=r"fsdp_rest='yes' is not allowed"):
        PassPlan(fsdp_rest="yes")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"fsdp": {"rest": 1}}, r"fsdp\.rest=1.*true or false"),
        ({"model": {}}, r"model is an unknown key; allowed: fsdp"),
        ({"fsdp": {"fsdp": {}}}, r"fsdp\.fsdp is an unknown key"),
        ({"fsdp": {"module": []}}, r"fsdp\.module is an unknown key.*did you mean 'modules'"),
        ({"fsdp": {"modules": [{"name": "a", "reshard": True}]}}, r"fsdp\.modules\[0\]\.reshard is an unknown key"),
        ({"fsdp": {"modules": [{}]}}, r"fsdp\.modules\[0\]\.name is missing"),
        ({"fsdp": {"modules": ["embed"]}}, r"fsdp\.modules\[0\] is 'embed', not a mapping"),
        ({"fsdp": {"modules": {"name": "a"}}}, r"fsdp\.modules is .* not a list"),
        ({"fsdp": {"modules": [{"name": "a"}, {"name": "a"}]}}, r"fsdp\.modules\[1\]\.name='a' is listed twice"),
        ({"fsdp": {"patterns": [{"pattern": "a"}, {"pattern": ""}]}}, r"fsdp\.patterns\[1\]\.pattern: ''"),
        ({"fsdp": {"patterns": [{"pattern": 3}]}}, r"fsdp\.patterns\[0\]\.pattern: 3"),
        ({"fsdp": {"enabled": True}}, r"neither fsdp\.modules nor fsdp\.patterns lists anything"),
        ({"fsdp": {"enabled": "yes"}}, r"fsdp\.enabled='yes'.*true or false"),
        ({"fsdp": None}, r"fsdp is None, not a mapping"),
    ],
)
def test_a_fault_in_yaml_is_named_by_its_path(content, fault):
    with pytest.raises(ValueError, match=fault):
        create_sharding_plan_from_yaml(content)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "None, not a mapping"),
        ("- a\n", "not a mapping"),
        ("fsdp: [", "not valid YAML"),
        ("fsdp:\n  modules: []\n  modules:\n  - name: a\n", r"'modules' occurs twice.*line 3"),
    ],
)
def test_a_fault_in_a_file_names_the_file(tmp_path, text, fault):
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"(?s)plan\.yaml.*{fault}"):
        create_sharding_plan_from_yaml(file)


def test_a_missing_file_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.yaml"):
        create_sharding_plan_from_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(ValueError, match="not from int"):
        create_sharding_plan_from_yaml(3)
