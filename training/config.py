"""The typed configuration of a run: YAML file, then `section.key=value` overrides; unknown keys are refused."""

import argparse
import dataclasses
import math
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from common.devices import Precision
from common.errors import InputError
from common.yaml_io import parse_yaml, read_yaml
from model.config import ModelConfig
from pipeline.config import DataConfig
from training.compiling import Compile
from training.distributed import DistributedConfig
from training.numerics import DETERMINISTIC, Attention
from training.optimizer import OptimizerConfig

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

Objective = Literal["pretrain", "finetune", "linear_probe", "attentive_probe"]


@dataclass
class FinetuneConfig:
    """Learning classes from labels, with all objectives but pretrain; the defaults are the paper's for fine-tuning."""

    checkpoint: str = ""
    """encoder to start from: a run, a checkpoint, or anybody's weights; "": from scratch"""
    validation_shards: str = ""
    """labelled shards to be judged on while training; "": none"""
    validate_every: int = 1000
    """steps between two validations; the best weights are kept in checkpoints/best"""
    label_smoothing: float = 0.1
    """share of the target that is spread over all classes"""
    mixup: float = 0.8
    """alpha of the beta distribution of the mixing weight; 0: off"""
    cutmix: float = 1.0
    """alpha of the beta distribution of the box's area; 0: off"""
    drop_path: float = 0.1
    """share of the residual branches left out, of objective=finetune; the encoder of a probe is frozen"""
    layer_decay: float = 0.75
    """each block's learning rate as a share of the next one's, of objective=finetune"""
    ema_decay: float | None = None
    """judge and keep an exponential moving average of the weights with this decay; null: the weights themselves"""

    def __post_init__(self) -> None:
        if self.validate_every < 1:
            raise InputError(f"finetune.validate_every is {self.validate_every}: give a whole number of at least 1")
        for name in ("label_smoothing", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"finetune.{name} is {getattr(self, name)}: give a number in [0, 1)")
        for name in ("mixup", "cutmix"):
            if not getattr(self, name) >= 0:
                raise InputError(f"finetune.{name} is {getattr(self, name)}: give a number of at least 0")
        if not 0 < self.layer_decay <= 1:
            raise InputError(f"finetune.layer_decay is {self.layer_decay}: give a number in (0, 1]")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise InputError(f"finetune.ema_decay is {self.ema_decay}: give a number in (0, 1), or null for none")


@dataclass
class TrainConfig:
    """One run."""

    data: DataConfig
    objective: Objective = "pretrain"
    """pretrain: masked videos; finetune: the whole encoder with labels; probes: a head on a frozen encoder"""
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    epochs: float = 800
    """an epoch is every video once, as data.repeats clips"""
    steps: int | None = None
    """optimizer steps, instead of epochs"""
    global_batch: int | None = None
    """clips per optimizer step, at any number of processes; null: batch_size × accumulate × processes"""
    batch_size: int = 32
    """clips per process and forward pass; with global_batch, the most of them"""
    accumulate: int = 1
    """without global_batch, forward passes per optimizer step"""
    seed: int = 0
    """of everything random: weights, order, crops, masks"""

    run: str = "runs/adamae"
    """run folder, or a URL (s3://…); started again, it goes on from its newest checkpoint"""
    branch: str = ""
    """a run, or one of its checkpoints, that this one begins as: with its settings, weights, optimizer"""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on with the run that the folder holds; never: refuse such a folder"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one"""
    precision: Precision = "bf16"
    """of matrix products; on a CPU without units for bf16, fp32 is used"""
    compile: Compile = False
    """torch.compile the model; reduce-overhead: and launch each pass's kernels as one CUDA graph, for small batches"""
    attention: Attention = "auto"
    """kernel on a GPU, where it takes the input; auto: PyTorch's choice, which is logged"""
    deterministic: bool = False
    """a GPU too gives the same bits every time, also to a run that was stopped; clips are decoded by PyAV"""
    profile: bool = False
    """watch three steps, then go on: trace and picture of memory in the run's profile/"""
    log_every: int = 10
    """steps between two lines of metrics; but for checkpoints, the only moments at which the host waits"""
    checkpoint_every: int = 1000
    """steps between two checkpoints"""
    keep_checkpoints: int = 3
    """newest checkpoints that stay"""
    figure_every: int | None = 1000
    """steps between two reviews of pre-training: figures and data.validation_shards; null: none"""
    metrics: list[Literal["tensorboard", "wandb"]] = field(default_factory=lambda: ["tensorboard"])
    """where figures go besides metrics.jsonl and report.html"""

    def __post_init__(self) -> None:
        if not 0 < self.epochs < math.inf:
            raise InputError(f"epochs is {self.epochs}: give a finite number above 0")
        if self.seed < 0:
            raise InputError(f"seed is {self.seed}: give a whole number of at least 0")
        for name in (
            "steps",
            "global_batch",
            "batch_size",
            "accumulate",
            "log_every",
            "checkpoint_every",
            "keep_checkpoints",
            "figure_every",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}: give a whole number of at least 1")
        if self.global_batch is not None and self.accumulate != 1:
            raise InputError("accumulate follows from global_batch and batch_size: leave it out, or global_batch")
        for name in ("checkpoint", "validation_shards"):
            if self.objective == "pretrain" and getattr(self.finetune, name):
                raise InputError(f"finetune.{name} does nothing with objective=pretrain: leave it out")
        if self.model.init and self.objective != "pretrain":
            raise InputError(
                f"model.init is for pre-training: with objective={self.objective}, give finetune.checkpoint="
            )
        if self.objective != "pretrain" and self.data.validation_shards:
            raise InputError("data.validation_shards is for pre-training: give finetune.validation_shards instead")
        if self.model.activation_checkpointing and self.objective != "pretrain":
            raise InputError("model.activation_checkpointing is for pre-training: leave it out of fine-tuning")
        if self.deterministic:
            self._check_deterministic()
        self._check_masking()
        if not self.data.shards:
            raise InputError("data.shards is empty: say where the shards are, data.shards=FOLDER")

    def _check_deterministic(self) -> None:
        if self.attention not in ("auto", *DETERMINISTIC):
            raise InputError(
                f"attention={self.attention} does not add up in the same order every time: with deterministic=true,"
                f" choose {', '.join(DETERMINISTIC)} or auto"
            )
        if self.data.decoder not in ("auto", "pyav"):
            raise InputError(
                f"data.decoder={self.data.decoder} leaves to PyAV what it happens to fail at: with deterministic=true,"
                " set data.decoder=pyav"
            )
        self.data = dataclasses.replace(self.data, decoder="pyav")

    def _check_masking(self) -> None:
        """What a model is given and its way of masking has no use for."""
        model = self.model
        if model.decoder_share < 1 and model.decoder_choice == "probability" and not model.is_sampled:
            raise InputError(
                f"model.decoder_choice=probability needs probabilities, which {model.masking} masking has not: choose"
                " random or running-cell"
            )
        uses = {
            "sampling_sharpness": model.is_sampled,
            "sharpness_ramp": model.sampling_sharpness != 1,
            "sampling_objective": model.masking == "adaptive",
            "motion_prior": model.masking == "adaptive",
            "decoder_choice": model.decoder_share < 1,
        }
        for name, used in uses.items():
            if getattr(model, name) != getattr(ModelConfig, name) and not used:
                needs = {"sharpness_ramp": "model.sampling_sharpness=1", "decoder_choice": "model.decoder_share=1"}
                raise InputError(
                    f"model.{name} does nothing with {needs.get(name, f'model.masking={model.masking}')}: leave it out"
                )

    def clips_per_step(self, world_size: int) -> int:
        """Clips per optimizer step, over all processes."""
        return self.global_batch or self.batch_size * self.accumulate * world_size


# Keys that change how a run is executed but not what it computes: they may differ when it is started again. How a
# step's clips are split (batch_size, accumulate, processes) changes which random numbers meet them in dropout and
# mixup. That a step has as many clips as before, and that shards, which may have moved, are the same ones, is seen from
# the checkpoint (training/checkpoint.py); there, too, that a deterministic run is executed as before.
FREE_KEYS = {
    "run", "data.shards", "resume", "device", "global_batch", "batch_size", "accumulate", "distributed.timeout_s",
    "compile", "attention", "model.activation_checkpointing",
    "profile", "log_every", "checkpoint_every", "keep_checkpoints", "figure_every",
    "metrics", "data.validation_shards",
    "data.decoder", "data.num_threads", "data.dali_threads", "data.prefetch", "data.prefetch_mib",
    "data.cache_dir", "data.cache_gib", "data.max_bad_fraction", "data.download_timeout_s", "data.decode_timeout_s",
}  # fmt: skip


@cache
def _parser() -> "ArgumentParser":
    # Only here: what is told its configuration in Python does not need it.
    from jsonargparse import get_loader, set_loader

    from common.config_parser import add_settings, config_parser

    # jsonargparse reads YAML itself, also of files that a configuration names: its way leads through the same door.
    set_loader("yaml", partial(parse_yaml, reader=get_loader("yaml")), (yaml.YAMLError,))
    parser = config_parser(
        "train.py",
        "train.py [--config FILE ...] [section.key=value ...]",
        "Pre-train or fine-tune AdaMAE on shards. Keys may be written without the dashes: model.size=tiny",
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the keys below; later ones count")
    add_settings(parser, TrainConfig)
    return parser


def parse(arguments: list[str]) -> TrainConfig:
    """Read `--config FILE` and `section.key=value` overrides; raises InputError on unknown keys and wrong types."""
    from common.config_parser import as_options, keys_in, keys_of, require_known

    parser, options = _parser(), as_options(arguments)
    require_known(parser, keys_of(options))
    try:
        for file in _config_files(options):
            # jsonargparse would read it whole, whatever its size, and not name it
            require_known(parser, keys_in(read_yaml(file)), f"{file}: ")
        parsed = parser.instantiate_classes(parser.parse_args(options))
    except InputError:
        raise
    except Exception as error:  # jsonargparse raises its own, argparse's, YAML's and the types' errors
        raise InputError(_sentence(error)) from error
    values = {f.name: parsed[f.name] for f in dataclasses.fields(TrainConfig)}
    return TrainConfig(**values)


def _config_files(options: list[str]) -> list[Path]:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config", type=Path, action="append", default=[])
    files = parser.parse_known_args(options)[0].config
    return [file for file in files if file.is_file()]  # of others, jsonargparse says what is wrong


def _sentence(error: Exception) -> str:
    for cause in (error, error.__cause__, error.__context__):
        if isinstance(cause, InputError):
            return str(cause)
    return " ".join(str(error).split()) + "; `python train.py --help` lists every key"


def to_yaml(config: TrainConfig) -> str:
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def differences(config: TrainConfig, earlier: dict[str, Any]) -> list[str]:
    """The keys, other than FREE_KEYS, in which `config` differs from an earlier run's: `key: earlier -> now`.

    A key that did not exist when the earlier run was made had, in effect, its default.
    """
    defaults = _flat(dataclasses.asdict(TrainConfig(data=DataConfig(shards=config.data.shards))))
    before, now = defaults | _flat(earlier), _flat(dataclasses.asdict(config))
    return [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if key not in FREE_KEYS and before.get(key) != now.get(key)
    ]


def changed_keys(config: "TrainConfig | dict[str, Any]") -> dict[str, Any]:
    """What a run was given that is not a default, by dotted key."""
    values = _flat(config if isinstance(config, dict) else dataclasses.asdict(config))
    defaults = _flat(dataclasses.asdict(TrainConfig(data=DataConfig(shards="-"))))
    return {key: value for key, value in values.items() if value != defaults.get(key)}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat
