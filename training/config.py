"""The configuration of a run: YAML files, then `section.key=value` overrides; unknown keys are refused.

Each field's type, default, range, "free on resume" and help text stand together (common.config_fields). Of how a step's
clips are split, batch_size is free although it changes which random numbers dropout and mixup draw;
that a step has as many clips as before, and that shards, which may have moved, are the same, is read from the
checkpoint, and so is that a deterministic run is executed as before.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import yaml

from adamae.common.config_fields import check_ranges, flatten, free_keys, option
from adamae.common.errors import InputError
from adamae.model.config import ModelConfig
from adamae.pipeline.config import DataConfig

if TYPE_CHECKING:
    from adamae.common.config_parser import ConfigParser

Task = Literal["pretrain", "finetune", "linear_probe", "attentive_probe"]
# true is for memory, reduce-overhead for speed: it launches the kernels of a pass together, as a CUDA graph, and keeps
# outputs of GELU and LayerNorm, see training.parallelize.compile_in_place.
Compile = bool | Literal["reduce-overhead"]


@dataclass
class OptimizerConfig:
    """AdamW and its schedule; the defaults are the paper's for pre-training."""

    base_lr: float = option(1.5e-4, at_least=0)
    """peak learning rate; this and the next two are per 256 clips: multiplied by global batch / 256"""
    min_lr: float = option(1e-5, at_least=0)
    """learning rate at the end"""
    warmup_lr: float = option(1e-6, at_least=0)
    """learning rate at the start of warm-up"""
    warmup_ratio: float = option(0.05, at_least=0, below=1)
    """fraction of the run with linear warm-up"""
    beta1: float = option(0.9, at_least=0, below=1)
    """AdamW β1"""
    beta2: float = option(0.95, at_least=0, below=1)
    """AdamW β2"""
    weight_decay: float = option(0.05, at_least=0)
    """not applied to biases, norms, positions and mask token"""
    clip_grad_norm: float | None = option(None, above=0)
    """maximum gradient norm; null: no clipping"""


@dataclass
class FinetuneConfig:
    """Classification, with every task but pretrain; the defaults are the paper's for fine-tuning."""

    label_smoothing: float = option(0.1, at_least=0, below=1)
    """fraction of the target that is spread over all classes"""
    mixup: float = option(0.8, at_least=0)
    """alpha of the beta distribution of the mixing weight; 0: off"""
    cutmix: float = option(1.0, at_least=0)
    """alpha of the beta distribution of the box's area; 0: off"""
    drop_path: float = option(0.1, at_least=0, below=1)
    """stochastic depth rate, with task=finetune; the encoder of a probe is frozen"""
    layer_decay: float = option(0.75, above=0, at_most=1)
    """each block's learning rate as a fraction of the next one's, with task=finetune"""
    ema_decay: float | None = option(None, above=0, below=1)
    """decay of an exponential moving average of the weights, which is evaluated and kept; null: none"""


@dataclass
class EvaluationConfig:
    """Evaluation during training, on videos that are not trained on."""

    shards: str = option("", free=True)
    """dataset folder; pretrain: loss with fixed masks, k-NN accuracy and RankMe; else accuracy; "": none"""
    every: int | None = option(1000, at_least=1, free=True)
    """steps between evaluations, which also keep checkpoints/best (not pretrain); null: never, and no plots either"""
    group: str = option("group", free=True)
    """field of the samples (recording, person, …); k-NN asks no neighbor with the same value"""


@dataclass
class TrainConfig:
    """One run."""

    data: DataConfig
    task: Task = "pretrain"
    """pretrain: masked videos; finetune: classification with the whole encoder; probes: a head on a frozen encoder"""
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    epochs: float = option(800, above=0)
    """an epoch is every video once, as data.repeats clips"""
    steps: int | None = option(None, at_least=1)
    """optimizer steps, instead of epochs"""
    global_batch: int | None = option(None, at_least=1, free=True)
    """clips per optimizer step, at any number of ranks, in as many passes as it takes; null: batch_size × ranks"""
    batch_size: int = option(32, at_least=1, free=True)
    """the most clips of a rank's forward pass"""
    seed: int = option(0, at_least=0)
    """seed of weights, sample order, crops and masks"""

    run: str = option("runs/adamae", free=True)
    """run directory, or a URL (s3://…); the same command resumes from its newest checkpoint"""
    init_from: str = ""
    """weights that a new run starts from: a run, a checkpoint, or another project's file; "": from scratch"""
    init_keep: Literal["weights", "optimizer"] = "weights"
    """optimizer: a fork of the run init_from, whose optimizer, step and place in the data continue"""
    device: Literal["auto", "cpu", "cuda"] = option("auto", free=True)
    """auto: a GPU if there is one"""
    timeout_s: float = option(300.0, above=0, free=True)
    """seconds after which a rank that does not answer ends the run, and is named"""
    precision: Literal["bf16", "fp32"] = "bf16"
    """of matrix products; fp32 is used on CPUs without native bf16 support"""
    compile: Compile = option(False, free=True)
    """torch.compile the model: true for memory; reduce-overhead for speed: CUDA graphs, less recomputed, more memory"""
    deterministic: bool = False
    """bitwise reproducible on a GPU too, also across resumes; clips are decoded by PyAV"""
    profile: bool = option(False, free=True)
    """profile three steps, then continue: trace and memory snapshot in the run's profile/"""
    log_every: int = option(10, at_least=1, free=True)
    """steps between log lines (each synchronizes the GPU)"""
    checkpoint_minutes: float = option(5.0, above=0, free=True)
    """minutes between checkpoints, with which the report and plots are renewed; the first comes after one"""
    checkpoint_every: int | None = option(None, at_least=1, free=True)
    """also a checkpoint every so many steps"""
    keep_checkpoints: int = option(3, at_least=1, free=True)
    """number of newest checkpoints to keep"""
    wandb: bool = option(False, free=True)
    """log to Weights & Biases too; TensorBoard, metrics.jsonl and report.html are always written"""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.data.shards:
            raise InputError("data.shards is empty: set it to a dataset folder, data.shards=FOLDER")
        if self.model.activation_checkpointing and self.task != "pretrain":
            raise InputError(
                f"model.activation_checkpointing is for pre-training: remove it with task={self.task}"
            )
        if self.init_keep == "optimizer" and not self.init_from:
            raise InputError("init_keep=optimizer continues another run: set init_from to it")
        if self.deterministic and self.data.decoder == "dali":
            raise InputError(
                "data.decoder=dali falls back to PyAV where it fails: with deterministic=true, remove it"
            )
        if self.deterministic:
            self.data = dataclasses.replace(self.data, decoder="pyav")

    def clips_per_step(self, world_size: int) -> int:
        """Return the clips per optimizer step, over all ranks."""
        return self.global_batch or self.batch_size * world_size


@cache
def _parser() -> "ConfigParser":
    from adamae.common.config_parser import (
        ConfigParser,  # jsonargparse, which configurations made in Python do not need
    )

    usage = "train.py [--config FILE ...] [section.key=value ...]"
    about = "Pre-train or fine-tune AdaMAE on shards. Keys may be written without the dashes: model.size=tiny"
    return ConfigParser("train.py", usage, about, TrainConfig)


def parse(arguments: list[str]) -> TrainConfig:
    """Read `--config FILE` and `section.key=value` overrides; raises InputError on unknown keys and wrong types."""
    parsed = _parser().parse(arguments)
    return TrainConfig(**{f.name: parsed[f.name] for f in dataclasses.fields(TrainConfig)})


def to_yaml(config: TrainConfig) -> str:
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def differences(config: TrainConfig, earlier: dict[str, Any]) -> list[str]:
    """List the keys, but those free on resume, in which `config` differs from an earlier run's: `key: old -> new`."""
    before, now = flatten(earlier), flatten(dataclasses.asdict(config))
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in changed
        if key not in set(free_keys(TrainConfig))
    ]


def changed_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return what differs from the defaults, by dotted key."""
    defaults = flatten(dataclasses.asdict(TrainConfig(data=DataConfig(shards="-"))))
    return {key: value for key, value in flatten(config).items() if value != defaults.get(key)}
