"""Compile a model block by block.

In: the model's blocks. Out: the same blocks, compiled in place at their first call. Blocks of one class and shape
share their compiled code, so a deep model compiles about as fast as one block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hp_protocols.errors import ConfigError, Fault, nearest
from hp_protocols.platform import Capability, get_platform

if TYPE_CHECKING:
    from hp_protocols.platform import Module

__all__ = ["apply_compile"]


def apply_compile(
    *, blocks: Iterable[Module], backend: str = "inductor", fullgraph: bool = True, dynamic: bool | None = None
) -> list[Module]:
    """Compile each block's forward with the platform's compiler; in place, names do not change.

    Apply it after `apply_ac` (pass the blocks that it returned) and before `apply_fsdp`, whose hooks stay outside.

    Args:
        backend: the compiler's name, one of `get_platform().compilers()`.
        fullgraph: a block that cannot be compiled as a whole is an error; False lets the compiler cut it into pieces.
        dynamic: None: compile for the first shape, and for any shape when a second one comes; True, False: at once,
            never.

    Returns:
        the blocks.

    Raises:
        ConfigError: there is no such compiler.
        CapabilityError: the platform cannot compile.
    """
    platform = get_platform()
    platform.require(Capability.COMPILE, "apply_compile")
    blocks = list(blocks)
    compilers = platform.compilers()
    if backend not in compilers:
        near = nearest(backend, compilers)
        raise ConfigError(
            Fault(
                "compile.backend",
                f"{backend!r} is no compiler here",
                allowed=", ".join(compilers),
                hint=f"did you mean {near!r}?" if near else None,
            )
        )
    for block in blocks:
        platform.compile_module(block, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
    return blocks
