"""The three sections of the older trainer's YAML, with its names and defaults.

In: nothing. Out: plain dataclasses, which the reader fills and `LLMTrainer` reads. Values that are accepted act;
what cannot act is refused by name, each section through `faults` (see `refusals`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hp_config._legacy import cross_checks, layout, refusals
from hp_protocols.errors import Fault

__all__ = [
    "AcceleratorConfig",
    "CheckpointConfig",
    "DataConfig",
    "DebugConfig",
    "EvalConfig",
    "GradientCheckpointingConfig",
    "HyperTrainerConfig",
    "LoggingConfig",
    "MemoryMonitorConfig",
    "MixedPrecisionConfig",
    "MoEMonitorConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ProfileConfig",
    "TensorBoardConfig",
    "TrainConfig",
    "WandbConfig",
]


class _Section:
    """Every section reports what it cannot honour, through the table in `refusals`."""

    __slots__ = ()

    def faults(self, path: str) -> list[Fault]:
        """The values of this section that are out of range or would not act."""
        return refusals.section_faults(self, path)


@dataclass(kw_only=True)
class ModelConfig(_Section):
    name: str = "qwen3_5"
    """The model, as `get_spec` knows it."""
    weights_path: str | None = None
    """A folder with config.json and safetensors: the model's dimensions, and the weights training starts from."""
    tokenizer_path: str | None = None
    """A folder with a tokenizer; by default `weights_path`, and without either one trained on the corpus."""
    freeze_modules: list[str] | None = None
    """Parameters whose name contains one of these are not trained."""
    tp_plan: dict[str, str] | None = None
    """Glob of module names → colwise, rowwise or replicate; added to the model's own plan, and wins over it."""
    cp_modules: list[str] | None = None
    """Globs of the attention modules that context parallelism splits; by default the model's own."""
    ep_modules: list[str] | None = None
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    config_overrides: dict[str, Any] | None = None
    """Further fields of the model's configuration; these win over everything else."""


@dataclass(kw_only=True)
class DataConfig(_Section):
    type: Literal["dummy", "hf_datasets", "json_file", "preset_pt", "vl_dummy"] = "dummy"
    train_path: str | None = None
    """A file, folder or dataset; required by every type but dummy."""
    subset: str | None = None
    """The configuration of a dataset of type hf_datasets."""
    max_seq_len: int = 2048
    text_key: str = "text"
    train_size: int | None = None
    """Only the first so many samples are used."""
    template: str = "empty"
    """empty: plain text. default: `Human: … Assistant: …`, with the loss on the answers only."""
    image_key: str = "image"
    messages_key: str = "messages"
    image_token_id: int = 151655
    vl_grid_t: int = 2
    vl_grid_h: int = 2
    vl_grid_w: int = 2
    streaming: bool = False
    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = True
    shuffle: bool = True


@dataclass(kw_only=True)
class AcceleratorConfig(_Section):
    dp: int | None = None
    """The old name of `dp_shard`."""
    dp_replicate: int = 1
    dp_shard: int | None = None
    """Ranks that shard the weights; -1 or nothing: as many as the other degrees leave."""
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    zero_stage: int = 0
    """0: as `reshard_after_forward` says. 2: weights stay gathered until backward. 3: they are gathered twice."""
    reshard_after_forward: bool = True
    async_cp: bool = False
    ulysses_degree: int | None = None
    comm_fusion: bool = True

    @property
    def shard_degree(self) -> int:
        """`dp_shard` under either name; -1 leaves it to the number of processes."""
        given = self.dp_shard if self.dp_shard is not None else self.dp
        return -1 if given is None else given


@dataclass(kw_only=True)
class MixedPrecisionConfig(_Section):
    enabled: bool = False
    param_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    reduce_dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    output_dtype: Literal["bfloat16", "float16", "float32"] | None = None


@dataclass(kw_only=True)
class GradientCheckpointingConfig(_Section):
    activation_checkpoint: Literal["off", "none", "full", "selective"] = "off"


@dataclass(kw_only=True)
class OptimizerConfig(_Section):
    type: str = "adamw"
    lr: float = 1e-4
    lr_min: float = 1e-5
    lr_decay_style: Literal["constant", "linear", "cosine", "sqrt"] = "cosine"
    lr_warmup_ratio: float = 0.1
    loss_aggregation: Literal["token_weighted", "rank_average"] = "token_weighted"
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    bsz_warmup_ratio: float = 0.0
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass(kw_only=True)
class CheckpointConfig(_Section):
    output_dir: str = "outputs"
    save_steps: int = 500
    save_hf_weights: bool = True
    load_path: str | None = None
    save_async: bool = False


@dataclass(kw_only=True)
class LoggingConfig(_Section):
    report_to: Literal["none", "tensorboard", "wandb", "all"] = "none"
    report_global_loss: bool = False
    log_steps: int = 10
    report_throughput: bool = True
    model_flops_per_token: int | None = None
    peak_tflops: float | None = None


@dataclass(kw_only=True)
class TensorBoardConfig(_Section):
    enabled: bool = False
    output_dir: str = "tb_traces"
    log_steps: int = 1


@dataclass(kw_only=True)
class WandbConfig(_Section):
    enabled: bool = False
    project: str = "hyper-parallel"
    run_name: str | None = None
    log_steps: int = 1


@dataclass(kw_only=True)
class ProfileConfig(_Section):
    enabled: bool = False
    output_dir: str = "profiler_traces"
    wait_steps: int = 1
    warmup_steps: int = 1
    active_steps: int = 3


@dataclass(kw_only=True)
class MemoryMonitorConfig(_Section):
    enabled: bool = False
    log_steps: int = 50
    reset_peak_each_step: bool = False


@dataclass(kw_only=True)
class MoEMonitorConfig(_Section):
    enabled: bool = False
    lr: float = 1e-3
    num_recomputations: int = 1


@dataclass(kw_only=True)
class EvalConfig(_Section):
    eval_steps: int = 0
    """Every so many steps; 0: never."""
    eval_dataset: str | None = None
    """A path, read like `data.train_path`."""


@dataclass(kw_only=True)
class DebugConfig(_Section):
    deterministic: bool = False
    deterministic_warn_only: bool = False
    check_nan_inf: bool = False
    gc_steps: int = 0
    """Collect garbage every so many steps and at no other time; 0: as Python does."""


@dataclass(kw_only=True)
class TrainConfig(_Section):
    max_steps: int = 100
    num_train_epochs: int = 1
    global_batch_size: int = 8
    micro_batch_size: int = 1
    seed: int = 42
    backend: str = "torch"
    init_device: str = "meta"
    comm_backend: str | None = None
    local_rank: int = 0
    accelerator: AcceleratorConfig = field(default_factory=AcceleratorConfig)
    mixed_precision: MixedPrecisionConfig = field(default_factory=MixedPrecisionConfig)
    gradient_checkpointing: GradientCheckpointingConfig = field(default_factory=GradientCheckpointingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    memory_monitor: MemoryMonitorConfig = field(default_factory=MemoryMonitorConfig)
    moe_monitor: MoEMonitorConfig = field(default_factory=MoEMonitorConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)


@dataclass(kw_only=True)
class HyperTrainerConfig:
    """Everything `LLMTrainer` is built from. The name is the older trainer's; `HyperTrainer` has its own Config."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def faults(self, path: str) -> list[Fault]:
        """Keys of different sections that cannot be had together."""
        return cross_checks.cross_faults(self)

    def layout_faults(self, world_size: int) -> list[Fault]:
        """What does not fit this number of processes."""
        return layout.layout_faults(self, world_size)
