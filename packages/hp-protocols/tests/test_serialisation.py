"""to_dict and from_dict: the same tree again, and every fault of the data at once (M3)."""

from __future__ import annotations

import enum
import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from hp_protocols.configurable import Configurable
from hp_protocols.errors import ConfigError
from hp_protocols.function import Function
from hp_protocols.sharding import LocalMapConfig, ShardingConfig
from hp_protocols.types import MeshAxisName


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"
    MIXED = (1, 2)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Leaf(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        size: int = 1


class Silent(Leaf):
    pass


@dataclass(kw_only=True)
class Section:
    steps: int = 10
    dtype: Literal["float32", "bfloat16"] = "float32"


class Everything(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        number: float = 0.5
        text: str | None = None
        mode: Literal["on", "off"] = "on"
        colour: Colour = Colour.RED
        level: Level | None = None
        betas: tuple[float, float] = (0.9, 0.95)
        shape: tuple[int, ...] = ()
        nested: list[tuple[int, list[int]]] = field(default_factory=list)
        sequence: Sequence[int] = ()
        names: frozenset[str] = frozenset()
        anything: Any = None
        untyped: dict = field(default_factory=dict)
        leaf: Leaf.Config | None = None
        leaves: list[Leaf.Config] = field(default_factory=list)
        by_name: dict[str, list[Leaf.Config]] = field(default_factory=dict)
        section: Section = field(default_factory=Section)
        function: Callable[..., Any] | None = None
        cls: type | None = None
        maker: Function.Config | None = None
        initialisers: dict[str, Function.Config | Callable[..., Any]] | None = None
        path: Path | None = None
        sharding: ShardingConfig | None = None
        by_level: dict[Level, str] = field(default_factory=dict)


class Normalising(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        width: int = 4
        runs: int = 0
        doubled: int = field(init=False, default=0)

        def __post_init__(self) -> None:
            self.runs += 1
            self.doubled = self.width * 2
            if self.width < 0:
                raise ValueError(f"width must be positive, got {self.width}")


def full() -> Everything.Config:
    return Everything.Config(
        number=1e-4,
        text="1",
        mode="off",
        colour=Colour.MIXED,
        level=Level.HIGH,
        shape=(1, 2, 3),
        nested=[(1, [2, 3]), (4, [])],
        sequence=(1, 2),
        names=frozenset({"a", "b"}),
        anything=(1, [2, (3,)], {"x": Colour.GREEN, 5: {6, 7}}, Path("/tmp"), math.hypot, None, "text"),
        untyped={"_type": "not a class", "list": [1], "tuple": (1,)},
        leaf=Silent.Config(size=2),
        leaves=[Leaf.Config(size=3), Silent.Config()],
        by_name={"a": [Leaf.Config(size=4)], "b": []},
        section=Section(steps=3, dtype="bfloat16"),
        function=math.hypot,
        cls=dict,
        maker=Function.Config(fn=math.pow, kwargs={"x": (1, 2)}),
        initialisers={"weight": math.hypot, "bias": Function.Config(fn="math.pow")},
        path=Path("some/folder"),
        by_level={Level.LOW: "low"},
    )


def test_a_tree_of_everything_comes_back_equal() -> None:
    config = full()
    again = Everything.Config.from_dict(config.to_dict())
    assert again == config
    assert type(again.leaf) is Silent.Config
    assert type(again.betas) is tuple
    assert type(again.nested[0]) is tuple
    assert type(again.nested[0][1]) is list
    assert type(again.anything[1][1]) is tuple
    assert type(again.anything[3]) is type(Path())
    assert type(again.level) is Level


def test_what_is_written_is_plain_data_that_json_can_hold() -> None:
    data = full().to_dict()
    data.pop("anything")  # Holds a dict with a number as key, which JSON alone would turn into a string.
    data.pop("by_level")
    assert json.loads(json.dumps(data)) == data


def test_defaults_are_written_plainly() -> None:
    data = Everything.Config(
        betas=(0.1, 0.2), colour=Colour.GREEN, function=math.hypot, names=frozenset("a"), initialisers={"w": math.pow}
    ).to_dict()
    assert data["betas"] == [0.1, 0.2]
    assert data["colour"] == "green"
    assert data["function"] == "math.hypot"
    assert data["names"] == ["a"]
    assert data["initialisers"] == {"w": "math.pow"}
    assert data["_type"] == f"{__name__}.Everything.Config"
    assert data["section"] == {"_type": f"{__name__}.Section", "steps": 10, "dtype": "float32"}


def test_a_value_of_another_type_than_announced_comes_back_as_it_was() -> None:
    config = Everything.Config()
    config.betas = [0.9, 0.95]  # type: ignore[assignment]
    config.function = "just a string"  # type: ignore[assignment]
    config.colour = "red"  # type: ignore[assignment]
    config.number = 3
    again = Everything.Config.from_dict(config.to_dict())
    assert again == config
    assert type(again.betas) is list
    assert type(again.colour) is str


def test_placements_are_written_as_strings_and_come_back_as_torchs_own() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    tp, dp = MeshAxisName.TP, MeshAxisName.DP
    config = Everything.Config(
        sharding=ShardingConfig(
            state_shardings={"weight": {tp: Shard(0), dp: Replicate()}},
            in_src_shardings={"x": {tp: Shard(-1)}},
            out_src_shardings=({tp: Partial()}, None, {"aux": {tp: Partial("avg")}}),
            out_dst_shardings={tp: Replicate()},
            local_map=LocalMapConfig(in_grad_placements=({tp: Partial()}, None)),
        )
    )
    data = config.to_dict()
    assert data["sharding"]["state_shardings"] == {"weight": {"tp": "Shard(0)", "dp": "Replicate()"}}
    assert data["sharding"]["in_src_shardings"] == {"x": {"tp": "Shard(-1)"}}
    again = Everything.Config.from_dict(data)
    assert again == config
    assert again.sharding is not None
    assert next(iter(again.sharding.state_shardings["weight"])) is tp
    assert type(again.sharding.state_shardings["weight"][tp]) is Shard
    assert again.sharding.out_src_shardings == config.sharding.out_src_shardings  # type: ignore[union-attr]


def test_a_config_with_placements_builds_from_a_copy() -> None:
    from torch.distributed.tensor import Replicate, Shard

    class Layer(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            sharding: ShardingConfig

        def __init__(self, config: Config) -> None:
            self.config = config

    config = Layer.Config(sharding=ShardingConfig(state_shardings={"w": {MeshAxisName.TP: Shard(0)}}))
    built = config.build()
    built.config.sharding.state_shardings["w"][MeshAxisName.TP] = Replicate()
    assert config.sharding.state_shardings == {"w": {MeshAxisName.TP: Shard(0)}}


def test_a_written_tree_is_restored_without_running_post_init_over_it_again() -> None:
    config = Normalising.Config(width=5)
    config.width = 6
    again = Normalising.Config.from_dict(config.to_dict())
    assert (again.width, again.runs, again.doubled) == (6, 1, 10)
    assert again == config


def test_a_partial_tree_is_completed_and_post_init_runs() -> None:
    config = Normalising.Config.from_dict({"width": 5})
    assert (config.runs, config.doubled) == (1, 10)
    outer = Everything.Config.from_dict({"section": {"steps": 2}, "leaves": [{"_type": f"{__name__}.Silent.Config"}]})
    assert outer == Everything.Config(section=Section(steps=2), leaves=[Silent.Config()])


def test_from_dict_of_a_parent_gives_the_class_that_was_written() -> None:
    config = Silent.Config(size=3)
    assert type(Configurable.Config.from_dict(config.to_dict())) is Silent.Config
    assert Leaf.Config.from_dict(config.to_dict()) == config


def faults_of(data: Any, cls: Any = Everything.Config) -> dict[str, str]:
    with pytest.raises(ConfigError) as raised:
        cls.from_dict(data)
    return {fault.where: str(fault) for fault in raised.value.faults}


def test_all_faults_are_reported_at_once_each_with_its_place() -> None:
    faults = faults_of(
        {
            "numer": 1,
            "leaf": {"_type": f"{__name__}.Laef.Config"},
            "leaves": [{"size": 1}, {"sise": 2}],
            "section": {"_type": "math.hypot"},
            "colour": "gren",
            "function": "math.hipot",
            "sharding": {"state_shardings": {"w": {"tp": "Shard(x)", "tq": "Shard(0)"}}},
        }
    )
    assert set(faults) == {
        "numer",
        "leaf._type",
        "leaves.1.sise",
        "section._type",
        "colour",
        "function",
        "sharding.state_shardings.w.tp",
        "sharding.state_shardings.w.tq",
    }
    assert "did you mean 'number'" in faults["numer"]
    assert "did you mean 'size'" in faults["leaves.1.sise"]
    assert f"did you mean '{__name__}.Leaf.Config'" in faults["leaf._type"]
    assert "no config class" in faults["section._type"]
    assert "allowed: red, green" in faults["colour"]
    assert "did you mean 'green'" in faults["colour"]
    assert "Shard(dim), Replicate(), Partial(sum)" in faults["sharding.state_shardings.w.tp"]


def test_a_missing_required_field_is_reported() -> None:
    assert "missing; Function.Config needs it" in faults_of({"maker": {"kwargs": {}}})["maker.fn"]


def test_a_tree_of_another_class_is_refused() -> None:
    assert "is no Everything.Config" in faults_of(Leaf.Config().to_dict())["_type"]


def test_an_unknown_module_is_reported() -> None:
    assert "there is no module 'nowhere'" in faults_of({"_type": "nowhere.Config"})["_type"]


def test_values_that_the_class_refuses_are_reported_with_their_place() -> None:
    assert (
        "width must be positive"
        in faults_of({"anything": {"_type": f"{__name__}.Normalising.Config", "width": -1}})["anything"]
    )


def test_data_that_is_no_mapping_is_refused() -> None:
    assert "expected a mapping, got list" in faults_of([1])["Everything.Config"]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda: 1, "a lambda"),
        (functools.partial(print), "a functools.partial"),
        (Leaf.Config().build, "a bound method"),
        (object(), "cannot be written"),
        (1j, "cannot be written"),
        (b"bytes", "cannot be written"),
    ],
)
def test_a_value_without_plain_form_is_refused_with_its_place(value: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"untyped\.a\.0.*{kind}"):
        Everything.Config(untyped={"a": [value]}).to_dict()


def test_a_config_class_inside_a_function_is_refused_since_nobody_could_find_it() -> None:
    class Local(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            pass

    with pytest.raises(TypeError, match=r"anything: .*a class defined inside a function"):
        Everything.Config(anything=Local.Config()).to_dict()


def test_an_import_error_inside_the_module_of_a_type_is_not_taken_for_an_unknown_class(tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text("import surely_not_installed\n")
    code = (
        "from hp_protocols.configurable import Configurable\n"
        "Configurable.Config.from_dict({'_type': 'broken_module.Thing'})\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: No module named 'surely_not_installed'" in result.stderr
