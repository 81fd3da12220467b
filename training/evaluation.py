"""Predict the class of every video of a dataset, and score the predictions; the same at any number of ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from common.devices import Precision, autocast_to
from common.errors import InputError
from common.progress import progress_bar
from model.config import ModelConfig
from pipeline.config import DataConfig
from pipeline.loader import ClipLoader
from pipeline.planning.plan import EvaluationPlan
from pipeline.shards.dataset import ShardDataset
from training.distributed import Distributed, sum_over_ranks

CALIBRATION_BINS = 15


class Views(NamedTuple):
    """The views of a video over which a classifier's probabilities are averaged."""

    num_clips: int = 1  # along time
    num_crops: int = 1  # along the longer side
    batch_size: int = 8


class Predictions(NamedTuple):
    """Of all V videos, on the CPU, in the order of ShardDataset.samples."""

    probabilities: Float[Tensor, "V classes"]
    labels: Int[Tensor, " V"]


def check_labels(dataset: ShardDataset) -> None:
    """Raise InputError if a video has no label."""
    if not dataset.info.classes:
        raise InputError(
            f"{dataset.folder} has no labels: create the shards from class folders or with annotations"
            " (shard_tools/make_shards.py)"
        )
    if dataset.info.num_unlabeled:
        index = int(np.argmax(dataset.column("label") < 0))
        raise InputError(
            f"{dataset.where(index)} has no label; dataset.json says all have one: create the shards again"
        )


def check_classes(wanted: Sequence[str], dataset: ShardDataset) -> None:
    """Raise InputError if a classifier of the classes `wanted` cannot be evaluated on `dataset`."""
    check_labels(dataset)
    given = dataset.info.classes
    if len(wanted) != len(given):
        raise InputError(f"the classifier has {len(wanted)} classes and {dataset.folder} has {len(given)}")
    for class_id, (ours, theirs) in enumerate(zip(wanted, given, strict=True)):
        if ours != theirs:
            raise InputError(
                f"class {class_id} is {ours!r} for the classifier and {theirs!r} in {dataset.folder}:"
                " create the shards with the same classes"
            )


@torch.no_grad()
def predict(
    model: nn.Module,
    dataset: ShardDataset,
    data: DataConfig,
    shape: ModelConfig,
    views: Views,
    dist: Distributed,
    precision: Precision,
) -> Predictions:
    """Average the softmax over the views of every video.

    Every view is computed by one rank, in a batch that is the same at any number of ranks, so the results are bitwise
    equal. Raises InputError at a video that does not decode: none is skipped or replaced.
    """
    data = replace(data, subset=None, cached_batch=False)
    batch_size = max(1, views.batch_size // views.num_crops) * views.num_crops  # crops of a clip share its decode
    plan = EvaluationPlan(
        dataset, data, num_frames=shape.num_frames, image_size=shape.image_size,
        batch_size=batch_size, num_temporal=views.num_clips, num_spatial=views.num_crops,
        rank=dist.rank, world_size=dist.world_size,
    )  # fmt: skip
    outputs = torch.zeros(len(plan), len(dataset.info.classes), device=dist.device)
    was_training = model.training
    model.eval()
    bar = progress_bar(unit="view", desc="evaluate", total=len(plan), leave=False, disable=not dist.is_main)
    with bar, ClipLoader(dataset, plan, dist.device, data, quarantine=None) as loader:
        for batch in loader.batches(first=0):
            with autocast_to(dist.device, precision):
                logits = model(batch.clip)
            outputs[batch.positions[0] : batch.positions[-1] + 1] = logits.float().softmax(dim=-1)
            bar.update(len(batch.positions) * dist.world_size)
    model.train(was_training)
    per_video = sum_over_ranks(outputs).unflatten(0, (-1, views.num_clips * views.num_crops)).cpu()
    if not per_video.isfinite().all():
        raise InputError(
            "the classifier's outputs are not finite: its training has diverged, or its weights are damaged"
        )
    return Predictions(per_video.mean(dim=1), torch.from_numpy(dataset.column("label").astype(np.int64)))


def scores(found: Predictions) -> dict[str, float]:
    """Compute top-1 and top-5 accuracy and the mean negative log-likelihood of the true class."""
    probabilities, labels = found.probabilities, found.labels
    ranked = probabilities.topk(min(5, probabilities.shape[1])).indices == labels[:, None]
    return {
        "top1": ranked[:, 0].float().mean().item(),
        "top5": ranked.any(dim=1).float().mean().item(),
        "nll": F.nll_loss(probabilities.clamp_min(1e-12).log(), labels).item(),
    }


def confusion(found: Predictions) -> Int[Tensor, "classes classes"]:
    """Count videos by true (row) and predicted class (column)."""
    num_classes = found.probabilities.shape[1]
    pairs = found.labels * num_classes + found.probabilities.argmax(dim=1)
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)


def calibration(found: Predictions) -> list[dict[str, Any]]:
    """Count videos and compute mean confidence and accuracy, in equal-width bins of confidence."""
    confidence, predicted = found.probabilities.max(dim=1)
    bins = (confidence * CALIBRATION_BINS).long().clamp_max(CALIBRATION_BINS - 1)
    correct = (predicted == found.labels).float()
    return [
        {
            "videos": int(chosen.sum()),
            "confidence": confidence[chosen].mean().item(),
            "accuracy": correct[chosen].mean().item(),
        }
        for chosen in (bins == number for number in range(CALIBRATION_BINS))
        if chosen.any()
    ]


def calibration_error(found: Predictions) -> float:
    """Compute the expected calibration error (Guo et al. 2017): mean distance of confidence and accuracy."""
    return sum(
        row["videos"] / len(found.labels) * abs(row["confidence"] - row["accuracy"]) for row in calibration(found)
    )
