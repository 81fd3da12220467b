"""Evaluate models on videos that they are not trained on; the same results at any number of ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor, nn

from common.devices import Precision, autocast_to
from common.errors import InputError
from common.progress import progress_bar
from model.adamae import AdaMAE
from model.config import ModelConfig
from model.encoder import EncoderModel, encode
from pipeline.config import DataConfig
from pipeline.loader import Batch, ClipLoader
from pipeline.planning.plan import EvaluationPlan
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import UNLABELED
from training.config import TrainConfig
from training.distributed import Distributed, sum_over_ranks

MAX_VIDEOS = 1024  # of HeldOut, always the same ones: an evaluation must not take as long as training
NUM_NEIGHBORS, TEMPERATURE = 20, 0.07  # of the k-NN classifier, as DINO's (Caron et al. 2021)
MASK_SEED = 0  # masks are the same at every evaluation, and in every run


@torch.no_grad()
def compute_per_clip(
    compute: Callable[[Batch], Float[Tensor, "B width"]],
    width: int,
    model: nn.Module,
    plan: EvaluationPlan,
    dataset: ShardDataset,
    data: DataConfig,
    dist: Distributed,
    precision: Precision,
) -> Float[Tensor, "clips width"]:
    """Call `compute` with all batches of a plan; return its results, in the plan's order, on the CPU.

    Every clip is computed by one rank, in a batch that is the same at any number of ranks, so the results are bitwise
    equal. Raises InputError at a video that does not decode: none is skipped or replaced.
    """
    results = torch.zeros(len(plan), width, device=dist.device)
    was_training = model.training
    model.eval()
    bar = progress_bar(unit="clip", desc="evaluate", total=len(plan), leave=False, disable=not dist.is_main)
    try:
        with bar, ClipLoader(dataset, plan, dist.device, data, quarantine=None) as loader:
            for batch in loader.batches(first=0):
                with autocast_to(dist.device, precision):
                    results[batch.positions[0] : batch.positions[-1] + 1] = compute(batch)
                bar.update(len(batch.positions) * dist.world_size)
    finally:
        model.train(was_training)
    return sum_over_ranks(results).cpu()


class Views(NamedTuple):
    """The views of a video over which a classifier's probabilities are averaged."""

    num_clips: int = 1  # along time
    num_crops: int = 1  # along the longer side
    batch_size: int = 8


class Predictions(NamedTuple):
    """Of all V videos, on the CPU, in the order of ShardDataset.samples."""

    probabilities: Float[Tensor, "V classes"]
    labels: Int[Tensor, " V"] | UInt8[Tensor, "V classes"]  # ones mark the classes of a video that may have several

    @property
    def is_multi_label(self) -> bool:
        return self.labels.dim() == 2

    def average_precisions(self) -> list[float | None]:
        """Compute that of each class of a multi-label classifier; None where no video is of it."""
        columns = zip(self.probabilities.T.numpy(), self.labels.T.numpy(), strict=True)
        return [average_precision(scores, is_true) if is_true.any() else None for scores, is_true in columns]

    def scores(self) -> dict[str, float]:
        """Compute top-1 and top-5 accuracy, that of the most common class, and the mean negative log-likelihood of the
        true class; of a multi-label classifier, the mean of average precision over classes, and binary cross-entropy.
        """
        if self.is_multi_label:
            found = [value for value in self.average_precisions() if value is not None]
            loss = F.binary_cross_entropy(self.probabilities, self.labels.float())
            return {"mAP": sum(found) / max(1, len(found)), "bce": loss.item()}
        ranked = self.probabilities.topk(min(5, self.probabilities.shape[1])).indices == self.labels[:, None]
        return {
            "top1": ranked[:, 0].double().mean().item(),
            "top5": ranked.any(dim=1).double().mean().item(),
            "majority_top1": majority_top1(self.labels),
            "nll": F.nll_loss(self.probabilities.clamp_min(1e-12).log(), self.labels).item(),
        }


def predict(
    model: nn.Module,
    dataset: ShardDataset,
    data: DataConfig,
    shape: ModelConfig,
    views: Views,
    dist: Distributed,
    precision: Precision,
    multi_label: bool = False,
) -> Predictions:
    """Average the softmax, of a multi-label classifier the sigmoid, over the views of every video."""
    data = replace(data, subset=None)
    plan = EvaluationPlan(
        dataset, data, num_frames=shape.num_frames, image_size=shape.image_size,
        batch_size=max(1, views.batch_size // views.num_crops) * views.num_crops,  # crops of a clip share its decode
        num_temporal=views.num_clips, num_spatial=views.num_crops, rank=dist.rank, world_size=dist.world_size,
    )  # fmt: skip

    def compute(batch: Batch) -> Float[Tensor, "B classes"]:
        logits = model(batch.clip).float()
        return logits.sigmoid() if multi_label else logits.softmax(dim=-1)

    width = len(dataset.info.classes)
    probabilities = compute_per_clip(compute, width, model, plan, dataset, data, dist, precision)
    if not probabilities.isfinite().all():
        raise InputError(
            "the classifier's outputs are not finite: its training has diverged, or its weights are damaged"
        )
    mean = probabilities.unflatten(0, (-1, views.num_clips * views.num_crops)).mean(dim=1)
    if multi_label:
        return Predictions(
            mean, torch.from_numpy(dataset.mark_classes(sample.labels or () for sample in dataset.samples))
        )
    return Predictions(mean, torch.from_numpy(dataset.column("label").astype(np.int64)))


def average_precision(scores: Float[np.ndarray, " V"], is_true: Bool[np.ndarray, " V"]) -> float:
    """Compute the mean, over the true ones, of the precision among all that score as high, as scikit-learn does."""
    order = np.argsort(-scores, kind="stable")
    scores, found = scores[order], np.cumsum(is_true[order], dtype=np.int64)
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))  # of those that score the same
    return float((np.diff(found[last], prepend=0) * found[last] / (last + 1)).sum() / found[-1])


def check_labels(dataset: ShardDataset) -> None:
    """Raise InputError if a video has no label; one of several may have none of the classes."""
    if not dataset.info.classes:
        raise InputError(
            f"{dataset.folder} has no labels: create the shards from class folders or with annotations"
            " (shard_tools/make_shards.py)"
        )
    if dataset.info.num_unlabeled:
        index = int(np.argmax(dataset.column("label") == UNLABELED))
        raise InputError(
            f"{dataset.where(index)} has no label; dataset.json says all have one: create the shards again"
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
        raise InputError(f"the classifier has {len(wanted)} classes and {dataset.folder} has {len(given)}")
    for class_id, (ours, theirs) in enumerate(zip(wanted, given, strict=True)):
        if ours != theirs:
            raise InputError(
                f"class {class_id} is {ours!r} for the classifier and {theirs!r} in {dataset.folder}:"
                " create the shards with the same classes"
            )


class HeldOut:
    """Up to MAX_VIDEOS videos of evaluation.shards, one clip each, for metrics that need no classifier.

    The neighbors of k-NN are as many videos of data.shards, or, where those are not labeled with the same classes, the
    held-out videos themselves; never one of the same source or of the same `evaluation.group`.
    """

    def __init__(self, config: TrainConfig, trained: ShardDataset) -> None:
        """Raises InputError if evaluation.shards cannot be read."""
        self.config = config
        self.dataset = ShardDataset.open(config.evaluation.shards, config.data)
        self.bank = trained if has_same_classes(trained, self.dataset) else self.dataset

    def evaluate(self, model: EncoderModel, dist: Distributed) -> dict[str, float]:
        """Return reconstruction loss (of an AdaMAE), RankMe, and, where there are labels, k-NN top-1 accuracy beside
        that of the most common class."""
        samples, losses, features = self._encode(model, self.dataset, dist)
        metrics = {"rankme": rankme(features)}
        if isinstance(model, AdaMAE):
            metrics["reconstruction_loss"] = losses.mean().item()
        if not has_same_classes(self.dataset, self.dataset):
            return metrics
        voters, bank = samples, features
        if self.bank is not self.dataset:
            voters, _, bank = self._encode(model, self.bank, dist)
        labels, of_bank = _read_labels(self.dataset, samples), _read_labels(self.bank, voters)
        may_vote = find_voters(self.dataset, samples, self.bank, voters, self.config.evaluation.group)
        if may_vote.any():
            metrics["knn_top1"] = knn_top1(features, labels, bank, of_bank, may_vote)
        return metrics | {"majority_top1": majority_top1(labels)}

    def _encode(
        self, model: EncoderModel, dataset: ShardDataset, dist: Distributed
    ) -> tuple[list[int], Float[Tensor, " V"], Float[Tensor, "V D"]]:
        """Return sample numbers, losses (of the held-out videos) and features."""
        shape, config, is_held_out = self.config.model, self.config, dataset is self.dataset
        most = len(dataset.samples) if is_held_out else config.data.subset or len(dataset.samples)
        data = replace(config.data, subset=min(MAX_VIDEOS, most))
        plan = EvaluationPlan(
            dataset, data, num_frames=shape.num_frames, image_size=shape.image_size,
            batch_size=min(config.batch_size, 32), rank=dist.rank, world_size=dist.world_size,
        )  # fmt: skip

        def compute(batch: Batch) -> Float[Tensor, "B 1+D"]:
            losses = torch.zeros(len(batch.clip), device=dist.device)
            with torch.compiler.set_stance("force_eager"):
                if isinstance(model, AdaMAE) and is_held_out:
                    losses = model(batch.clip, MASK_SEED, batch.positions[0]).loss_per_token.mean(dim=1)
                return torch.cat((losses[:, None], encode(model, batch.clip).pooled.float()), dim=1)

        assert isinstance(model, nn.Module)
        width = 1 + shape.dimensions.encoder_width
        found = compute_per_clip(compute, width, model, plan, dataset, data, dist, config.precision)
        return [plan.row(position).sample for position in range(len(plan))], found[:, 0], found[:, 1:]


def has_same_classes(one: ShardDataset, other: ShardDataset) -> bool:
    """Whether every video of both has one label, of the same classes."""
    infos = one.info, other.info
    is_labeled = all(len(info.classes) > 1 and not info.num_unlabeled and not info.multi_label for info in infos)
    return is_labeled and one.info.classes == other.info.classes


def _read_labels(dataset: ShardDataset, samples: Sequence[int]) -> Int[Tensor, " samples"]:
    return torch.from_numpy(dataset.column("label")[samples].astype(np.int64))


def find_voters(
    dataset: ShardDataset, samples: Sequence[int], bank: ShardDataset, voters: Sequence[int], group: str
) -> Bool[Tensor, "samples voters"]:
    """Find which videos of the bank may be a sample's neighbors: not those of the same bytes, source or group."""

    def identify(dataset: ShardDataset, samples: Sequence[int]) -> Shaped[np.ndarray, "3 samples"]:
        videos = [dataset.samples[sample] for sample in samples]
        return np.array([(v.sha256, v.source, v.fields.get(group, object())) for v in videos], dtype=object).T

    pairs = zip(identify(dataset, samples), identify(bank, voters), strict=True)
    return torch.from_numpy(np.logical_and.reduce([ours[:, None] != theirs for ours, theirs in pairs]).astype(bool))


def knn_top1(
    features: Float[Tensor, "V D"],
    labels: Int[Tensor, " V"],
    bank: Float[Tensor, "N D"],
    bank_labels: Int[Tensor, " N"],
    may_vote: Bool[Tensor, "V N"],
) -> float:
    """Compute 20-NN accuracy by cosine similarity of centered features, of those that have a neighbor in the bank."""
    center = bank.mean(dim=0)
    similarity = F.normalize(features - center, dim=1) @ F.normalize(bank - center, dim=1).T
    nearest = similarity.masked_fill(~may_vote, -torch.inf).topk(min(NUM_NEIGHBORS, len(bank)), dim=1)
    votes = F.one_hot(bank_labels[nearest.indices]) * (nearest.values / TEMPERATURE).exp()[..., None]
    is_right = votes.sum(dim=1).argmax(dim=1) == labels
    return is_right[may_vote.any(dim=1)].double().mean().item()


def majority_top1(labels: Int[Tensor, " V"]) -> float:
    """Compute the accuracy of always predicting the most common class."""
    return labels.bincount().max().item() / len(labels)


def warn_of_majority(metrics: Mapping[str, float]) -> list[str]:
    """Return a sentence for each accuracy that is not above the majority class's."""
    return [
        f"WARNING: {name} is {metrics[name]:.3f}, and always predicting the most common class gives"
        f" {metrics['majority_top1']:.3f}"
        for name in ("knn_top1", "top1")
        if name in metrics and metrics[name] <= metrics["majority_top1"]
    ]


def rankme(features: Float[Tensor, "V D"]) -> float:
    """Compute the smooth rank of the features (Garrido et al. 2023): 1 if they are all alike, at most D."""
    values = np.linalg.svd(features.numpy().astype(np.float64), compute_uv=False)
    p = values / max(values.sum(), 1e-12) + 1e-7
    return float(np.exp(-(p * np.log(p)).sum()))
