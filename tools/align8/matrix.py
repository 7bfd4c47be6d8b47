"""What is run: layouts, rows of settings, paths, and the list of runs that they make.

In: names of layouts and rows. Out: `Run`s in the order in which the processes take them, and what no path offers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = [
    "LAYOUTS",
    "MODEL",
    "PATHS",
    "PLAIN",
    "REFERENCE_LAYOUT",
    "ROWS",
    "Layout",
    "NotApplicable",
    "Row",
    "Run",
    "Settings",
    "plan",
]

MODEL = "qwen3_5"
PATHS = ("legacy", "eager", "graph")
"""`LLMTrainer`, `HyperTrainer`, and `HyperTrainer` with `--compile.mode graph`; the first that ran is compared with."""
REFERENCE_LAYOUT = "1"
"""What the other layouts are compared with."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How many processes share what."""

    name: str
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = False

    @property
    def data_ranks(self) -> int:
        """Ranks that read different rows."""
        return self.replicate * self.shard

    @property
    def processes(self) -> int:
        return self.data_ranks * self.tensor * self.context


@dataclass(frozen=True, slots=True)
class Settings:
    """One training run, in words that both trainers' configurations can be made from.

    The learning rate is small: Adam divides by the gradient's own size, and so makes of the rounding of one step the
    larger part of the next one's update; at 4e-3 layouts drift apart by 2e-5 in ten steps.
    """

    steps: int = 10
    seq_len: int = 128
    rows_per_step: int = 8
    micro_batches: int = 1
    lr: float = 1e-4
    warmup_ratio: float = 0.0
    decay: str = "constant"
    lr_min: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = math.inf
    mixed_precision: bool = False
    recompute: bool = False
    seed: int = 1234


@dataclass(frozen=True, slots=True)
class Row:
    """Settings, and the layouts on which they are run.

    Attributes:
        across_layouts: whether layouts are compared with each other; in bf16 every sum rounds otherwise.
        same_as_plain: whether the numbers have to be those of the plain row (otherwise they must not be).
    """

    name: str
    settings: Settings
    layouts: tuple[str, ...]
    across_layouts: bool = True
    same_as_plain: bool = False


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("1"),
        Layout("ddp8", replicate=8),
        Layout("fsdp8", shard=8),
        Layout("hsdp2x4", replicate=2, shard=4),
        Layout("tp2xfsdp4", tensor=2, shard=4),
        Layout("tp2xfsdp4+sp", tensor=2, shard=4, sequence_parallel=True),
        Layout("cp2xfsdp4", context=2, shard=4),
    )
}

PLAIN = Row("plain", Settings(), tuple(LAYOUTS))
ROWS = {
    row.name: row
    for row in (
        PLAIN,
        Row("accumulation", Settings(rows_per_step=16, micro_batches=2), ("1", "hsdp2x4")),
        Row("clipping", Settings(max_norm=0.5), ("1", "tp2xfsdp4")),
        Row("warmup-decay", Settings(warmup_ratio=0.3, decay="cosine"), ("1", "ddp8")),
        Row("weight-decay-groups", Settings(weight_decay=0.5), ("1", "fsdp8")),
        Row("bf16", Settings(mixed_precision=True), ("fsdp8", "tp2xfsdp4"), across_layouts=False),
        Row("recomputation", Settings(recompute=True), ("1", "cp2xfsdp4"), same_as_plain=True),
    )
}


@dataclass(frozen=True, slots=True)
class Run:
    """One cell: what a trainer is given."""

    row: Row
    layout: Layout
    path: str
    settings: Settings

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.row.name}--{self.layout.name}--{self.path}"


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """A cell that a path refuses by design."""

    model: str
    row: str
    layout: str
    path: str
    reason: str


def plan(
    layouts: Iterable[Layout], rows: Iterable[Row], *, steps: int | None = None
) -> tuple[list[Run], list[NotApplicable]]:
    """Every run of these rows on these layouts, and of the cells that they are compared with.

    A row stands on the layouts that it names.
    """
    runs, refused = list[Run](), list[NotApplicable]()
    for row, layout in with_references(list(layouts), list(rows)):
        settings = row.settings if steps is None else replace(row.settings, steps=steps)
        for path in PATHS:
            if path == "legacy" and layout.sequence_parallel:
                reason = "the older YAML has no key for sequence parallelism"
                refused.append(NotApplicable(MODEL, row.name, layout.name, path, reason))
            else:
                runs.append(Run(row, layout, path, settings))
    return runs, refused


def with_references(layouts: list[Layout], rows: list[Row]) -> list[tuple[Row, Layout]]:
    """The chosen cells, the plain row on their layouts, and layout 1 for every row that is compared across layouts."""
    chosen = {(row.name, layout.name) for row in rows for layout in layouts if layout.name in row.layouts}
    if PLAIN.name not in {row.name for row in rows}:
        rows = [PLAIN, *rows]
    if REFERENCE_LAYOUT not in {layout.name for layout in layouts}:
        layouts = [LAYOUTS[REFERENCE_LAYOUT], *layouts]
    wanted = chosen | {(PLAIN.name, layout) for _, layout in chosen}
    across = {row.name for row in rows if row.across_layouts}
    wanted |= {(row, REFERENCE_LAYOUT) for row, _ in wanted if row in across}
    return [
        (row, layout)
        for row in rows
        for layout in layouts
        if (row.name, layout.name) in wanted and layout.name in row.layouts
    ]
