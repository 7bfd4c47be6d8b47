"""What the benchmarks of the trainer share: a HyperTrainer that is called step by step.

In: a config. Out: `step()`, all of what `train()` does in a step, within `running()`. Not a benchmark itself: run
trainer_overhead or trainer_modes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hp_trainer import HyperTrainer


class SteppedTrainer(HyperTrainer):
    """The second one in a process shares the first one's world."""

    first: SteppedTrainer | None = None

    def start_environment(self) -> None:
        if SteppedTrainer.first is None:
            super().start_environment()
            SteppedTrainer.first = self
        else:
            self.environment = SteppedTrainer.first.environment

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within it, steps may be called."""
        self.begin()
        self.batches = iter(self.dataloader)
        with self.around_steps():
            yield
        self.release()
        self.run_folder.close()

    def step(self) -> torch.Tensor:
        """One step; its loss."""
        fetched = self.training_step.fetch(self.batches)
        agreed = self.training_step.agree(fetched, stop_wanted=False)
        fetched = self.training_step.even_out(fetched, agreed.micro_batches)
        result = self.training_step.run(fetched, agreed.valid_tokens)
        self.state.step += 1
        self.after_step(result)
        return torch.tensor(result.loss)
