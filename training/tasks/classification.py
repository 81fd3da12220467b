"""Classification: fine-tune the whole encoder, or train a probe on a frozen one."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from adamae.common.errors import InputError
from adamae.model.classifier import Probe, VideoClassifier
from adamae.model.encoders.probe import (
    EncoderProbe,
    describe_encoder,
    is_other_encoder,
    make_probe,
)
from adamae.model.weights import pretrained
from adamae.model.weights.warm_start import adapt_weights, check_encoder
from adamae.pipeline.loader import Batch
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.config import TrainConfig
from adamae.training.distributed import Distributed, mean_over_ranks
from adamae.training.evaluation import Evaluator, check_classes, check_labels
from adamae.training.held_out import HeldOut
from adamae.training.logger import Logger
from adamae.training.optimizer import parameter_groups
from adamae.training.remote_run import local_run
from adamae.training.tasks.task import Task


class Classification(Task):
    """A classifier with cross-entropy over the dataset's classes.

    Where videos may have several, the loss is the binary cross-entropy of each class.
    """

    def __init__(self, config: TrainConfig, dataset: ShardDataset, dist: Distributed) -> None:
        self.config = config
        self.dist = dist
        check_labels(dataset)
        self.classes = dataset.info.classes
        self.multi_label = dataset.info.multi_label
        labels = dataset.column("label")
        if not self.multi_label and (labels == labels[0]).all():
            raise InputError(
                f"all videos of {dataset.folder} are of the class {self.classes[labels[0]]!r}: a"
                " classifier needs two classes at least; create shards with all of them"
                " (shard_tools/make_shards.py)"
            )
        self.held_out = HeldOut(config, dataset) if config.evaluation.shards else None
        self.baselines: dict[str, float] = {}
        if self.held_out is not None:
            check_classes(self.classes, self.multi_label, self.held_out.dataset)
        self.is_mixed = bool(config.finetune.mixup or config.finetune.cutmix)
        if self.is_mixed:
            self.clip_multiple = 2
            if config.batch_size % 2:
                raise InputError(
                    f"batch_size is {config.batch_size}, and mixup and cutmix mix clips in pairs:"
                    " set an even number, or finetune.mixup=0 finetune.cutmix=0"
                )
        self.model: VideoClassifier | Probe | EncoderProbe = self._make_model().to(dist.device)
        self.average: AveragedModel | None = None
        if config.finetune.ema_decay is not None:
            average_weights = get_ema_multi_avg_fn(config.finetune.ema_decay)
            self.average = AveragedModel(self.model, multi_avg_fn=average_weights, use_buffers=True)
            # At 0, the first update would copy the weights instead of averaging, also of a resumed
            # run, whose checkpoint has the average but not this counter.
            self.average.n_averaged.fill_(1)
        encoder: dict[str, str] = {}
        if isinstance(self.model, EncoderProbe):
            encoder = describe_encoder(config.init_from)
            self.target_digest = encoder["sha256"]
        self.metadata = pretrained.make_metadata(
            config.model, classes=self.classes, multi_label=self.multi_label, encoder=encoder
        )

    def _make_model(self) -> VideoClassifier | Probe | EncoderProbe:
        num_classes = len(self.classes)
        if self.config.task == "finetune":
            return VideoClassifier(self.config.model, num_classes, self.config.finetune.drop_path)
        kind: Any = self.config.task.removesuffix("_probe")
        source = self.config.init_from
        if is_other_encoder(source):
            return make_probe(source, self.config.model, num_classes, kind, self.config.precision)
        return Probe(self.config.model, num_classes, kind)

    @property
    def modules(self) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = {"model": self.model}
        if self.average is not None:
            modules["average"] = self.average.module
        return modules

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups, with lower learning rates for a fine-tuned encoder.

        Each block's rate is layer_decay times that of the next one, as BEiT has it (Bao et al.
        2021, arXiv 2106.08254). With 12 blocks and 0.75, the last block learns at 0.75 of the
        head's rate, the first at 0.75^12 and the tokenizer at 0.75^13 = 0.024 of it.
        """
        depth = self.config.model.dimensions.encoder_depth
        decay = self.config.finetune.layer_decay

        def scale_lr(name: str) -> float:
            if name.startswith("tokenizer."):
                return decay ** (depth + 1)
            if name.startswith("encoder.blocks."):
                block = int(name.split(".")[2])
                return decay ** (depth - block)
            return 1.0

        is_finetuned = isinstance(self.model, VideoClassifier)
        return parameter_groups(
            self.model, self.config.optimizer.weight_decay, scale_lr if is_finetuned else None
        )

    def init_weights(self, source: str) -> None:
        # The encoder of another architecture has its weights since it was opened.
        if source and not isinstance(self.model, EncoderProbe):
            weights = pretrained.load(local_run(source), like=self.config.model)
            check_encoder(self.config.model, weights.config, source)
            encoder = adapt_weights(weights.state, weights.config, self.config.model)
            self.model.load_encoder(encoder)
        if self.average is not None:
            self.average.module.load_state_dict(self.model.state_dict())

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        clip = batch.clip
        target = batch.labels
        if self.is_mixed:
            clip, target = self.mix(clip, target, batch.positions[0])
        logits = model(clip).float()
        smoothing = self.config.finetune.label_smoothing
        if self.multi_label:
            # Towards 0.5, as Keras smooths labels of binary cross-entropy.
            target = target * (1 - smoothing) + smoothing / 2
            loss = F.binary_cross_entropy_with_logits(logits, target)
            return loss, {"loss": loss}
        loss = F.cross_entropy(logits, target, label_smoothing=smoothing)
        # Of a mixed clip, accuracy is that of the class with the larger weight.
        true_class = target if target.dim() == 1 else target.argmax(dim=1)
        is_right = logits.argmax(dim=1) == true_class
        return loss, {"loss": loss, "accuracy": is_right.float().mean()}

    def mix(
        self, clip: UInt8[Tensor, "B T H W C"], labels: Tensor, position: int
    ) -> tuple[UInt8[Tensor, "B T H W C"], Float[Tensor, "B classes"]]:
        """Mix each clip with its counterpart from the end of the batch: the first with the last, …

        A batch is mixed by mixup (arXiv 1710.09412) or CutMix (arXiv 1905.04899). `position` is
        that of its first clip in the plan: random numbers depend on (seed, position) alone, as a
        resumed run must repeat them.
        """
        mixup = self.config.finetune.mixup
        cutmix = self.config.finetune.cutmix
        random = np.random.default_rng((self.config.seed, position))
        if cutmix and (not mixup or random.random() < 0.5):
            mixed, weight = cut_and_paste(clip, random.beta(cutmix, cutmix), random)
        else:
            weight = random.beta(mixup, mixup)
            mixed = (clip * weight).add_(clip.flip(0), alpha=1 - weight).round_().to(torch.uint8)
        target = labels if self.multi_label else F.one_hot(labels, len(self.classes))
        return mixed, target * weight + target.flip(0) * (1 - weight)

    @torch.no_grad()
    def after_update(self) -> None:
        # A probe's running statistics are averaged, as each rank has updated them with its clips.
        for layer in self.model.modules():
            if isinstance(layer, nn.BatchNorm1d):
                mean_over_ranks(layer.get_buffer("running_mean"))
                mean_over_ranks(layer.get_buffer("running_var"))
        if self.average is not None:
            self.average.update_parameters(self.model)

    def evaluate(self, step: int, log: Logger) -> None:
        """Log accuracy or mAP on all validation videos, one clip each.

        Write checkpoints/best/model.safetensors, which has all that evaluate.py needs, unless a
        better one, or an equal one, is there.
        """
        if self.held_out is None:
            return
        model: Any = self.model if self.average is None else self.average.module
        # A subset is of the videos that are trained on.
        config = replace(self.config, data=replace(self.config.data, subset=None))
        evaluator = Evaluator(config, self.held_out.dataset, self.dist)
        scores = evaluator.predict(model, self.multi_label).scores()
        if self.dist.is_main:
            self._keep_best(log.run.checkpoints / "best/model.safetensors", model, step, scores)
        metrics: dict[str, float] = {}
        if config.task == "finetune":
            metrics = self.held_out.evaluate(model, self.dist)
        elif not self.multi_label:
            # The encoder of a probe is frozen, so only the baselines are of interest, and these do
            # not change from one evaluation to the next.
            self.baselines = self.baselines or self.held_out.evaluate(None, self.dist)
            metrics = self.baselines
        # k-NN and its baselines may have fewer videos than the classifier.
        scores = scores | metrics | {"num_videos": scores["num_videos"]}
        log.write_evaluation(step, scores)

    def _keep_best(self, file: Path, model: nn.Module, step: int, scores: dict[str, float]) -> None:
        score = "mAP" if self.multi_label else "top1"
        if file.exists() and pretrained.read_score(file, score) >= scores[score]:
            return
        described = json.dumps({"step": step, **scores})
        pretrained.save(file, model.state_dict(), self.metadata | {"scores": described})


def cut_and_paste(
    clip: UInt8[Tensor, "B T H W C"], weight: float, random: np.random.Generator
) -> tuple[UInt8[Tensor, "B T H W C"], float]:
    """Paste a box of each clip's counterpart into it, the same box in every frame (CutMix).

    The box is at a random place, and has 1 - weight of the area, or less at the border. Return the
    clips, and the fraction of the area that is each clip's own.
    """
    height = int(clip.shape[2])
    width = int(clip.shape[3])
    half = math.sqrt(1 - weight) / 2
    half_height = int(half * height)
    half_width = int(half * width)
    y = int(random.integers(height))
    x = int(random.integers(width))
    rows = slice(max(0, y - half_height), min(height, y + half_height))
    columns = slice(max(0, x - half_width), min(width, x + half_width))
    mixed = clip.clone()
    mixed[:, :, rows, columns] = clip.flip(0)[:, :, rows, columns]
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return mixed, 1 - area / (height * width)
