"""A trainer without torch, for these tests. In: nothing. Out: configs and recipes, declared as a package would.

conftest.py makes a distribution of it, with entry points, in a temporary folder.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hp_config import (
    ActivationCheckpointConfig,
    CommConfig,
    CompileConfig,
    DebugConfig,
    Fault,
    Function,
    ParallelismConfig,
    TrainingConfig,
)
from hp_protocols.configurable import Configurable


def scale(value: float, by: float = 1.0) -> float:
    return value * by


def parallelize(model: Any) -> Any:
    return model


class Colour(enum.StrEnum):
    RED = "red"
    DARK_BLUE = "dark-blue"


class Layer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dim: int = 8
        heads: int = 2
        param_init: dict[str, Any] | None = None


class Model(Configurable):
    """A stack of layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        vocab: int = 100
        layers: list[Layer.Config] = field(default_factory=lambda: [Layer.Config() for _ in range(4)])
        head: Layer.Config = field(default_factory=lambda: Layer.Config(dim=9))


@dataclass(kw_only=True, slots=True)
class Spec:
    name: str
    model: Model.Config
    parallelize_fn: Callable[..., Any]


class Optimizer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """How weights are updated."""

        lr: float = 1e-3
        """Peak learning rate."""

    def __init__(self, config: Config) -> None:
        self.config = config


class Adam(Optimizer):
    @dataclass(kw_only=True, slots=True)
    class Config(Optimizer.Config):
        betas: tuple[float, float] = (0.9, 0.95)
        """Decay rates of the
        moments."""
        fused: bool | None = None
        decay_keywords: list[str] = field(default_factory=lambda: ["bias", "norm"])
        scale: Function.Config = field(default_factory=lambda: Function.Config(fn=scale, kwargs={"by": 2.0}))

        def __post_init__(self) -> None:
            if self.betas[0] > 1:
                raise ValueError(f"betas must lie below 1, got {self.betas}")

        def faults(self, path: str) -> list[Fault]:
            return [Fault(f"{path}.lr", f"{self.lr} is negative", "0 or more")] if self.lr < 0 else []


class Schedule(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        warmup_steps: int = 4
        total_steps: int | None = None


class Loader(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dataset_path: str | None = None
        """A file or a folder."""
        cache: Path = Path("cache")
        colour: Colour = Colour.RED
        split: Literal["train", "on", "off"] = "train"
        weights: dict[str, float] = field(default_factory=dict)
        limit: int | Literal["auto"] = "auto"
        extra: Any = None
        secret: str = field(default="hidden", metadata={"cli": False})
        transform: Callable[..., Any] | None = None


class Trainer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model_spec: Spec = field(metadata={"cli": False})
        recipe: str = field(default="", metadata={"cli": False})
        dump_folder: str | None = None
        """The run's folder."""
        optimizer: Optimizer.Config = field(default_factory=Adam.Config)
        lr_scheduler: Schedule.Config = field(default_factory=Schedule.Config)
        dataloader: Loader.Config = field(default_factory=Loader.Config)
        validation: Loader.Config | None = None
        training: TrainingConfig = field(default_factory=TrainingConfig)
        parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
        activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
        compile: CompileConfig = field(default_factory=CompileConfig)
        comm: CommConfig = field(default_factory=CommConfig)
        debug: DebugConfig = field(default_factory=DebugConfig)

    def __init__(self, config: Config) -> None:
        self.config = config


def small() -> Trainer.Config:
    return Trainer.Config(
        model_spec=Spec(name="toy", model=Model.Config(), parallelize_fn=parallelize),
        training=TrainingConfig(steps=10, seq_len=16, local_batch_size=2),
    )


def wide() -> Trainer.Config:
    config = small()
    return config.replace(training=TrainingConfig(steps=20, seq_len=32, local_batch_size=4))


def plain_optimizer() -> Trainer.Config:
    return small().replace(optimizer=Optimizer.Config(lr=0.5))


@dataclass(kw_only=True, slots=True)
class PickyTraining(TrainingConfig):
    def __post_init__(self) -> None:
        if self.local_batch_size == 13:
            raise ValueError("13 rows bring bad luck")


def picky() -> Trainer.Config:
    return small().replace(training=PickyTraining(steps=10, seq_len=16, local_batch_size=4, global_batch_size=4))


def raises() -> Trainer.Config:
    raise RuntimeError("the recipe itself is broken")


def no_config() -> str:
    return "not a config"


def mistyped() -> Trainer.Config:
    return small().replace(optimizer=Adam.Config(lr="1e-4"))
