"""Text from a checkpoint of a run.

In: a run folder, and a prompt. Out: token after token, the likeliest or drawn; the same ones for the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hp_components import BaseTokenizer, HuggingFaceTokenizer
from hp_components.checkpoint import list_checkpoints, load_model
from hp_config import ActivationCheckpointConfig, CompileConfig, ParallelismConfig, load_yaml
from hp_protocols.errors import ConfigError, Fault
from hp_trainer import environment as env
from hp_trainer.model_building import BuiltModel, build_model
from hp_trainer.run_folder import RESOLVED

if TYPE_CHECKING:
    from hp_components.checkpoint import CheckpointInfo
    from hp_trainer.hyper_trainer import HyperTrainer

__all__ = ["OpenRun", "TrainedModel", "built_alone", "generate", "load_trained_model", "open_run", "stream_text"]


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model as a run's checkpoint holds it, on this process's device. `context` is what it was trained to look at."""

    module: torch.nn.Module
    tokenizer: BaseTokenizer
    step: int
    context: int
    device: torch.device


def load_trained_model(run_folder: Path, step: int | None = None) -> TrainedModel:
    """The model of a run in one process, whatever layout it was trained in.

    Args:
        run_folder: what `hp train` has written.
        step: of the checkpoint; None means the newest.

    Raises:
        ConfigError: this is no run, or it has no such checkpoint.
    """
    with open_run(run_folder, step) as run:
        load_model(run.model.module, run.checkpoint.path)
        length, device = run.config.training.seq_len, run.environment.device
        return TrainedModel(run.model.module.eval(), run.tokenizer, run.checkpoint.step, length, device)


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run as its folder describes it, with its model built in this process, at its initial values."""

    config: HyperTrainer.Config
    checkpoint: CheckpointInfo
    tokenizer: BaseTokenizer
    model: BuiltModel
    environment: env.Environment


@contextmanager
def open_run(run_folder: Path, step: int | None = None) -> Iterator[OpenRun]:
    """What `hp train` has left in a folder, for one process that reads it; arguments as for `load_trained_model`.

    Raises:
        ConfigError: this is no run, or it has no such checkpoint.
    """
    config = _config_of(run_folder)
    checkpoint = _checkpoint_of(run_folder / config.checkpoint.folder, step)
    tokenizer: BaseTokenizer = HuggingFaceTokenizer.Config(tokenizer_path=str(run_folder / "tokenizer")).build()
    with built_alone(config) as (model, environment):
        yield OpenRun(config, checkpoint, tokenizer, model, environment)


@contextmanager
def built_alone(config: HyperTrainer.Config) -> Iterator[tuple[BuiltModel, env.Environment]]:
    """The model of a config in this process alone; the config is changed to say so."""
    # Neither how the run was shared out nor how it saved memory matters to one process that only reads.
    config.parallelism, config.compile = ParallelismConfig(), CompileConfig()
    config.activation_checkpoint = ActivationCheckpointConfig(mode="none")
    config.training.enable_cpu_offload = False
    environment = env.start_environment(config.parallelism, config.comm, config.debug)
    try:
        yield build_model(config, environment, seed=0), environment
    finally:
        environment.platform.destroy_process_group()


def generate(
    model: torch.nn.Module,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    context: int,
    vocab_size: int,
    device: torch.device,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Token ids that follow `prompt`, one by one.

    Args:
        model: logits [1, S, V] for ids [1, S].
        prompt: at least one id.
        max_new_tokens: how many at most.
        context: the model sees the last so many ids.
        vocab_size: of the tokenizer; a model may have more rows than that, which mean nothing.
        device: where the model is.
        temperature: 0 takes the likeliest token; above, tokens are drawn from softmax(logits / temperature).
        top_k: draw from the likeliest k alone.
        seed: of the draws. They are made on the cpu, so that every device draws alike.
        stop: end before this id, such as EOS.
    """
    ids = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_new_tokens):
        # Not inference mode: FSDP, which also casts to the dtype of mixed precision, counts versions of tensors.
        with torch.no_grad():
            logits_V = model(torch.tensor([ids[-context:]], device=device))[0, -1, :vocab_size].float().cpu()
        chosen = _choose(logits_V, temperature, top_k, generator)
        if chosen == stop:
            return
        ids.append(chosen)
        yield chosen


def stream_text(tokenizer: BaseTokenizer, prompt: Sequence[int], tokens: Iterator[int]) -> Iterator[str]:
    """The text of the tokens, in pieces as they come; characters that are not whole yet wait for their rest."""
    ids = list(prompt)
    told = len(tokenizer.decode(ids))
    text = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if len(text) > told and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[told:]
            told = len(text)
    if len(text) > told:
        yield text[told:]


def _choose(logits_V: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        least = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    return int(torch.multinomial(torch.softmax(logits_V / temperature, dim=-1), 1, generator=generator))


def _config_of(run_folder: Path) -> HyperTrainer.Config:
    if not (run_folder / RESOLVED).is_file():
        raise ConfigError(Fault(str(run_folder), f"is no run folder: it has no {RESOLVED}", hint="hp train makes one"))
    config: HyperTrainer.Config = load_yaml(run_folder)
    return config


def _checkpoint_of(folder: Path, step: int | None) -> CheckpointInfo:
    found = list_checkpoints(folder)
    if not found:
        hint = "train with checkpoint.enable, or longer than checkpoint.interval steps"
        raise ConfigError(Fault(str(folder), "holds no whole checkpoint", hint=hint))
    if step is None:
        return found[-1]
    for info in found:
        if info.step == step:
            return info
    raise ConfigError(Fault("--step", f"there is none of {step}", allowed=", ".join(str(info.step) for info in found)))
