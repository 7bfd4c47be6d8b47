"""A training script of one's own: what `hp train` does, in four lines, without its messages and launcher.

    python tools/train_lm.py --module qwen3_5_v2 --config qwen3_5_v2_debugmodel --training.steps 20
    torchrun --nproc-per-node 2 tools/train_lm.py old.yaml --train.max_steps=20

In: a recipe, a run's resolved.yaml or a YAML of the older trainer, and options. Out: the run folder.
"""

from __future__ import annotations

from hp_config import ConfigManager, HyperTrainerConfig
from hp_trainer import LLMTrainer


def main() -> None:
    config = ConfigManager().parse_args()
    trainer = LLMTrainer(config) if isinstance(config, HyperTrainerConfig) else config.build()
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main()
