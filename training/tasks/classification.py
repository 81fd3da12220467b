"""The second objective: classes, by fine-tuning the whole encoder or by a probe on a frozen one."""

import json

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from timm.data import Mixup
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from common.errors import InputError
from model.classifier import VideoClassifier
from model.probe import Probe
from model.weights import pretrained
from model.weights.warm_start import adapt_weights, check_encoder
from pipeline.loader import Batch
from pipeline.shards.dataset import ShardDataset
from training.checkpoint import existing
from training.config import TrainConfig
from training.distributed import Distributed, mean_over_processes
from training.evaluation import Views, check_classes, check_labels, predict, scores
from training.held_out import HeldOut
from training.logger import Logger
from training.optimizer import make_optimizer
from training.remote_run import local_run
from training.run_dir import local_path
from training.tasks.pretraining import StepResult

BEST = "best"  # folder beside the numbered checkpoints


class Classification:
    """Cross-entropy over the dataset's classes (SPEC §7)."""

    def __init__(self, config: TrainConfig, dataset: ShardDataset, process: Distributed) -> None:
        """Raises InputError if labels are missing or the classes, sizes or weights do not fit each other."""
        settings = config.finetune
        check_labels(dataset)
        self.config, self.classes, self.process = config, dataset.info.classes, process
        validation, cache = config.evaluation.shards, config.data
        self.validation = ShardDataset.open(validation, cache) if validation else None
        if self.validation is not None:
            check_classes(self.classes, self.validation)
        # The encoder of a probe is frozen: its features are as good as they were.
        changes = validation and config.task == "finetune"
        self.held_out = HeldOut(config) if changes else None
        self.model = starting_model(config, len(self.classes)).to(process.device)
        self.average = ModelEmaV3(self.model, settings.ema_decay) if settings.ema_decay is not None else None
        self.statistics = [buffer for layer in statistics_of(self.model) for buffer in layer.buffers()]
        self.before_step: list[Tensor] | None = None
        self.mixup = None
        if settings.mixup or settings.cutmix:
            if config.batch_size % 2:
                raise InputError(
                    f"batch_size is {config.batch_size}, and mixup and cutmix mix clips in pairs: give an even number,"
                    " or finetune.mixup=0 finetune.cutmix=0"
                )
            self.mixup = Mixup(settings.mixup, settings.cutmix, label_smoothing=0, num_classes=len(self.classes))

    @property
    def together(self) -> int:
        return 2 if self.mixup else 1

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {"model": self.model} if self.average is None else {"model": self.model, "average": self.average.module}

    @property
    def about(self) -> dict[str, str]:
        return pretrained.make_metadata(self.config.model, self.classes)

    def optimizer(self) -> torch.optim.Optimizer:
        layer_decay = self.config.finetune.layer_decay if isinstance(self.model, VideoClassifier) else 1.0
        return make_optimizer(self.model, self.config.optimizer, layer_decay)

    def __call__(self, model: nn.Module, batch: Batch) -> StepResult:
        if self.before_step is None:
            self.before_step = [buffer.clone() for buffer in self.statistics]
        clip, target = self._mixed(batch.clip, batch.labels, batch.positions[0])
        logits = model(clip).float()
        loss = F.cross_entropy(logits, target, label_smoothing=self.config.finetune.label_smoothing)
        main = target if target.dim() == 1 else target.argmax(dim=1)
        return StepResult(loss, {"loss": loss, "accuracy": (logits.argmax(dim=1) == main).float().mean()})

    def _mixed(
        self, clip: UInt8[Tensor, "B T H W C"], labels: Int[Tensor, " B"], position: int
    ) -> tuple[UInt8[Tensor, "B T H W C"], Int[Tensor, " B"] | Float[Tensor, "B classes"]]:
        if self.mixup is None:
            return clip, labels
        # timm draws from NumPy's global generator; what it draws must not depend on what was drawn before a resume.
        np.random.seed(np.random.SeedSequence((self.config.seed, position)).generate_state(1))
        # timm cuts the last two dimensions, and makes the same box in all that come before.
        pixels, target = self.mixup(clip.movedim(4, 1).float().flatten(1, 2), labels)
        mixed = pixels.round().to(torch.uint8).unflatten(1, (clip.shape[4], clip.shape[1]))
        return mixed.movedim(1, 4).contiguous(), target

    def after_update(self) -> None:
        self.before_step = None
        share_statistics(self.model)
        if self.average is not None:
            self.average.update(self.model)

    def after_none(self) -> None:
        for buffer, before in zip(self.statistics, self.before_step or self.statistics, strict=True):
            buffer.copy_(before)
        self.before_step = None

    def review_due(self, step: int, is_last: bool) -> bool:
        every = self.config.evaluation.every
        return self.validation is not None and every is not None and (step % every == 0 or is_last)

    def review(self, step: int, metrics: Logger) -> None:
        """Accuracy on the validation videos, one clip each; the best weights so far are kept."""
        assert self.validation is not None
        model = self.model if self.average is None else self.average.module
        views = Views(batch_size=self.config.batch_size)
        found = predict(
            model, self.validation, self.config.data, self.config.model, views, self.process, self.config.precision
        )
        figures = scores(found)
        if self.process.is_main:
            self._keep_if_best(model, step, figures)
        if self.held_out is not None:
            figures |= self.held_out.evaluate(model, self.process)
        metrics.scalars(step, {f"evaluation/{name}": value for name, value in figures.items()})

    def _keep_if_best(self, model: nn.Module, step: int, figures: dict[str, float]) -> None:
        """One file, which says all that an evaluation needs to know."""
        file = local_path(self.config.run) / "checkpoints" / BEST / "model.safetensors"
        if file.exists() and pretrained.top1_of(file) >= figures["top1"]:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        pretrained.save(
            file, model.state_dict(), self.about | {pretrained.SCORES_KEY: json.dumps({"step": step, **figures})}
        )


def share_statistics(model: nn.Module) -> None:
    """Give all processes the mean of a probe's running statistics: each has put clips of its own into them."""
    for layer in statistics_of(model):
        assert layer.running_mean is not None
        assert layer.running_var is not None
        mean_over_processes(layer.running_mean)
        mean_over_processes(layer.running_var)


def statistics_of(model: nn.Module) -> list[nn.BatchNorm1d]:
    """Layers of a probe that keep a running mean and variance of what they have seen."""
    return [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm1d) and layer.track_running_stats]


def starting_model(config: TrainConfig, num_classes: int) -> VideoClassifier | Probe:
    """A new classifier or probe on the encoder of finetune.checkpoint, or from scratch."""
    settings = config.finetune
    model: VideoClassifier | Probe
    if config.task == "finetune":
        model = VideoClassifier(config.model, num_classes, settings.drop_path)
    else:
        model = Probe(config.model, num_classes, "linear" if config.task == "linear_probe" else "attentive")
    if settings.checkpoint and not config.branch and not existing(local_path(config.run) / "checkpoints"):
        state_dict, theirs, _ = pretrained.load(local_run(settings.checkpoint), like=config.model)
        check_encoder(config.model, theirs, settings.checkpoint)
        model.load_encoder(adapt_weights(state_dict, theirs, config.model))
    return model
