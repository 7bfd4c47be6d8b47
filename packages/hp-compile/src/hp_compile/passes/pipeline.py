"""The order in which passes run, open to the user's own.

In: `PassConfig` and `PassPlan`. Out: a list of passes, and the graph after all of them, checked after each.
With `HP_COMPILE_DUMP=folder` every stage is written as readable code, with a diff to the stage before.
Free of torch at import.
"""

from __future__ import annotations

import difflib
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hp_compile.pass_config import PassConfig
from hp_compile.pass_plan import PassPlan
from hp_compile.passes.check import PassCheck

if TYPE_CHECKING:
    from torch import nn
    from torch.fx import GraphModule

__all__ = ["NamedPass", "PassPipeline"]

# Stages of one process are numbered through, so that two trainers do not overwrite each other's files.
_dumps = 0


@runtime_checkable
class NamedPass(Protocol):
    """What the pipeline asks of a pass; `GraphPass` is the base class for it."""

    name: str

    def run(self, graph_module: Any, pass_config: PassConfig, **context: Any) -> Any: ...


class PassPipeline(list[NamedPass]):
    """A list of passes. `run` gives each the graph of the one before."""

    def __init__(
        self, passes: Any = (), *, pass_config: PassConfig | None = None, pass_plan: PassPlan | None = None
    ) -> None:
        super().__init__()
        self.pass_config = pass_config or PassConfig()
        self.pass_plan = pass_plan
        for item in passes:
            self.append(item)

    @classmethod
    def from_config(cls, pass_config: PassConfig, pass_plan: PassPlan | None = None) -> PassPipeline:
        """DeadCodeElimination → CanonicalizeGraph → [FSDPPass] → [AutoOverlapPass].

        Raises:
            NotImplementedError: `pp_enabled`: the pipeline split comes in a later version.
        """
        pass_config.validate()
        if pass_config.pp_enabled:
            raise NotImplementedError(
                "pp_enabled=True: the pipeline pass is not available yet; set pp_enabled=False and use dp_mode "
                "'fsdp' or 'hsdp' to spread a large model"
            )
        wanted = ["dead_code_elimination", "canonicalize_graph"]
        wanted += ["fsdp"] * pass_config.fsdp_enabled + ["auto_overlap"] * pass_config.enable_overlap
        return cls([_built_in(name) for name in wanted], pass_config=pass_config, pass_plan=pass_plan)

    def append(self, item: NamedPass) -> None:
        super().append(self._checked(item))

    def insert_before(self, name: str, item: NamedPass) -> None:
        """Put a pass right before the one with this name."""
        self.insert(self._position(name), self._checked(item))

    def insert_after(self, name: str, item: NamedPass) -> None:
        """Put a pass right after the one with this name."""
        self.insert(self._position(name) + 1, self._checked(item))

    def names(self) -> list[str]:
        return [item.name for item in self]

    def run(
        self, graph_module: GraphModule, *, model: nn.Module, joint_graph: Any = None, mesh: Any = None
    ) -> GraphModule:
        """Run every pass in order; the graph is checked after each and compiled after the last.

        Raises:
            RuntimeError: a pass left something that the next one could not work with (see `PassCheck`; it is named).
        """
        dump = _Dump.from_environment()
        dump.write("captured", graph_module)
        check = PassCheck(graph_module)
        for item in self:
            result = item.run(
                graph_module,
                self.pass_config,
                model=model,
                joint_graph=joint_graph,
                pass_plan=self.pass_plan,
                mesh=mesh,
            )
            graph_module = check.after(item.name, result)
            dump.write(item.name, graph_module)
        graph_module.recompile()
        return graph_module

    def _position(self, name: str) -> int:
        names = self.names()
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no pass is called {name!r}; passes: {', '.join(names) or 'none'}{hint}")
        return names.index(name)

    @staticmethod
    def _checked(item: NamedPass) -> NamedPass:
        if not isinstance(item, NamedPass) or not isinstance(item.name, str) or not item.name:
            raise ValueError(f"{item!r} is not a pass; a pass has a `name` and a method `run` (see GraphPass)")
        return item


_BUILT_IN = {
    "dead_code_elimination": ("hp_compile.passes.cleanup", "DeadCodeEliminationPass"),
    "canonicalize_graph": ("hp_compile.passes.cleanup", "CanonicalizeGraphPass"),
    "fsdp": ("hp_compile.passes.parallel.fsdp_pass", "FSDPPass"),
    "auto_overlap": ("hp_compile.passes.overlap.schedule", "AutoOverlapPass"),
}


def _built_in(name: str) -> NamedPass:
    """The pass, or where torch is missing a stand-in that can be arranged and not run."""
    module, attribute = _BUILT_IN[name]
    try:
        importlib.import_module("torch")
    except ImportError as error:
        return _WithoutTorch(name, error)
    return getattr(importlib.import_module(module), attribute)()


class _WithoutTorch:
    def __init__(self, name: str, cause: ImportError) -> None:
        self.name = name
        self._cause = cause

    def run(self, graph_module: Any, pass_config: PassConfig, **context: Any) -> Any:
        raise ImportError(f"pass {self.name!r} needs torch, which cannot be imported; install it") from self._cause


class _Dump:
    """Writes stages as code; without a folder it does nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._before: list[str] = []
        self._stage = 0

    @classmethod
    def from_environment(cls) -> _Dump:
        global _dumps
        place = os.environ.get("HP_COMPILE_DUMP")
        if not place:
            return cls(None)
        folder = Path(place) / f"graph{_dumps}-pid{os.getpid()}"
        _dumps += 1
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder)

    def write(self, name: str, graph_module: GraphModule) -> None:
        if self.folder is None:
            return
        code = graph_module.print_readable(print_output=False).splitlines(keepends=True)
        stem = f"{self._stage:02d}-{name}"
        (self.folder / f"{stem}.py").write_text("".join(code), encoding="utf-8")
        if self._stage:
            (self.folder / f"{stem}.diff").write_text("".join(difflib.unified_diff(self._before, code)), "utf-8")
        self._before, self._stage = code, self._stage + 1
