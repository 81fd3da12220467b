"""The configuration of a run: YAML files, then `section.key=value` overrides.

A field has its type, default, range, help text and "free on resume" in one place
(common.config_fields); an unknown key is an error.

A resumed run must have the configuration that it began with, but for the fields that are free.
global_batch, the shards and, of a deterministic run, the execution are free here because the
checkpoint knows them better: checkpoint.check_checkpoint compares what they amount to.
batch_size is free although it changes which random numbers drop path and mixup get.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import yaml

from adamae.common import commands
from adamae.common.config_fields import check_ranges, flatten, free_keys, option
from adamae.common.errors import InputError
from adamae.model.config import ModelConfig
from adamae.pipeline.config import DataConfig

if TYPE_CHECKING:
    from adamae.common.config_parser import ConfigParser

Task = Literal["pretrain", "finetune", "linear_probe", "attentive_probe"]
# true saves memory. reduce-overhead is for speed: it launches the kernels of a pass together, as a
# CUDA graph, and keeps outputs of GELU and LayerNorm (training.parallelize.compile_in_place).
Compile = bool | Literal["reduce-overhead"]


@dataclass
class OptimizerConfig:
    """AdamW and its schedule; the defaults are the paper's for pre-training."""

    base_lr: float = option(1.5e-4, at_least=0)
    """peak learning rate; like the next two, for 256 clips: multiplied by global batch / 256"""
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
    """Classification (any task but pretrain); the defaults are the paper's for fine-tuning"""

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
    """decay of a moving average of the weights, which is evaluated and kept; null: none"""


@dataclass
class EvaluationConfig:
    """Evaluation during training, on videos that are not trained on."""

    shards: str = option("", free=True)
    """dataset folder; pretrain: held-out loss, k-NN accuracy, RankMe; else accuracy; "": none"""
    every: int | None = option(1000, at_least=1, free=True)
    """steps between evaluations, which keep checkpoints/best (classifiers); null: none, no plots"""
    group: str = option("group", free=True)
    """field of the samples (recording, person, …); k-NN asks no neighbor with the same value"""


@dataclass
class TrainConfig:
    """One run."""

    data: DataConfig
    task: Task = "pretrain"
    """pretrain: masked videos; finetune: classify; probes: classify with a frozen encoder"""
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    epochs: float = option(800, above=0)
    """an epoch is every video once, as data.repeats clips"""
    steps: int | None = option(None, at_least=1)
    """optimizer steps, instead of epochs"""
    global_batch: int | None = option(None, at_least=1, free=True)
    """clips per optimizer step, over all ranks and passes; null: batch_size × ranks"""
    batch_size: int = option(32, at_least=1, free=True)
    """maximum clips of a rank's forward pass"""
    seed: int = option(0, at_least=0)
    """seed of weights, sample order, crops and masks"""

    run: str = option("runs/adamae", free=True)
    """run directory, or a URL (s3://…); the same command resumes from its newest checkpoint"""
    init_from: str = ""
    """initial weights of a new run: a run, a checkpoint, another project's file; "": random"""
    init_keep: Literal["weights", "optimizer"] = "weights"
    """optimizer: fork the run init_from, continuing its optimizer, step and data position"""
    device: Literal["auto", "cpu", "cuda"] = option("auto", free=True)
    """auto: a GPU if there is one"""
    timeout_s: float = option(300.0, above=0, free=True)
    """seconds after which a rank that does not answer ends the run, and is named; ten times that
    while one reads or writes the run's files"""
    precision: Literal["bf16", "fp32"] = "bf16"
    """precision of matrix products; CPUs without native bf16 use fp32"""
    compile: Compile = option(False, free=True)
    """torch.compile; true: less memory; reduce-overhead: faster (CUDA graphs), more memory"""
    deterministic: bool = False
    """bitwise reproducible on a GPU too, also across resumes; clips are decoded by PyAV"""
    profile: bool = option(False, free=True)
    """profile three steps, then continue: trace and memory snapshot in the run's profile/"""
    log_every: int = option(10, at_least=1, free=True)
    """steps between log lines (each synchronizes the GPU)"""
    checkpoint_minutes: float = option(5.0, above=0, free=True)
    """minutes between checkpoints, each with report and plots; the first comes after one minute"""
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
                "model.activation_checkpointing is for pre-training: remove it with"
                f" task={self.task}"
            )
        self._check_views()
        if self.init_keep == "optimizer" and not self.init_from:
            raise InputError("init_keep=optimizer continues another run: set init_from to it")
        if self.deterministic and self.data.decoder == "dali":
            raise InputError(
                "data.decoder=dali falls back to PyAV where it fails: with deterministic=true,"
                " remove it"
            )
        # DALI's pixels differ from PyAV's, and so does who decodes a video when one of them fails.
        if self.deterministic:
            self.data = dataclasses.replace(self.data, decoder="pyav")

    def _check_views(self) -> None:
        views = self.model.views
        if views == 1:
            return
        if self.task != "pretrain":
            raise InputError(f"model.views is for pre-training: remove it with task={self.task}")
        if self.data.repeats != views:
            raise InputError(
                f"model.views is {views} and data.repeats {self.data.repeats}: the views of a"
                " video are the clips of one decode, so set both to the same number"
            )

    def clips_per_step(self, world_size: int) -> int:
        """Return the clips per optimizer step, over all ranks."""
        return self.global_batch or self.batch_size * world_size


@cache
def _parser() -> "ConfigParser":
    # jsonargparse, which a configuration that is made in Python does not need.
    from adamae.common.config_parser import ConfigParser

    # Commands that measure or show a run take its configuration too, and name this one for help.
    name = "adamae train" if commands.called_as else "train.py"
    usage = f"{name} [--config FILE ...] [section.key=value ...]"
    about = (
        "Pre-train or fine-tune AdaMAE on shards. Keys may be written without the dashes:"
        " model.size=tiny"
    )
    return ConfigParser(name, usage, about, TrainConfig)


def parse(arguments: list[str]) -> TrainConfig:
    """Parse `--config FILE` and `section.key=value` overrides.

    Raise InputError if a key is unknown or a value has the wrong type or range.
    """
    parsed = _parser().parse(arguments)
    return TrainConfig(**{f.name: parsed[f.name] for f in dataclasses.fields(TrainConfig)})


def to_yaml(config: TrainConfig) -> str:
    """Return the configuration as a file that `--config` takes."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def differences(config: TrainConfig, earlier: dict[str, Any]) -> list[str]:
    """List how `config` differs from an earlier one, as `model.size: base -> small`.

    Keys that are free on resume are left out.
    """
    before = flatten(earlier)
    now = flatten(dataclasses.asdict(config))
    fixed_keys = (before.keys() | now.keys()) - set(free_keys(TrainConfig))
    return [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(fixed_keys)
        if before.get(key) != now.get(key)
    ]


def changed_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the defaults, by dotted key."""
    defaults = flatten(dataclasses.asdict(TrainConfig(data=DataConfig(shards="-"))))
    return {key: value for key, value in flatten(config).items() if value != defaults.get(key)}
