"""Classification: fine-tuning of the whole encoder, or a probe on a frozen one."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from adamae.common.errors import InputError
from adamae.model.classifier import Probe, VideoClassifier
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
    """Cross-entropy over the dataset's classes, or, where videos have several, binary cross-entropy of each."""

    def __init__(self, config: TrainConfig, dataset: ShardDataset, dist: Distributed) -> None:
        check_labels(dataset)
        self.config, self.classes, self.dist = config, dataset.info.classes, dist
        self.multi_label = dataset.info.multi_label
        labels = dataset.column("label")
        if not self.multi_label and (labels == labels[0]).all():
            raise InputError(
                f"all videos of {dataset.folder} are of the class {self.classes[labels[0]]!r}: a classifier needs two"
                " classes at least; create shards with all of them (shard_tools/make_shards.py)"
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
                    f"batch_size is {config.batch_size}, and mixup and cutmix mix clips in pairs: set an even number,"
                    " or finetune.mixup=0 finetune.cutmix=0"
                )
        if config.task == "finetune":
            model: VideoClassifier | Probe = VideoClassifier(
                config.model, len(self.classes), config.finetune.drop_path
            )
        else:
            model = Probe(
                config.model,
                len(self.classes),
                "linear" if config.task == "linear_probe" else "attentive",
            )
        self.model: VideoClassifier | Probe = model.to(dist.device)
        self.average: AveragedModel | None = None
        if config.finetune.ema_decay is not None:
            function = get_ema_multi_avg_fn(config.finetune.ema_decay)
            self.average = AveragedModel(self.model, multi_avg_fn=function, use_buffers=True)
            self.average.n_averaged.fill_(1)  # the first update averages, also after a resume
        self.metadata = pretrained.make_metadata(
            config.model, classes=self.classes, multi_label=self.multi_label
        )

    @property
    def modules(self) -> dict[str, nn.Module]:
        return (
            {"model": self.model}
            if self.average is None
            else {"model": self.model, "average": self.average.module}
        )

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Of a fine-tuned encoder, each block's learning rate is layer_decay times the next one's (BEiT)."""
        depth, decay = self.config.model.dimensions.encoder_depth, self.config.finetune.layer_decay

        def scale_lr(name: str) -> float:
            if name.startswith("tokenizer."):
                return decay ** (depth + 1)
            if name.startswith("encoder.blocks."):
                return decay ** (depth - int(name.split(".")[2]))
            return 1.0

        scale = {"scale_lr": scale_lr} if isinstance(self.model, VideoClassifier) else {}
        return parameter_groups(self.model, self.config.optimizer.weight_decay, **scale)

    def init_weights(self, source: str) -> None:
        if source:
            weights = pretrained.load(local_run(source), like=self.config.model)
            check_encoder(self.config.model, weights.config, source)
            self.model.load_encoder(adapt_weights(weights.state, weights.config, self.config.model))
        if self.average is not None:
            self.average.module.load_state_dict(self.model.state_dict())

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        clip, target = batch.clip, batch.labels
        if self.is_mixed:
            clip, target = self.mix(clip, target, batch.positions[0])
        logits = model(clip).float()
        smoothing = self.config.finetune.label_smoothing
        if self.multi_label:  # smoothed as Keras does: towards .5
            target = target * (1 - smoothing) + smoothing / 2
            loss = F.binary_cross_entropy_with_logits(logits, target)
            return loss, {"loss": loss}
        loss = F.cross_entropy(logits, target, label_smoothing=smoothing)
        dominant = target if target.dim() == 1 else target.argmax(dim=1)
        return loss, {"loss": loss, "accuracy": (logits.argmax(dim=1) == dominant).float().mean()}

    def mix(
        self, clip: UInt8[Tensor, "B T H W C"], labels: Tensor, position: int
    ) -> tuple[UInt8[Tensor, "B T H W C"], Float[Tensor, "B classes"]]:
        """Mix each clip with its counterpart from the end of the batch, by mixup (arXiv 1710.09412) or CutMix (arXiv
        1905.04899), one of them per batch; random numbers depend on (seed, position) alone, as resuming needs."""
        mixup, cutmix = self.config.finetune.mixup, self.config.finetune.cutmix
        random = np.random.default_rng((self.config.seed, position))
        cuts = bool(cutmix) and (not mixup or random.random() < 0.5)
        weight = random.beta(cutmix, cutmix) if cuts else random.beta(mixup, mixup)
        other = clip.flip(0)
        if cuts:
            height, width = int(clip.shape[2]), int(clip.shape[3])
            half = math.sqrt(1 - weight) / 2
            y, x = int(random.integers(height)), int(random.integers(width))
            top, bottom = max(0, y - int(half * height)), min(height, y + int(half * height))
            left, right = max(0, x - int(half * width)), min(width, x + int(half * width))
            mixed = clip.clone()
            mixed[:, :, top:bottom, left:right] = other[
                :, :, top:bottom, left:right
            ]  # the same box in every frame
            weight = 1 - (bottom - top) * (right - left) / (height * width)
        else:
            mixed = (clip * weight).add_(other, alpha=1 - weight).round_().to(torch.uint8)
        target = labels if self.multi_label else F.one_hot(labels, len(self.classes))
        return mixed, target * weight + target.flip(0) * (1 - weight)

    @torch.no_grad()
    def after_update(self) -> None:
        for layer in self.model.modules():
            if isinstance(
                layer, nn.BatchNorm1d
            ):  # of a probe: each rank has updated it with its own clips
                mean_over_ranks(layer.get_buffer("running_mean"))
                mean_over_ranks(layer.get_buffer("running_var"))
        if self.average is not None:
            self.average.update_parameters(self.model)

    def evaluate(self, step: int, log: Logger) -> None:
        """Log accuracy or mAP on the validation videos, one clip each; write checkpoints/best/model.safetensors, which
        has all that evaluate.py needs, if no better one is there."""
        if self.held_out is None:
            return
        model: Any = self.model if self.average is None else self.average.module
        config = self.config
        evaluator = Evaluator(
            replace(config, data=replace(config.data, subset=None)),
            self.held_out.dataset,
            self.dist,
        )
        found = evaluator.predict(model, self.multi_label).scores()
        best, score = (
            log.run.checkpoints / "best/model.safetensors",
            "mAP" if self.multi_label else "top1",
        )
        if self.dist.is_main and not (
            best.exists() and pretrained.read_score(best, score) >= found[score]
        ):
            scores = json.dumps({"step": step, **found})
            pretrained.save(best, model.state_dict(), self.metadata | {"scores": scores})
        if config.task == "finetune":
            found = self.held_out.evaluate(model, self.dist) | found
        elif not self.multi_label:  # the encoder of a probe is frozen: its features do not change
            self.baselines = self.baselines or self.held_out.evaluate(None, self.dist)
            found = self.baselines | found
        log.write_evaluation(step, found)
