"""Evaluate classifiers on held-out videos, with the same results at any number of ranks."""

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
from adamae.pipeline.shards.format import UNLABELED
from adamae.training.config import TrainConfig
from adamae.training.distributed import Distributed, sum_over_ranks
from adamae.training.measures import find_majority, identify_videos
from adamae.training.uncertainty import estimate_accuracy


class Predictions(NamedTuple):
    """Predictions for all V videos, on the CPU, in the order of ShardDataset.samples."""

    probabilities: Float[Tensor, "V classes"]
    # Class numbers; of a multi-label dataset, a one for each class of a video.
    labels: Int[Tensor, " V"] | UInt8[Tensor, "V classes"]
    # A number per video, the same for videos that are not independent.
    groups: Int[Tensor, " V"]

    @property
    def is_multi_label(self) -> bool:
        """Return whether a video may have several classes."""
        return self.labels.dim() == 2

    def average_precisions(self) -> list[float | None]:
        """Return the average precision of each class of a multi-label classifier.

        It is None for a class that no video has.
        """
        precisions: list[float | None] = []
        for scores, is_true in zip(
            self.probabilities.T.numpy(), self.labels.T.numpy(), strict=True
        ):
            precisions.append(average_precision(scores, is_true) if is_true.any() else None)
        return precisions

    def scores(self) -> dict[str, float]:
        """Return the metrics of the classifier.

        One label per video: top1, top5 (of more than five classes), their standard errors
        (top1_error, top5_error), majority_top1 (the accuracy of the most common class of these
        videos, for want of training videos), and nll, the mean negative log-likelihood of the true
        class.
        Several: mAP, the mean of average precision over classes, chance_mAP, and bce, the binary
        cross-entropy.
        """
        if self.is_multi_label:
            return self._score_multi_label()
        num_classes = self.probabilities.shape[1]
        is_hit = self.probabilities.topk(min(5, num_classes)).indices == self.labels[:, None]
        top = {"top1": is_hit[:, 0]}
        if num_classes > 5:
            top["top5"] = is_hit.any(dim=1)
        scores: dict[str, float] = {}
        for name, is_right in top.items():
            estimate = estimate_accuracy(is_right.numpy(), self.groups.numpy())
            scores[name] = estimate.value
            scores[f"{name}_error"] = estimate.error
        scores["majority_top1"] = majority_top1(self.labels, self.labels)
        log_probabilities = self.probabilities.clamp_min(1e-12).log()
        scores["nll"] = F.nll_loss(log_probabilities, self.labels).item()
        scores["num_videos"] = len(self.labels)
        return scores

    def _score_multi_label(self) -> dict[str, float]:
        precisions = [value for value in self.average_precisions() if value is not None]
        # A classifier that guesses has the frequency of a class as its average precision.
        frequencies = [
            count / len(self.labels) for count in self.labels.sum(dim=0).tolist() if count
        ]
        return {
            "mAP": sum(precisions) / max(1, len(precisions)),
            "chance_mAP": sum(frequencies) / max(1, len(frequencies)),
            "bce": F.binary_cross_entropy(self.probabilities, self.labels.float()).item(),
            "num_videos": len(self.labels),
        }


@dataclass(frozen=True)
class Evaluator:
    """Computes with all clips of a dataset."""

    config: TrainConfig
    dataset: ShardDataset
    dist: Distributed
    # The shape of the clips; by default, config.model says it.
    num_frames: int | None = None
    image_size: tuple[int, int] | None = None

    def make_plan(
        self, batch_size: int, num_clips: int = 1, num_crops: int = 1, leaves_out: bool = False
    ) -> EvaluationPlan:
        """Plan `num_clips` clips along the time of each video, and `num_crops` crops of each.

        leaves_out: whether `compute` leaves out videos that do not decode, instead of raising
        InputError.
        """
        model = self.config.model
        return EvaluationPlan(
            self.dataset,
            self.config.data,
            num_frames=self.num_frames or model.num_frames,
            image_size=self.image_size or model.image_size,
            batch_size=batch_size,
            num_temporal=num_clips,
            num_spatial=num_crops,
            rank=self.dist.rank,
            world_size=self.dist.world_size,
            replaces=leaves_out,
        )

    @torch.no_grad()
    def compute(
        self,
        model: nn.Module,
        plan: EvaluationPlan,
        function: Callable[[Batch], Float[Tensor, "B width"]],
        width: int,
    ) -> Float[Tensor, "clips width"]:
        """Call `function`, which uses `model`, with all batches of a plan.

        Return its results for all clips, in order, on the CPU. Every clip is computed by one rank,
        in a batch that is the same at any number of ranks, so the results are bitwise equal.
        Raise InputError at a video that does not decode, unless the plan leaves it out: its results
        are NaN then.
        """
        dist = self.dist
        # Each rank fills the rows of its clips; the others are zero, so that a sum collects all.
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
                    first = batch.positions[0]
                    last = batch.positions[-1]
                    with autocast_to(dist.device, self.config.precision):
                        results[first : last + 1] = function(batch)
                    for position, key in zip(batch.positions, batch.keys, strict=True):
                        if key != self.dataset.samples[plan.row(position).sample].key:
                            # Another video stands in for one that does not decode.
                            results[position] = torch.nan
                    bar.update(len(batch.positions) * dist.world_size)
        finally:
            model.train(was_training)
        return sum_over_ranks(results).cpu()

    def predict(
        self, model: nn.Module, multi_label: bool, num_clips: int = 1, num_crops: int = 1
    ) -> Predictions:
        """Predict the classes of every video by the mean over its views.

        Views are `num_clips` clips along time, with `num_crops` crops along the longer side of
        each. Probabilities are softmax, or, of a multi-label classifier, sigmoid.
        """
        # Crops of a clip share its decode if they are in one batch.
        clips_per_batch = max(1, self.config.batch_size // num_crops)
        plan = self.make_plan(clips_per_batch * num_crops, num_clips, num_crops)

        def classify(batch: Batch) -> Float[Tensor, "B classes"]:
            logits = model(batch.clip).float()
            return logits.sigmoid() if multi_label else logits.softmax(dim=-1)

        probabilities = self.compute(model, plan, classify, len(self.dataset.info.classes))
        if not probabilities.isfinite().all():
            raise InputError(
                "the classifier's outputs are not finite: its training has diverged, or its"
                " weights are damaged"
            )
        mean = probabilities.unflatten(0, (-1, num_clips * num_crops)).mean(dim=1)
        (identities,) = identify_videos([self.dataset.samples], self.config.evaluation.group)
        groups = identities[:, 2]
        if multi_label:
            labels = self.dataset.mark_classes(
                sample.labels or () for sample in self.dataset.samples
            )
            return Predictions(mean, torch.from_numpy(labels), groups)
        return Predictions(mean, read_labels(self.dataset), groups)


def read_labels(
    dataset: ShardDataset, samples: Sequence[int] | None = None
) -> Int[Tensor, " samples"]:
    """Return the class numbers of samples, by default of all; -1 without one label."""
    if samples is None:
        return torch.from_numpy(dataset.column("label").astype(np.int64))
    # Of a large dataset, few samples are looked at.
    labels = [dataset.samples[sample].label for sample in samples]
    return torch.tensor([UNLABELED if label is None else label for label in labels])


def average_precision(scores: Float[np.ndarray, " V"], is_true: Bool[np.ndarray, " V"]) -> float:
    """Compute average precision as scikit-learn does: the mean over true videos of a precision.

    That is the fraction of true videos among all that score at least as high. With scores
    0.9 (true), 0.5 (false), 0.5 (true), 0.1 (false), it is 1/1 for the first true one and 2/3 for
    the second, which is in a tie of two: the mean is 0.83.
    """
    order = np.argsort(-scores, kind="stable")
    descending = scores[order]
    # Equal scores make a tie, which ends where the next score is lower.
    is_end = np.append(descending[1:] != descending[:-1], True)
    ends = np.flatnonzero(is_end)
    num_ranked = ends + 1
    num_true = np.cumsum(is_true[order], dtype=np.int64)[ends]
    # All true videos of a tie have the precision at its end.
    num_true_in_tie = np.diff(num_true, prepend=0)
    precision_sums = num_true_in_tie * num_true / num_ranked
    return float(precision_sums.sum() / num_true[-1])


def check_labels(dataset: ShardDataset) -> None:
    """Raise InputError if a video has no label.

    A video of a multi-label dataset may have none of the classes.
    """
    advice = "create the shards from class folders or with annotations (shard_tools/make_shards.py)"
    if not dataset.info.classes:
        raise InputError(f"{dataset.folder} has no labels: {advice}")
    if dataset.info.num_unlabeled:
        raise InputError(f"{dataset.folder} has videos without a label: {advice}")


def check_classes(classes: Sequence[str], multi_label: bool, dataset: ShardDataset) -> None:
    """Raise InputError if a classifier of these classes cannot be evaluated on `dataset`."""
    check_labels(dataset)
    if dataset.info.multi_label and not multi_label:
        raise InputError(
            f"videos of {dataset.folder} have several labels or none, and the classifier was"
            " trained to choose one: train one on shards with several labels"
        )
    dataset_classes = dataset.info.classes
    if len(classes) != len(dataset_classes):
        raise InputError(
            f"the classifier has {len(classes)} classes and {dataset.folder} has"
            f" {len(dataset_classes)}"
        )
    for number, (name, dataset_name) in enumerate(zip(classes, dataset_classes, strict=True)):
        if name != dataset_name:
            raise InputError(
                f"class {number} is {name!r} for the classifier and {dataset_name!r} in"
                f" {dataset.folder}: create the shards with the same classes"
            )


def majority_top1(labels: Int[Tensor, " V"], training_labels: Int[Tensor, " W"]) -> float:
    """Compute the accuracy of always predicting the most common class of the training videos."""
    return (labels == find_majority(training_labels)).double().mean().item()
