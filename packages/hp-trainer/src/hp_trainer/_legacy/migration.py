"""The older YAML as changes to a recipe of HyperTrainer, and what of it has no counterpart there.

In: a `HyperTrainerConfig`. Out: a `Migration`: YAML text that `hp train` takes, and every key that is not in it with
the reason. Nothing is dropped silently.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from hp_components import BaseDataLoader, CorpusTokenizer, DummyDataLoader, HuggingFaceTokenizer
from hp_config import HyperTrainerConfig
from hp_models.qwen3_5_v2 import qwen3_5_config
from hp_protocols import get_spec
from hp_protocols.errors import ConfigError, Fault
from hp_trainer._legacy import data
from hp_trainer._legacy.llm_trainer import LARGEST_OWN_VOCABULARY, build_bare_model
from hp_trainer._legacy.run_place import STEP, RunPlace, choose_place
from hp_trainer._legacy.sections import make_sections
from hp_trainer.hyper_trainer import HyperTrainer
from hp_trainer.recipes.qwen3_5_v2 import qwen3_5_v2_debugmodel
from hp_trainer.validation import Validator

__all__ = ["Migration", "migrate"]

RECIPE = ("qwen3_5_v2", "qwen3_5_v2_debugmodel")
COUNTERPART = {"qwen3_5": "qwen3_5_v2"}

_REASONS = {
    "model.freeze_modules": "HyperTrainer trains every parameter",
    "model.tp_plan": "the v2 model declares its sharding itself",
    "model.cp_modules": "the v2 model says itself what is split",
    "data.train_size": "HyperTrainer reads a corpus whole: cut the file, or use split=train[:N] of a dataset",
    "train.init_device": "HyperTrainer always builds on the meta device",
    "train.comm_backend": "the backend follows from the device",
    "train.local_rank": "the launcher says it",
    "train.mixed_precision.output_dtype": "the loss takes the logits in float32",
    "train.optimizer.loss_aggregation": "HyperTrainer weighs every token alike (token_weighted)",
    "train.logging.report_global_loss": "HyperTrainer always reports the mean over all ranks",
    "train.logging.report_throughput": "it is always reported",
    "train.logging.model_flops_per_token": "HyperTrainer counts them from the model",
    "train.tensorboard.output_dir": "curves are in the run folder (metrics.save_tb_folder)",
    "train.tensorboard.log_steps": "curves have the records of metrics.log_freq",
    "train.wandb.project": "set WANDB_PROJECT",
    "train.wandb.run_name": "set WANDB_NAME",
    "train.wandb.log_steps": "curves have the records of metrics.log_freq",
    "train.profile.output_dir": "traces are in the run folder (profiler.save_traces_folder)",
    "train.memory_monitor.enabled": "every record has memory_gib",
    "train.memory_monitor.log_steps": "every record has memory_gib",
    "train.memory_monitor.reset_peak_each_step": "memory_gib is the peak since the last record",
    "train.moe_monitor.lr": "there is no mixture-of-experts model yet",
    "train.moe_monitor.num_recomputations": "there is no mixture-of-experts model yet",
    "train.debug.check_nan_inf": "a step that is not finite is left out and recorded, without parameter names",
}


_REASONS_FOR_RANDOM_TOKENS = {
    "data.train_size": "random tokens have no end there",
    "train.num_train_epochs": "random tokens have no end there",
    "data.shuffle": "random tokens have no end there, and no other order",
    "data.num_workers": "random tokens are drawn in the training process",
    "data.prefetch_factor": "random tokens are drawn in the training process",
    "data.pin_memory": "random tokens are drawn in the training process",
}

_OWN_START = """\
# Random initial weights are drawn by other rules than the older trainer's, so that a run from nothing has other
# numbers. From the same weights (checkpoint.initial_load_path) both train the same bits.
"""


_SAME_FOLDER = """\
# Trained again, this file goes on with the run in dump_folder, where the older trainer began another one beside it:
# name another --dump_folder for another run.
"""

_SAME_STEP = """\
# checkpoint.load_step is taken each time: without it a run goes on from its newest checkpoint.
"""

_TOKENS_BEGIN_ANEW = """\
# Random tokens are drawn from the first one again: HyperTrainer does not know where the older trainer was in its own.
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """`text` begins with `hp_config: 1`; `left_out` is one line per key without a counterpart."""

    text: str
    left_out: tuple[str, ...]


def migrate(args: HyperTrainerConfig) -> Migration:
    """The counterpart of a configuration.

    Raises:
        ConfigError: the model has none, or the data could not be read.
    """
    if args.model.name not in COUNTERPART:
        raise ConfigError(Fault("model.name", f"{args.model.name!r} has no counterpart", ", ".join(COUNTERPART)))
    if args.data.type == "preset_pt":
        hint = "hp train FILE.yaml trains it the older way, or write a dataloader for it"
        raise ConfigError(Fault("data.type", "preset_pt: prepared tensors have no dataloader there", hint=hint))
    recipe = qwen3_5_v2_debugmodel()
    config = _config(args, copy.deepcopy(recipe))
    changes = _changes(recipe.to_dict(), config.to_dict())
    changes.pop("recipe", None)
    reasons = _REASONS | (_REASONS_FOR_RANDOM_TOKENS if args.data.type == "dummy" else {})
    left_out = tuple(
        f"{path}: {reasons[path]} (it was {value})" for path, value in _set_values(args).items() if path in reasons
    )
    head = {"hp_config": 1, "module": RECIPE[0], "config": RECIPE[1], "trainer": changes}
    text = yaml.safe_dump(head, sort_keys=False, allow_unicode=True, width=110)
    text += _notes(args, config)
    if left_out:
        lines = "".join(f"#   {line}\n" for line in left_out)
        text += f"# Keys of the older file that have no counterpart:\n{lines}"
    return Migration(text, left_out)


def _notes(args: HyperTrainerConfig, config: HyperTrainer.Config) -> str:
    """What is the same in both files and yet not meant alike by both trainers."""
    goes_on = args.train.checkpoint.load_path is not None
    return "".join(
        note
        for note, applies in (
            (_OWN_START, not goes_on and args.model.weights_path is None),
            (_SAME_FOLDER, not goes_on),
            (_SAME_STEP, config.checkpoint.load_step != -1),
            (_TOKENS_BEGIN_ANEW, bool(config.checkpoint.exclude_from_loading)),
        )
        if applies
    )


def _config(args: HyperTrainerConfig, config: HyperTrainer.Config) -> HyperTrainer.Config:
    """The recipe with everything that the older file says."""
    sections, faults = make_sections(args)
    if faults:
        raise ConfigError(faults)
    train, checkpoint = args.train, args.train.checkpoint
    with torch.device("meta"):
        model: Any = build_bare_model(get_spec(args.model.name), args.model)
    config.model_spec = get_spec(COUNTERPART[args.model.name])
    config.model_spec.model = _model_config(model.config)
    place = _place(checkpoint)
    config.dump_folder = place.folder
    for name in ("optimizer", "lr_scheduler", "loss", "training", "parallelism", "activation_checkpoint", "debug"):
        setattr(config, name, getattr(sections, name))
    config.profiler = sections.profiler.replace(save_traces_folder=config.profiler.save_traces_folder)
    weights = args.model.weights_path if checkpoint.load_path is None else None
    config.checkpoint = sections.checkpoint.replace(
        last_save_in_hf=checkpoint.save_hf_weights,
        load_step=place.load_step,
        exclude_from_loading=("dataloader",) if checkpoint.load_path and args.data.type == "dummy" else (),
        initial_load_path=place.initial_load_path or weights,
        initial_load_in_hf=weights is not None,
        initial_load_model_only=place.initial_load_path is None,
    )
    report = train.logging.report_to
    config.metrics = sections.metrics.replace(
        enable_tensorboard=train.tensorboard.enabled or report in ("tensorboard", "all"),
        enable_wandb=train.wandb.enabled or report in ("wandb", "all"),
    )
    folder = args.model.tokenizer_path or args.model.weights_path
    config.tokenizer = (
        CorpusTokenizer.Config(vocab_size=min(model.config.vocab_size, LARGEST_OWN_VOCABULARY))
        if folder is None
        else HuggingFaceTokenizer.Config(tokenizer_path=folder)
    )
    config.dataloader = _dataloader(args, model.config.vocab_size, args.data.train_path or "", training=True)
    if train.eval.eval_steps:
        held_out = _dataloader(args, model.config.vocab_size, train.eval.eval_dataset or "", training=False)
        config.validation = Validator.Config(enable=True, freq=train.eval.eval_steps, dataloader=held_out)
    return config


def _place(checkpoint: Any) -> RunPlace:
    """Where the older trainer would write, and what it would go on from, as far as this machine has the folders."""
    path, output = checkpoint.load_path, Path(checkpoint.output_dir)
    if path is None or Path(path).exists():
        return choose_place(checkpoint)
    step = STEP.fullmatch(Path(path).name)
    if step and Path(path).parent.parent == output:
        return RunPlace(checkpoint.output_dir, load_step=int(step[1]))
    # Read where the run is started, which is refused if nothing is there.
    return RunPlace(checkpoint.output_dir, initial_load_path=path)


def _dataloader(args: HyperTrainerConfig, vocab_size: int, path: str, *, training: bool) -> BaseDataLoader.Config:
    section = copy.copy(args.data)
    section.train_size = None
    if section.type == "dummy":
        return DummyDataLoader.Config(vocab_size=vocab_size)
    if section.type == "hf_datasets" and section.template != "empty":
        problem = "conversations of a dataset of the hub have no dataloader there"
        raise ConfigError(Fault("data.type", problem, hint="save them as .jsonl: type: json_file"))
    return data.text_config(section, args.train.num_train_epochs if training else 1, path, training=training)


def _model_config(bare: Any) -> Any:
    """The v2 config of the same dimensions."""
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_conv_kernel_dim", "rope_theta", "partial_rotary_factor", "rms_norm_eps", "initializer_range"),
        *("tie_word_embeddings", "max_position_embeddings"),
    )
    pairs = int(bare.head_dim * bare.partial_rotary_factor) // 2
    return qwen3_5_config(
        **{name: getattr(bare, name) for name in names},
        layer_types=bare.kinds(),
        # Text has one position per token, whatever the sections are; they only have to fill the pairs.
        mrope_section=(pairs - 2 * (pairs // 3), pairs // 3, pairs // 3),
    )


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What `after` says otherwise; a node of another class is whole."""
    changed: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and value.get("_type") == old.get("_type"):
            if inner := _changes(old, value):
                changed[key] = inner if "_type" in value else value
        elif value != old:
            changed[key] = value
    return changed


def _set_values(args: HyperTrainerConfig) -> dict[str, Any]:
    """The keys whose value is not the older trainer's default."""
    found: dict[str, Any] = {}

    def walk(node: Any, default: Any, path: str) -> None:
        for name, value in vars(node).items():
            full = f"{path}.{name}" if path else name
            if hasattr(value, "__dataclass_fields__"):
                walk(value, getattr(default, name), full)
            elif value != getattr(default, name):
                found[full] = value

    walk(args, HyperTrainerConfig(), "")
    return found
