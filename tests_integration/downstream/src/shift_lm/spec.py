"""The sizes of ShiftLM, as the entry point `shift_lm` of the group `hp_models.specs` offers them.

In: a flavour. Out: a `ModelSpec`: the config tree and how the model is laid out on the processes of a run. The imports
stand in the functions: `hp list` reads the names of the flavours and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hp_protocols import ModelSpec
    from hp_protocols.distributed import ParallelDims
    from hp_protocols.trainer_sections import TrainerConfig
    from shift_lm.model import ShiftLM


def parallelize(model: ShiftLM, *, parallel_dims: ParallelDims, trainer_config: TrainerConfig) -> ShiftLM:
    """Recomputation, compilation, FSDP or DDP; tensor or context parallelism would come first."""
    from hp_protocols.distributed import finish_parallelize

    finish_parallelize(model, blocks=model.layers, parallel_dims=parallel_dims, trainer_config=trainer_config)
    return model


def spec(flavor: str, *, dim: int, depth: int) -> ModelSpec:
    from hp_protocols import ModelSpec
    from shift_lm.model import shift_lm

    model = shift_lm(vocab_size=512, dim=dim, depth=depth)
    return ModelSpec(name="shift_lm", flavor=flavor, model=model, parallelize_fn=parallelize)


def small() -> ModelSpec:
    return spec("small", dim=32, depth=3)


def wide() -> ModelSpec:
    return spec("wide", dim=128, depth=3)


FLAVORS = {"small": small, "wide": wide}
