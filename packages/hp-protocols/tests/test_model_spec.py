"""ModelSpec and its registry: entry points, registration, copies, and specs inside a saved config (ModelSpec v2)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hp_protocols import spec_registry
from hp_protocols.configurable import Configurable
from hp_protocols.errors import ConfigError
from hp_protocols.model_spec import ModelSpec, get_spec, list_flavors, list_specs, register_spec


class Toy(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dim: int = 8
        layers: list[int] = field(default_factory=lambda: [1, 2])

    def __init__(self, config: Config) -> None:
        self.config = config


class Trainer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model_spec: ModelSpec
        steps: int = 1

    def __init__(self, config: Config) -> None:
        self.config = config


def parallelize(model: Any, *, parallel_dims: Any, trainer_config: Any) -> Any:
    return model


def other_parallelize(model: Any, **kwargs: Any) -> Any:
    return model


def build_legacy() -> str:
    return "legacy model"


def toy_spec(flavor: str) -> ModelSpec:
    return ModelSpec(
        name="toy_for_tests",
        flavor=flavor,
        model=Toy.Config(dim={"small": 8, "large": 64}[flavor]),  # type: ignore[arg-type]
        parallelize_fn=parallelize,
    )


toy_spec.flavors = ("small", "large")  # type: ignore[attr-defined]
toy_spec.default_flavor = "small"  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_registry, "_registered", {"toy_for_tests": toy_spec})


def distribution(folder: Path, name: str, module: str, source: str, points: dict[str, str]) -> None:
    """An installed package, as far as Python's metadata goes."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{key} = {value}\n" for key, value in points.items())
    (info / "entry_points.txt").write_text(f"[hp_models.specs]\n{lines}")
    (folder / f"{module}.py").write_text(source)


PLUGIN = """
from dataclasses import dataclass
from hp_protocols import Configurable, ModelSpec

class Model(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dim: int = 4

def get_model_spec(flavor):
    return ModelSpec(name={name!r}, flavor=flavor, model=Model.Config())

get_model_spec.flavors = ["only"]
"""


@pytest.mark.parametrize("given", ["neither", "both"])
def test_a_spec_has_exactly_one_of_model_and_build_model_fn(given: str) -> None:
    parts: dict[str, Any] = {} if given == "neither" else {"model": Toy.Config(), "build_model_fn": build_legacy}
    with pytest.raises(ValueError, match=f"ModelSpec 'x' \\('y'\\) has {given} of model and build_model_fn"):
        ModelSpec(name="x", flavor="y", **parts)
    assert ModelSpec(name="x", flavor="y", build_model_fn=build_legacy).model is None


def test_a_registered_spec_is_found_by_name_and_flavor() -> None:
    assert get_spec("toy_for_tests", "large").model == Toy.Config(dim=64)
    assert get_spec("toy_for_tests").flavor == "small"
    assert list_flavors("toy_for_tests") == ["small", "large"]
    assert "toy_for_tests" in list_specs()


def test_every_call_gives_an_independent_copy() -> None:
    shared = ModelSpec(name="shared", flavor="a", model=Toy.Config())  # type: ignore[arg-type]
    register_spec("shared", {"a": shared})
    first = get_spec("shared", "a")
    first.model.layers.append(99)  # type: ignore[union-attr]
    first.parallelize_fn = other_parallelize
    assert get_spec("shared", "a") == ModelSpec(name="shared", flavor="a", model=Toy.Config())  # type: ignore[arg-type]


def test_a_mapping_of_specs_and_makers_is_a_factory() -> None:
    def make() -> ModelSpec:
        return ModelSpec(name="mapped", flavor="b", build_model_fn=build_legacy)

    register_spec("mapped", {"b": make})
    assert list_flavors("mapped") == ["b"]
    assert get_spec("mapped").build_model_fn is build_legacy  # The only flavor is the default.


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'toy_for_test' is unknown[\s\S]*did you mean 'toy_for_tests'"):
        get_spec("toy_for_test")
    with pytest.raises(ValueError, match="unknown"):
        list_flavors("nothing_of_the_kind")


def test_an_unknown_flavor_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'smal' is unknown; allowed: small, large\n.*did you mean 'small'"):
        get_spec("toy_for_tests", "smal")


def test_a_flavor_must_be_given_where_there_is_no_default() -> None:
    register_spec("mapped", {"a": build_legacy, "b": build_legacy})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"must be given, there is no default; allowed: a, b"):
        get_spec("mapped")


def test_a_factory_that_makes_something_else_is_refused() -> None:
    register_spec("wrong", {"a": build_legacy})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="made 'legacy model' for model spec 'wrong', not a ModelSpec"):
        get_spec("wrong", "a")
    register_spec("renamed", toy_spec)
    with pytest.raises(ValueError, match=r"made a spec named 'toy_for_tests' \('small'\) for 'renamed'"):
        get_spec("renamed", "small")
    with pytest.raises(TypeError, match="must be callable or a mapping"):
        register_spec("number", 3)  # type: ignore[arg-type]


def test_registering_a_name_twice_is_a_clash_unless_it_is_the_same_factory() -> None:
    register_spec("toy_for_tests", toy_spec)
    with pytest.raises(ConfigError, match=r"'toy_for_tests'.*toy_spec\) and by .*build_legacy\)"):
        register_spec("toy_for_tests", build_legacy)  # type: ignore[arg-type]


def test_an_entry_point_is_listed_without_being_imported_and_loaded_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {"plugged": "hp_test_plugin:get_model_spec", "broken": "hp_test_plugin_missing:get_model_spec"}
    distribution(tmp_path, "hp-test-plugin", "hp_test_plugin", PLUGIN.format(name="plugged"), points)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"plugged", "broken"} <= set(list_specs())
    assert "hp_test_plugin" not in sys.modules
    assert list_flavors("plugged") == ["only"]
    assert get_spec("plugged").model.dim == 4  # type: ignore[union-attr]
    with pytest.raises(ModuleNotFoundError) as raised:
        get_spec("broken")
    assert "'broken' of hp-test-plugin (hp_test_plugin_missing:get_model_spec)" in "".join(raised.value.__notes__)


def test_a_package_may_have_an_entry_point_and_register_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = PLUGIN.format(name="itself") + (
        "from hp_protocols import register_spec\nregister_spec('itself', get_model_spec)\n"
    )
    distribution(tmp_path, "hp-test-itself", "hp_test_itself", source, {"itself": "hp_test_itself:get_model_spec"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert get_spec("itself").flavor == "only"


def test_two_distributions_with_one_name_are_a_clash_that_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in ("one", "two"):
        module = f"hp_test_clash_{number}"
        points = {"clashing": f"{module}:get_model_spec"}
        distribution(tmp_path / number, f"hp-test-{number}", module, PLUGIN.format(name="clashing"), points)
        monkeypatch.syspath_prepend(str(tmp_path / number))
    with pytest.raises(ConfigError, match=r"hp-test-(one|two) .* and by 'clashing' of hp-test-(one|two)"):
        get_spec("clashing")
    assert "clashing" in list_specs()


def test_an_entry_point_and_another_registered_factory_are_a_clash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {"toy_for_tests": "hp_test_rival:get_model_spec"}
    distribution(tmp_path, "hp-test-rival", "hp_test_rival", PLUGIN.format(name="toy_for_tests"), points)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"hp-test-rival .* and by .*toy_spec"):
        get_spec("toy_for_tests", "small")


def test_traverse_reaches_the_model_inside_a_trainer_config() -> None:
    config = Trainer.Config(model_spec=get_spec("toy_for_tests"))
    assert [fqn for fqn, _, _, _ in config.traverse(Toy.Config)] == ["model_spec.model"]


def test_building_a_trainer_copies_the_model_config() -> None:
    config = Trainer.Config(model_spec=get_spec("toy_for_tests"))
    trainer = config.build()
    trainer.config.model_spec.model.dim = 1
    assert config.model_spec == get_spec("toy_for_tests")


def test_a_spec_in_a_saved_config_is_its_name_flavor_and_model() -> None:
    config = Trainer.Config(model_spec=get_spec("toy_for_tests", "large"))
    config.model_spec.model.layers.append(7)  # type: ignore[union-attr]
    data = config.to_dict()
    assert data["model_spec"] == {
        "_type": "hp_protocols.model_spec.ModelSpec",
        "name": "toy_for_tests",
        "flavor": "large",
        "model": {"_type": f"{__name__}.Toy.Config", "dim": 64, "layers": [1, 2, 7]},
    }
    again = Trainer.Config.from_dict(data)
    assert again == config
    assert again.model_spec.parallelize_fn is parallelize


def test_functions_that_differ_from_the_registry_are_saved_by_name() -> None:
    config = Trainer.Config(model_spec=get_spec("toy_for_tests"))
    config.model_spec.parallelize_fn = other_parallelize
    data = config.to_dict()
    assert data["model_spec"]["parallelize_fn"] == f"{__name__}.other_parallelize"
    assert Trainer.Config.from_dict(data) == config
    config.model_spec.parallelize_fn = None
    assert Trainer.Config.from_dict(config.to_dict()) == config


def test_a_spec_that_is_in_no_registry_is_saved_whole() -> None:
    spec = ModelSpec(name="by hand", flavor="x", build_model_fn=build_legacy, clip_grad_fn=other_parallelize)
    config = Trainer.Config(model_spec=spec)
    assert Trainer.Config.from_dict(config.to_dict()) == config


def test_a_lambda_in_a_spec_is_refused_with_its_place() -> None:
    config = Trainer.Config(model_spec=get_spec("toy_for_tests"))
    config.model_spec.parallelize_fn = lambda model: model
    for act in (config.to_dict, config.build):
        with pytest.raises(TypeError, match=r"model_spec\.parallelize_fn.*lambda"):
            act()


def test_a_saved_spec_whose_model_is_gone_is_reported() -> None:
    data = Trainer.Config(model_spec=get_spec("toy_for_tests")).to_dict()
    data["model_spec"]["name"] = "toy_for_testz"
    with pytest.raises(ConfigError, match=r"model_spec.*'toy_for_testz' is unknown[\s\S]*did you mean 'toy_for_tests'"):
        Trainer.Config.from_dict(data)


def test_listing_specs_in_a_fresh_process_imports_no_torch() -> None:
    code = "import sys; from hp_protocols import list_specs; list_specs(); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
