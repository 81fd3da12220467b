"""Evaluate classifiers on videos that they are not trained on; the same results at any number of ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from adamae.common.devices import autocast_to
from adamae.common.errors import InputError
from adamae.common.progress import progress_bar
from adamae.pipeline.loader import Batch, ClipLoader
from adamae.pipeline.planning.plan import EvaluationPlan
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.config import TrainConfig
from adamae.training.distributed import Distributed, sum_over_ranks


class Predictions(NamedTuple):
    """Of all V videos, on the CPU, in the order of ShardDataset.samples."""

    probabilities: Float[Tensor, "V classes"]
    labels: (
        Int[Tensor, " V"] | UInt8[Tensor, "V classes"]
    )  # ones mark the classes of a video that may have several

    @property
    def is_multi_label(self) -> bool:
        return self.labels.dim() == 2

    def average_precisions(self) -> list[float | None]:
        """Compute that of each class of a multi-label classifier; None where no video is of it."""
        columns = zip(self.probabilities.T.numpy(), self.labels.T.numpy(), strict=True)
        return [
            average_precision(scores, is_true) if is_true.any() else None
            for scores, is_true in columns
        ]

    def scores(self) -> dict[str, float]:
        """Compute top-1 accuracy, of more than five classes top-5 too, that of the most common class, and the mean
        negative log-likelihood of the true class; of a multi-label classifier, the mean of average precision over
        classes, and binary cross-entropy."""
        if self.is_multi_label:
            precisions = [value for value in self.average_precisions() if value is not None]
            loss = F.binary_cross_entropy(self.probabilities, self.labels.float())
            chance = [
                count / len(self.labels) for count in self.labels.sum(dim=0).tolist() if count
            ]
            return {
                "mAP": sum(precisions) / max(1, len(precisions)),
                "chance_mAP": sum(chance) / max(1, len(chance)),
                "bce": loss.item(),
                "num_videos": len(self.labels),
            }
        num_classes = self.probabilities.shape[1]
        ranked = self.probabilities.topk(min(5, num_classes)).indices == self.labels[:, None]
        top5 = {"top5": ranked.any(dim=1).double().mean().item()} if num_classes > 5 else {}
        return {
            "top1": ranked[:, 0].double().mean().item(),
            **top5,
            "majority_top1": majority_top1(self.labels),
            "nll": F.nll_loss(self.probabilities.clamp_min(1e-12).log(), self.labels).item(),
            "num_videos": len(self.labels),
        }


@dataclass(frozen=True)
class Evaluator:
    """Computes with all clips of a dataset, of the shape config.model, the same results at any number of ranks."""

    config: TrainConfig
    dataset: ShardDataset
    dist: Distributed

    def make_plan(self, batch_size: int, num_clips: int = 1, num_crops: int = 1) -> EvaluationPlan:
        model = self.config.model
        return EvaluationPlan(
            self.dataset,
            self.config.data,
            num_frames=model.num_frames,
            image_size=model.image_size,
            batch_size=batch_size,
            num_temporal=num_clips,
            num_spatial=num_crops,
            rank=self.dist.rank,
            world_size=self.dist.world_size,
        )

    @torch.no_grad()
    def compute(
        self,
        model: nn.Module,
        plan: EvaluationPlan,
        function: Callable[[Batch], Float[Tensor, "B width"]],
        width: int,
    ) -> Float[Tensor, "clips width"]:
        """Call `function`, which uses `model`, with all batches of a plan; return its results, in order, on the CPU.

        Every clip is computed by one rank, in a batch that is the same at any number of ranks, so the results are
        bitwise equal. Raises InputError at a video that does not decode: none is skipped or replaced.
        """
        dist = self.dist
        results = torch.zeros(len(plan), width, device=dist.device)
        was_training = model.training
        model.eval()
        bar = progress_bar(
            unit="clip",
            desc="evaluate",
            total=len(plan),
            leave=False,
            delay=2,
            disable=not dist.is_main,
        )
        try:
            with bar, ClipLoader(self.dataset, plan, dist.device, self.config.data, None) as loader:
                for batch in loader.batches(first=0):
                    with autocast_to(dist.device, self.config.precision):
                        results[batch.positions[0] : batch.positions[-1] + 1] = function(batch)
                    bar.update(len(batch.positions) * dist.world_size)
        finally:
            model.train(was_training)
        return sum_over_ranks(results).cpu()

    def predict(
        self, model: nn.Module, multi_label: bool, num_clips: int = 1, num_crops: int = 1
    ) -> Predictions:
        """Average the softmax, of a multi-label classifier the sigmoid, over the views of every video: clips along
        time, and crops along the longer side."""
        batch_size = (
            max(1, self.config.batch_size // num_crops) * num_crops
        )  # crops of a clip share its decode
        plan = self.make_plan(batch_size, num_clips, num_crops)

        def classify(batch: Batch) -> Float[Tensor, "B classes"]:
            logits = model(batch.clip).float()
            return logits.sigmoid() if multi_label else logits.softmax(dim=-1)

        probabilities = self.compute(model, plan, classify, len(self.dataset.info.classes))
        if not probabilities.isfinite().all():
            raise InputError(
                "the classifier's outputs are not finite: its training has diverged, or its weights are damaged"
            )
        mean = probabilities.unflatten(0, (-1, num_clips * num_crops)).mean(dim=1)
        if multi_label:
            labels = self.dataset.mark_classes(
                sample.labels or () for sample in self.dataset.samples
            )
            return Predictions(mean, torch.from_numpy(labels))
        return Predictions(mean, read_labels(self.dataset))


def read_labels(
    dataset: ShardDataset, samples: Sequence[int] | slice = slice(None)
) -> Int[Tensor, " samples"]:
    return torch.from_numpy(dataset.column("label")[samples].astype(np.int64))


def average_precision(scores: Float[np.ndarray, " V"], is_true: Bool[np.ndarray, " V"]) -> float:
    """Compute the mean, over the true ones, of the precision among all that score as high, as scikit-learn does."""
    order = np.argsort(-scores, kind="stable")
    descending = scores[order]
    num_true = np.cumsum(is_true[order], dtype=np.int64)
    # The last of those that score the same.
    last = np.flatnonzero(np.append(descending[1:] != descending[:-1], True))
    num_new = np.diff(num_true[last], prepend=0)
    precisions = num_new * num_true[last] / (last + 1)
    return float(precisions.sum() / num_true[-1])


def check_labels(dataset: ShardDataset) -> None:
    """Raise InputError if a video has no label; one of several may have none of the classes."""
    if not dataset.info.classes or dataset.info.num_unlabeled:
        raise InputError(
            f"{dataset.folder} has {'videos without a label' if dataset.info.classes else 'no labels'}: create the"
            " shards from class folders or with annotations (shard_tools/make_shards.py)"
        )


def check_classes(wanted: Sequence[str], multi_label: bool, dataset: ShardDataset) -> None:
    """Raise InputError if a classifier of the classes `wanted` cannot be evaluated on `dataset`."""
    check_labels(dataset)
    if dataset.info.multi_label and not multi_label:
        raise InputError(
            f"videos of {dataset.folder} have several labels or none, and the classifier was trained to choose one:"
            " train one on shards with several labels"
        )
    given = dataset.info.classes
    if len(wanted) != len(given):
        raise InputError(
            f"the classifier has {len(wanted)} classes and {dataset.folder} has {len(given)}"
        )
    for class_id, (known, labeled) in enumerate(zip(wanted, given, strict=True)):
        if known != labeled:
            raise InputError(
                f"class {class_id} is {known!r} for the classifier and {labeled!r} in {dataset.folder}:"
                " create the shards with the same classes"
            )


def majority_top1(labels: Int[Tensor, " V"]) -> float:
    """Compute the accuracy of always predicting the most common class."""
    return labels.bincount().max().item() / len(labels)
