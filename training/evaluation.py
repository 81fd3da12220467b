"""Evaluate models on videos that they are not trained on; the same results at any number of ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor, nn

from common.devices import autocast_to
from common.errors import InputError
from common.progress import progress_bar
from model.adamae import AdaMAE
from model.encoder import EncoderModel, encode
from pipeline.loader import Batch, ClipLoader
from pipeline.planning.plan import EvaluationPlan
from pipeline.shards.dataset import ShardDataset
from training.config import TrainConfig
from training.distributed import Distributed, sum_over_ranks
from training.feature_files import read_feature_files

MAX_VIDEOS = 1024  # of HeldOut, always the same ones: an evaluation must not take as long as training
NUM_NEIGHBORS, TEMPERATURE = 20, 0.07  # of the k-NN classifier, as DINO's (Caron et al. 2021)
THUMBNAIL = 16  # pixels, of the baseline's mean gray frame
MASK_SEED = 0  # masks are the same at every evaluation, and in every run


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
        """Compute top-1 accuracy, of more than five classes top-5 too, that of the most common class, and the mean
        negative log-likelihood of the true class; of a multi-label classifier, the mean of average precision over
        classes, and binary cross-entropy."""
        if self.is_multi_label:
            found = [value for value in self.average_precisions() if value is not None]
            loss = F.binary_cross_entropy(self.probabilities, self.labels.float())
            chance = [count / len(self.labels) for count in self.labels.sum(dim=0).tolist() if count]
            return {
                "mAP": sum(found) / max(1, len(found)),
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
            self.dataset, self.config.data, num_frames=model.num_frames, image_size=model.image_size,
            batch_size=batch_size, num_temporal=num_clips, num_spatial=num_crops,
            rank=self.dist.rank, world_size=self.dist.world_size,
        )  # fmt: skip

    @torch.no_grad()
    def compute(
        self, model: nn.Module, plan: EvaluationPlan, function: Callable[[Batch], Float[Tensor, "B width"]], width: int
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
            unit="clip", desc="evaluate", total=len(plan), leave=False, delay=2, disable=not dist.is_main
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

    def predict(self, model: nn.Module, multi_label: bool, num_clips: int = 1, num_crops: int = 1) -> Predictions:
        """Average the softmax, of a multi-label classifier the sigmoid, over the views of every video: clips along
        time, and crops along the longer side."""
        batch_size = max(1, self.config.batch_size // num_crops) * num_crops  # crops of a clip share its decode
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
            labels = self.dataset.mark_classes(sample.labels or () for sample in self.dataset.samples)
            return Predictions(mean, torch.from_numpy(labels))
        return Predictions(mean, read_labels(self.dataset))


def read_labels(dataset: ShardDataset, samples: Sequence[int] | slice = slice(None)) -> Int[Tensor, " samples"]:
    return torch.from_numpy(dataset.column("label")[samples].astype(np.int64))


def read_features(folder: Path) -> tuple[list[dict[str, Any]], Float[Tensor, "V 2D"]]:
    """Read the metadata and features of all labeled videos that extract_features.py has written to a folder: the mean
    and the standard deviation over windows, since how features change tells motions apart.

    Raise InputError where there are none, or one has no label.
    """
    about = []
    features = []
    for video in read_feature_files(folder):
        if not video.metadata.get("label"):
            raise InputError(f"{video.file} has no label: extract features of class folders, or of shards with labels")
        about.append(video.metadata)
        std, mean = torch.std_mean(video.features, dim=0, correction=0)
        features.append(torch.cat((mean, std)))
    if not about:
        formats = "as safetensors or for webdataset"
        raise InputError(f"{folder} has no features {formats}: run extract_features.py, or name labeled shards")
    return about, torch.stack(features)


def average_precision(scores: Float[np.ndarray, " V"], is_true: Bool[np.ndarray, " V"]) -> float:
    """Compute the mean, over the true ones, of the precision among all that score as high, as scikit-learn does."""
    order = np.argsort(-scores, kind="stable")
    scores, found = scores[order], np.cumsum(is_true[order], dtype=np.int64)
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))  # of those that score the same
    return float((np.diff(found[last], prepend=0) * found[last] / (last + 1)).sum() / found[-1])


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
        raise InputError(f"the classifier has {len(wanted)} classes and {dataset.folder} has {len(given)}")
    for class_id, (known, labeled) in enumerate(zip(wanted, given, strict=True)):
        if known != labeled:
            raise InputError(
                f"class {class_id} is {known!r} for the classifier and {labeled!r} in {dataset.folder}:"
                " create the shards with the same classes"
            )


class HeldOut:
    """Up to `max_videos` of evaluation.shards, one clip each, for metrics that need no classifier.

    The reference set of k-NN is as many videos of data.shards, or, where those are not labeled with the same classes,
    the held-out videos themselves; no neighbor is of the same source or of the same `evaluation.group`.
    """

    def __init__(self, config: TrainConfig, trained: ShardDataset, max_videos: int = MAX_VIDEOS) -> None:
        """Raises InputError if evaluation.shards cannot be read."""
        self.config, self.max_videos = config, max_videos
        self.dataset = ShardDataset.open(config.evaluation.shards, config.data)
        self.reference = trained if has_same_classes(trained, self.dataset) else self.dataset

    def evaluate(self, model: EncoderModel | None, dist: Distributed) -> dict[str, float]:
        """Return reconstruction loss (of an AdaMAE), RankMe, and, where there are labels, k-NN top-1 accuracy beside
        that of pixels and of the most common class; without a model, what needs none."""
        samples, own = self._encode(model, self.dataset, dist)
        metrics: dict[str, float] = {"num_videos": len(samples)}
        if model is not None:
            metrics["rankme"] = rankme(own["features"])
        if isinstance(model, AdaMAE):
            metrics["reconstruction_loss"] = own["loss"].mean().item()
        if not has_same_classes(self.dataset, self.dataset):
            return metrics
        is_alone = self.reference is self.dataset
        neighbors, others = (samples, own) if is_alone else self._encode(model, self.reference, dist)
        labels, other_labels = read_labels(self.dataset, samples), read_labels(self.reference, neighbors)
        group = self.config.evaluation.group
        allowed = find_allowed_neighbors(self.dataset, samples, self.reference, neighbors, group)
        metrics["majority_top1"] = majority_top1(labels)
        if allowed.any():
            metrics["knn_videos"] = int(allowed.any(dim=1).sum())
            distances = torch.cdist(own["thumbnail"], others["thumbnail"]).masked_fill(~allowed, torch.inf)
            is_right = (other_labels[distances.argmin(dim=1)] == labels)[allowed.any(dim=1)]
            metrics["pixel_top1"] = is_right.double().mean().item()  # what a model must exceed: it tells scenes apart
            if model is not None:
                metrics["knn_top1"] = knn_top1(own["features"], labels, others["features"], other_labels, allowed)
        return metrics

    def _encode(
        self, model: EncoderModel | None, dataset: ShardDataset, dist: Distributed
    ) -> tuple[list[int], dict[str, Float[Tensor, "V values"]]]:
        """Return V samples and, of a clip of each, `loss` (of the held-out videos), `thumbnail` and `features`."""
        config, is_held_out = self.config, dataset is self.dataset
        most = len(dataset.samples) if is_held_out else config.data.subset or len(dataset.samples)
        data = replace(config.data, subset=min(self.max_videos, most))
        evaluator = Evaluator(replace(config, data=data), dataset, dist)
        plan = evaluator.make_plan(min(config.batch_size, 32))

        def encode_batch(batch: Batch) -> Float[Tensor, "B 1+P+D"]:
            losses, thumbnails = torch.zeros(len(batch.clip), 1, device=dist.device), make_thumbnails(batch.clip)
            if model is None:
                return torch.cat((losses, thumbnails), dim=1)
            with torch.compiler.set_stance("force_eager"):
                if isinstance(model, AdaMAE) and is_held_out:
                    losses = model(batch.clip, MASK_SEED, batch.positions[0]).loss_per_token.mean(dim=1, keepdim=True)
                return torch.cat((losses, thumbnails, encode(model, batch.clip).pooled.float()), dim=1)

        module = model if isinstance(model, nn.Module) else nn.Identity()
        width = config.model.dimensions.encoder_width if model else 0
        widths = {"loss": 1, "thumbnail": THUMBNAIL**2, "features": width}
        found = evaluator.compute(module, plan, encode_batch, sum(widths.values())).split([*widths.values()], dim=1)
        samples = [plan.row(position).sample for position in range(len(plan))]
        return samples, dict(zip(widths, found, strict=True))


def make_thumbnails(clip: UInt8[Tensor, "B T H W C"]) -> Float[Tensor, "B P"]:
    """Average the frames and channels of each clip, and scale what is left to THUMBNAIL × THUMBNAIL pixels."""
    return F.adaptive_avg_pool2d(clip.mean(dim=(1, 4), dtype=torch.float32), THUMBNAIL).flatten(1)


def has_same_classes(one: ShardDataset, other: ShardDataset) -> bool:
    """Whether every video of both has one label, of the same classes."""
    infos = one.info, other.info
    is_labeled = all(len(info.classes) > 1 and not info.num_unlabeled and not info.multi_label for info in infos)
    return is_labeled and one.info.classes == other.info.classes


def find_allowed_neighbors(
    dataset: ShardDataset, samples: Sequence[int], reference: ShardDataset, neighbors: Sequence[int], group: str
) -> Bool[Tensor, "samples neighbors"]:
    """Find which videos may be a sample's neighbors: not those of the same bytes, source or group."""

    def identify(dataset: ShardDataset, samples: Sequence[int]) -> Shaped[np.ndarray, "3 samples"]:
        videos = [dataset.samples[sample] for sample in samples]
        return np.array([(v.sha256, v.source, v.fields.get(group, object())) for v in videos], dtype=object).T

    pairs = zip(identify(dataset, samples), identify(reference, neighbors), strict=True)
    return torch.from_numpy(np.logical_and.reduce([own[:, None] != others for own, others in pairs]).astype(bool))


def knn_top1(
    features: Float[Tensor, "V D"],
    labels: Int[Tensor, " V"],
    reference: Float[Tensor, "N D"],
    neighbor_labels: Int[Tensor, " N"],
    allowed: Bool[Tensor, "V N"],
) -> float:
    """Compute 20-NN accuracy by cosine similarity of centered features, of the videos that have any neighbor."""
    center = reference.mean(dim=0)
    similarity = F.normalize(features - center, dim=1) @ F.normalize(reference - center, dim=1).T
    nearest = similarity.masked_fill(~allowed, -torch.inf).topk(min(NUM_NEIGHBORS, len(reference)), dim=1)
    votes = F.one_hot(neighbor_labels[nearest.indices]) * (nearest.values / TEMPERATURE).exp()[..., None]
    is_right = votes.sum(dim=1).argmax(dim=1) == labels
    return is_right[allowed.any(dim=1)].double().mean().item()


def majority_top1(labels: Int[Tensor, " V"]) -> float:
    """Compute the accuracy of always predicting the most common class."""
    return labels.bincount().max().item() / len(labels)


def rankme(features: Float[Tensor, "V D"]) -> float:
    """Compute the smooth rank of the features (Garrido et al. 2023): 1 if they are all alike, at most D."""
    values = np.linalg.svd(features.numpy().astype(np.float64), compute_uv=False)
    p = values / max(values.sum(), 1e-12) + 1e-7
    return float(np.exp(-(p * np.log(p)).sum()))
