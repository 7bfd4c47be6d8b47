"""Initialising a module tree so that the values do not depend on how it is sharded.

In: a tree whose modules declare `param_init` or have `reset_parameters`. Out: every parameter drawn whole on the CPU
from a generator seeded by (seed, canonical FQN), cut by its placements and copied; one whole parameter alive at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from .configurable import Configurable
from .errors import nearest
from .local_pieces import local_piece
from .module_tree import ModuleNames, own_buffers, own_parameters, parameter_owners
from .platform import get_platform

if TYPE_CHECKING:
    from .module import Module
    from .platform import Module as PlatformModule
    from .platform import Parameter, Tensor

__all__ = ["init_tree", "skip_param_init"]


def skip_param_init(param: Any) -> None:
    """As an entry of `param_init`: this parameter is not initialised here (it is tied to another, or loaded)."""


def init_tree(module: Module, *, buffer_device: Any = None, seed: int | None = None) -> None:
    """What `Module.init_states` does."""
    with _init_pass(module, seed) as current:
        current.visit_children(module, buffer_device)
        current.init_parameters(module)
        current.init_buffers(module, buffer_device)


class _InitPass:
    """One walk over a tree, from the call on its root on."""

    def __init__(self, root: PlatformModule, seed: int | None) -> None:
        self.names = ModuleNames(root)
        # A tied parameter is drawn under its first name, whichever of its owners is reached first.
        self.first_names = {id(parameter): owners[0].fqn for parameter, owners in parameter_owners(root)}
        self.seed = _common_seed(root) if seed is None else seed
        self.drawn: set[int] = set()
        self.visited: set[int] = set()

    def visit_children(self, module: PlatformModule, buffer_device: Any) -> None:
        from .module import Module

        for child in module.children():
            if id(child) in self.visited:
                continue
            self.visited.add(id(child))
            if isinstance(child, Module):
                child.init_states(buffer_device=buffer_device)
            else:  # A plain container, wrapper or layer: look inside, then at what it owns itself.
                self.visit_children(child, buffer_device)
                self.init_parameters(child)

    def fqn(self, module: PlatformModule, name: str, parameter: Parameter) -> str:
        return self.first_names.get(id(parameter), self.names.state(module, name))

    def init_parameters(self, module: PlatformModule) -> None:
        """Initialise the module's own parameters, by declaration or by its `reset_parameters`."""
        from .module import Module

        parameters = own_parameters(module)
        # Wrappers pass look-ups on to what they wrap, so the class is asked, not the instance.
        if isinstance(module, Module) and module._param_init is not None:
            self._by_declaration(module, parameters, module._param_init)
        elif callable(getattr(type(module), "reset_parameters", None)):
            if parameters:
                self._by_reset(module, parameters)
            elif own_buffers(module):  # Running statistics without weights.
                with get_platform().fork_rng(_draw_seed(self.seed, self.names[module])):
                    module.reset_parameters()  # type: ignore[operator]
        elif todo := [self.names.state(module, name) for name, p in parameters.items() if id(p) not in self.drawn]:
            raise ValueError(
                f"{', '.join(todo)}: {type(module).__name__} has neither param_init nor reset_parameters; set "
                "param_init in its Config, with skip_param_init for what is initialised elsewhere"
            )

    def _by_declaration(
        self, module: PlatformModule, parameters: dict[str, Parameter], declared: dict[str, Any]
    ) -> None:
        for name in declared:
            # Registered as None (a bias that is off) is fine, a name that the module does not know is a typo.
            if name not in parameters and name not in module._parameters:
                near = nearest(name, module._parameters)
                raise ValueError(
                    f"{self.names.state(module, name)}: is in param_init, but {type(module).__name__} has no such "
                    "parameter; "
                    + (f"did you mean {near!r}?" if near else f"it has: {', '.join(module._parameters) or 'none'}")
                )
        for name, parameter in parameters.items():
            if id(parameter) in self.drawn:
                continue
            fqn = self.fqn(module, name, parameter)
            if name not in declared:
                raise ValueError(
                    f"{self.names.state(module, name)}: param_init of {type(module).__name__} has no entry for it; "
                    f"entries: {', '.join(declared) or 'none'} (skip_param_init leaves a parameter alone)"
                )
            initialiser = _initialiser(declared[name], fqn)
            if initialiser is skip_param_init:
                continue
            self._draw(parameter, fqn, initialiser)

    def _draw(self, parameter: Parameter, fqn: str, initialiser: Callable[[Tensor], Any]) -> None:
        platform = get_platform()
        with platform.ops.no_grad():
            whole = _whole(parameter, fqn)
            with platform.fork_rng(_draw_seed(self.seed, fqn)):
                returned = initialiser(whole)
            if isinstance(returned, platform.Tensor) and returned is not whole:
                raise TypeError(f"{fqn}: its initialiser returned a new tensor; it must fill the given one in place")
            _write(parameter, whole, fqn)
        self.drawn.add(id(parameter))

    def _by_reset(self, module: PlatformModule, parameters: dict[str, Parameter]) -> None:
        """Draw the parameters one by one: in each call of `reset_parameters` the others are without memory."""
        platform = get_platform()
        for name, parameter in parameters.items():
            if id(parameter) in self.drawn:
                continue
            fqn = self.fqn(module, name, parameter)
            with platform.ops.no_grad():
                whole = _whole(parameter, fqn)
                with platform.fork_rng(_draw_seed(self.seed, fqn)), _only(module, name, whole, parameters):
                    _reset_one(module, fqn)
                    whole = getattr(module, name).detach()
                _write(parameter, whole, fqn)
            self.drawn.add(id(parameter))

    def init_buffers(self, module: Module, buffer_device: Any) -> None:
        """Let the module fill its own buffers; those that were distributed are so afterwards."""
        from .module import Module as ModuleClass

        platform = get_platform()
        layouts = {
            name: (buffer.device_mesh, buffer.placements)
            for name, buffer in own_buffers(module).items()
            if isinstance(buffer, platform.DTensor)
        }
        if type(module)._init_self_buffers is not ModuleClass._init_self_buffers:
            with platform.fork_rng(_draw_seed(self.seed, self.names[module])):
                module._init_self_buffers(buffer_device=buffer_device)
        for name, buffer in own_buffers(module).items():
            if name in layouts and not isinstance(buffer, platform.DTensor):
                mesh, placements = layouts[name]
                # Each rank has computed the whole buffer: no need to send it.
                setattr(module, name, platform.distribute_tensor(buffer, mesh, placements, src_data_rank=None))
            elif buffer.is_meta:
                raise ValueError(
                    f"{self.names.state(module, name)}: the buffer is still on the meta device; call "
                    f"to_empty(device=…) first, or fill it in {type(module).__name__}._init_self_buffers"
                )


_current_pass: ContextVar[_InitPass | None] = ContextVar("init_pass", default=None)


@contextmanager
def _init_pass(module: PlatformModule, seed: int | None) -> Iterator[_InitPass]:
    """The pass of the enclosing `init_states`, which knows seed and names; a new one at the root."""
    current = _current_pass.get()
    if current is not None:
        yield current
        return
    current = _InitPass(module, seed)
    token = _current_pass.set(current)
    try:
        yield current
    finally:
        _current_pass.reset(token)


def _common_seed(root: PlatformModule) -> int:
    """This process's seed; where parameters are distributed, that of rank 0, so that all ranks draw alike."""
    platform = get_platform()
    seed = platform.initial_seed()
    if any(isinstance(parameter, platform.DTensor) for parameter in root.parameters()):
        seed = platform.broadcast_object(seed)
    return seed


def _draw_seed(seed: int, fqn: str) -> int:
    digest = hashlib.sha256(f"{seed}/{fqn}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # Seeds are below 2^63.


def _initialiser(entry: Any, fqn: str) -> Callable[[Tensor], Any]:
    function = entry.build() if isinstance(entry, Configurable.Config) else entry
    if not callable(function):
        raise TypeError(f"{fqn}: its entry in param_init is no function: {entry!r}")
    return function


def _whole(parameter: Parameter, fqn: str) -> Tensor:
    """Memory for the whole parameter on the CPU."""
    if parameter.is_meta:
        raise ValueError(f"{fqn}: still on the meta device; call to_empty(device=…) before init_states")
    return get_platform().ops.empty(tuple(parameter.shape), dtype=parameter.dtype, device="cpu")


def _write(parameter: Parameter, whole: Tensor, fqn: str) -> None:
    """Copy this rank's part of `whole` into the parameter."""
    if tuple(whole.shape) != tuple(parameter.shape):
        raise ValueError(f"{fqn}: initialised with shape {tuple(whole.shape)}, but it has {tuple(parameter.shape)}")
    if not isinstance(parameter, get_platform().DTensor):
        parameter.copy_(whole)
        return
    mesh: Any = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return  # This rank is not in the parameter's mesh and holds nothing of it.
    try:
        piece = local_piece(whole, parameter.placements, tuple(mesh.shape), coordinate)
    except ValueError as error:
        raise ValueError(f"{fqn}: {error}") from None
    local: Any = parameter.to_local()
    if piece.shape != local.shape:
        raise ValueError(f"{fqn}: {parameter.placements} gives {tuple(piece.shape)}, it holds {tuple(local.shape)}")
    local.copy_(piece)


@contextmanager
def _only(module: PlatformModule, name: str, whole: Tensor, parameters: dict[str, Parameter]) -> Iterator[None]:
    """Within it, the module's parameter `name` is `whole`, and its others have shapes but no memory."""
    platform = get_platform()
    try:
        for other, parameter in parameters.items():
            shape = tuple(parameter.shape)
            value = whole if other == name else platform.ops.empty(shape, dtype=parameter.dtype, device="meta")
            setattr(module, other, platform.Parameter(value, requires_grad=False))
        yield
    finally:
        for other, parameter in parameters.items():
            setattr(module, other, parameter)


def _reset_one(module: PlatformModule, fqn: str) -> None:
    try:
        module.reset_parameters()  # type: ignore[operator]
    except Exception as error:
        error.add_note(
            f"{fqn}: drawn by {type(module).__name__}.reset_parameters with the layer's other parameters on the meta "
            "device; if it needs their values, declare param_init instead"
        )
        raise
