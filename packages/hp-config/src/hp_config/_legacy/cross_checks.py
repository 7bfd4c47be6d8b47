"""What keys of different sections of the older YAML cannot be had together.

In: a `HyperTrainerConfig`. Out: `Fault`s with the older paths.
"""

from __future__ import annotations

from typing import Any

from hp_protocols.errors import Fault

__all__ = ["cross_faults"]


def cross_faults(config: Any) -> list[Fault]:
    """Keys that the data, or the number of steps, give nothing to act on."""
    data, train, model = config.data, config.train, config.model
    faults = []
    if data.type in ("dummy", "preset_pt") and model.tokenizer_path is not None:
        problem = f"is not read by data.type: {data.type}, whose rows are token ids"
        faults.append(Fault("model.tokenizer_path", problem, hint="remove the key"))
    profile = train.profile
    needed = profile.wait_steps + profile.warmup_steps + profile.active_steps
    if profile.enabled and train.max_steps < needed:
        problem = f"a trace of {profile.active_steps} steps is there after {needed}, and max_steps is {train.max_steps}"
        faults.append(Fault("train.profile.active_steps", problem, hint="fewer steps, or enabled: false"))
    if data.type != "dummy":
        return faults
    if train.eval.eval_dataset is not None:
        problem = "is not read by data.type: dummy, which has nothing to hold out"
        faults.append(Fault("train.eval.eval_dataset", problem, hint="eval_steps: 0, or type: json_file"))
    if train.num_train_epochs != 1 and data.train_size is None:
        problem = f"{train.num_train_epochs}: random tokens without a number have no epochs"
        faults.append(Fault("train.num_train_epochs", problem, hint="data.train_size gives them one"))
    return faults
