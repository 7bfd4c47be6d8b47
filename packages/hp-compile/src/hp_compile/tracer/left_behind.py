"""What a step leaves behind in Python, where a graph would leave it once, at capture, and never again (G6).

In: a model and a `train_fn`, before they are traced. Out: the names of what tracing changed; the old values are back.
"""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hp_compile import _torch_compat as compat

_PLAIN = (bool, int, float, complex, str)
_TORCHS_FOLDER = str(Path(torch.__file__).parent)


class AttributeGuard:
    """Finds what forward left behind in plain attributes, and puts the old values back.

    Tensors and plain values are compared: in attributes, in lists, dicts and sets, and in attributes of the model's
    own objects. Values that say nothing of data (functions, None, empty containers) may come and go.
    """

    _TORCH_OWN = frozenset({"_parameters", "_buffers", "_modules", "training"})
    # nn.RNN keeps its parameters in these lists and rebuilds them by itself in the next forward.
    _REBUILT = frozenset({"_flat_weights", "_flat_weight_refs"})

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (name, module, {key: _Kept(value) for key, value in self._own(module).items()})
            for name, module in model.named_modules()
        ]

    def _own(self, module: nn.Module) -> dict[str, Any]:
        return {key: value for key, value in module.__dict__.items() if key not in self._TORCH_OWN}

    def restore(self) -> list[str]:
        """Undo, and return the names of the attributes that forward changed."""
        changed = []
        for name, module, before in self._before:
            now = self._own(module)
            for key in {**before, **now}:
                kept = before.get(key)
                if _data_in(now.get(key)) == (() if kept is None else kept.data):
                    continue
                if kept is None:
                    del module.__dict__[key]
                else:
                    kept.put_back()
                    module.__dict__[key] = kept.value
                if not (isinstance(module, nn.RNNBase) and key in self._REBUILT):
                    changed.append(f"{name}.{key}" if name else key)
        return changed


class _Kept:
    """A value, its data, and copies of the containers in it."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._containers: list[Any] = []
        self.data = _data_in(value, self._containers)
        self._copies = [dict(held) if isinstance(held, dict) else list(held) for held in self._containers]

    def put_back(self) -> None:
        for container, copy in zip(self._containers, self._copies, strict=True):
            container.clear()
            container.extend(copy) if isinstance(container, (list, deque)) else container.update(copy)


def _data_in(value: Any, containers: list[Any] | None = None) -> tuple[Any, ...]:
    """The tensors (by identity) and plain values of a value, in order; containers on the way are appended."""
    found: list[Any] = []
    _collect(value, found, containers if containers is not None else [], set())
    return tuple(found)


def _collect(value: Any, found: list[Any], containers: list[Any], seen: set[int]) -> None:
    if type(value) in _PLAIN:
        # repr makes nan equal to itself.
        found.append((type(value), repr(value)))
    elif isinstance(value, torch.Tensor):
        found.append(("fake" if compat.is_fake(value) else "tensor", id(value)))
    elif id(value) not in seen:
        seen.add(id(value))
        for part in _parts(value, containers):
            _collect(part, found, containers, seen)


def _parts(value: Any, containers: list[Any]) -> list[Any]:
    if isinstance(value, (tuple, frozenset)):
        return list(value)
    if isinstance(value, (list, deque, set)):
        containers.append(value)
        return list(value)
    if isinstance(value, dict):
        containers.append(value)
        return [part for pair in value.items() for part in pair]
    if _is_users_object(value):
        containers.append(value.__dict__)
        return [part for pair in value.__dict__.items() for part in pair]
    return []


def _is_users_object(value: Any) -> bool:
    """Not a class, function or module, and not an object of Python, torch or this package: those keep books."""
    kind = type(value)
    if kind is types.SimpleNamespace:
        return True
    if (
        isinstance(value, (type, nn.Module))
        or callable(value)
        or not isinstance(getattr(value, "__dict__", None), dict)
    ):
        return False
    home = kind.__module__.split(".")[0]
    return home not in sys.stdlib_module_names and home not in ("torch", "hp_compile")


def refuse_kept_tensors(train_fn: Callable[..., Any]) -> None:
    """A list that `train_fn` closes over and appends a tensor of the step to.

    Raises:
        RuntimeError: it is named; the tensor there has no data.
    """
    code = getattr(train_fn, "__code__", None)
    if code is None:
        return
    reachable = {name: train_fn.__globals__.get(name) for name in code.co_names}
    for name, cell in zip(code.co_freevars, getattr(train_fn, "__closure__", None) or (), strict=True):
        try:
            reachable[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name, value in reachable.items():
        if any(kind == "fake" for kind, _ in _data_in(value)):
            raise RuntimeError(
                f"train_fn leaves a tensor of the step in {name!r}; a graph would do so at capture only, and that "
                "tensor has no data. Take the loss from train_step's result, and put the rest into buffers of the model"
            )


@contextmanager
def refused_draws_in_python() -> Iterator[None]:
    """Random numbers of Python and numpy, and seeds: a graph would keep the first draw for ever.

    Raises:
        RuntimeError: after the capture; says which generator was moved. All are where they were before.
    """
    numpy: Any = sys.modules.get("numpy")
    pythons, torchs = random.getstate(), torch.get_rng_state()
    numpys = None if numpy is None else numpy.random.get_state()
    seeded: list[str] = []
    with _noticed_seeds(seeded), compat.works_numbered_apart():
        yield
    moved = []
    if random.getstate() != pythons:
        moved.append("Python's random")
        random.setstate(pythons)
    if numpy is not None and repr(numpy.random.get_state()) != repr(numpys):
        moved.append("numpy.random")
        numpy.random.set_state(numpys)
    if moved:
        raise RuntimeError(
            f"the step draws from {' and '.join(moved)}; a graph would keep the first draw for ever. Draw with torch "
            "(torch.rand and torch.where), or pass the decision in as a Python value of input or label"
        )
    if seeded or not torch.equal(torch.get_rng_state(), torchs):
        torch.set_rng_state(torchs)
        raise RuntimeError(
            f"the step sets torch's random generator ({', '.join(seeded) or 'its state moved'}); a graph would not set "
            "it again. Seed outside of the step, or pass the random tensor in as input or label"
        )


@contextmanager
def _noticed_seeds(seeded: list[str]) -> Iterator[None]:
    def noticing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noticed(*args: Any, **kwargs: Any) -> Any:
            # torch's own checkpointing sets states, for the recomputation.
            if not sys._getframe(1).f_code.co_filename.startswith(_TORCHS_FOLDER):
                seeded.append(f"torch.{name}")
            return function(*args, **kwargs)

        return noticed

    plain = {name: getattr(torch, name) for name in ("manual_seed", "seed", "set_rng_state")}
    try:
        for name, function in plain.items():
            for home in (torch, torch.random):
                setattr(home, name, noticing(name, function))
        yield
    finally:
        for name, function in plain.items():
            for home in (torch, torch.random):
                setattr(home, name, function)
