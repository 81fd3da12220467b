"""Measure features on held-out videos without a classifier.

The metrics are k-NN accuracy beside two baselines, RankMe and, of an AdaMAE, the reconstruction
loss.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.encoder import EncoderModel, encode
from adamae.pipeline.loader import Batch
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.config import TrainConfig
from adamae.training.distributed import Distributed
from adamae.training.evaluation import Evaluator, majority_top1, read_labels
from adamae.training.feature_files import read_feature_files

# The maximum number of held-out videos: an evaluation must not take as long as training.
MAX_VIDEOS = 1024
# k and temperature of k-NN, as in DINO (Caron et al. 2021, arXiv 2104.14294).
KNN_NEIGHBORS = 20
KNN_TEMPERATURE = 0.07
# The side in pixels of the thumbnail that the baseline pixel_top1 compares.
THUMBNAIL_SIZE = 16
# Masks are the same at every evaluation, and in every run.
MASK_SEED = 0


class EncodedVideos(NamedTuple):
    """What is computed of one clip of each of V videos, on the CPU."""

    # Numbers in ShardDataset.samples.
    samples: list[int]
    # Reconstruction losses of an AdaMAE on held-out videos, zeros otherwise.
    losses: Float[Tensor, "V 1"]
    thumbnails: Float[Tensor, "V P"]
    # Without a model, D is 0.
    features: Float[Tensor, "V D"]


class HeldOut:
    """Up to `max_videos` of evaluation.shards, one clip each, for metrics that need no classifier.

    They are the queries of k-NN. Its references are as many videos of data.shards, or, where those
    are not labeled with the same classes, the held-out videos themselves. A query has no neighbor
    with the same bytes, source or group (`evaluation.group`).
    """

    def __init__(
        self, config: TrainConfig, trained: ShardDataset, max_videos: int = MAX_VIDEOS
    ) -> None:
        """Raise InputError if evaluation.shards cannot be read."""
        self.config = config
        self.max_videos = max_videos
        self.dataset = ShardDataset.open(config.evaluation.shards, config.data)
        self.reference_dataset = self.dataset
        if has_same_classes(trained, self.dataset):
            self.reference_dataset = trained

    def evaluate(self, model: EncoderModel | None, dist: Distributed) -> dict[str, float]:
        """Return the metrics of a model, or, without one, those that need none.

        They are num_videos, rankme, the reconstruction_loss of an AdaMAE, and, where there are
        labels, those of `_score_neighbors`.
        """
        queries = self._encode(model, self.dataset, dist)
        metrics: dict[str, float] = {"num_videos": len(queries.samples)}
        if model is not None:
            metrics["rankme"] = rankme(queries.features)
        if isinstance(model, AdaMAE):
            metrics["reconstruction_loss"] = queries.losses.mean().item()
        if not has_one_label(self.dataset):
            return metrics
        references = queries
        if self.reference_dataset is not self.dataset:
            references = self._encode(model, self.reference_dataset, dist)
        return metrics | self._score_neighbors(queries, references)

    def _score_neighbors(
        self, queries: EncodedVideos, references: EncodedVideos
    ) -> dict[str, float]:
        """Return the accuracy of k-NN and of two baselines.

        - majority_top1: of always naming the most frequent class, over all queries.
        - knn_videos: the number of queries that have any allowed neighbor. Without any, it and what
          follows are missing.
        - pixel_top1: of the class of the nearest thumbnail, over these queries.
        - knn_top1: of k-NN, over these queries; only with a model.
        """
        query_labels = read_labels(self.dataset, queries.samples)
        reference_labels = read_labels(self.reference_dataset, references.samples)
        metrics = {"majority_top1": majority_top1(query_labels)}
        group = self.config.evaluation.group
        allowed = find_allowed_neighbors(
            self.dataset, queries.samples, self.reference_dataset, references.samples, group
        )
        has_neighbor = allowed.any(dim=1)
        if not has_neighbor.any():
            return metrics
        metrics["knn_videos"] = int(has_neighbor.sum())
        # Pixels tell scenes apart, and classes often differ by scene: a model must exceed this.
        distances = torch.cdist(queries.thumbnails, references.thumbnails)
        nearest = distances.masked_fill(~allowed, torch.inf).argmin(dim=1)
        is_right = reference_labels[nearest] == query_labels
        metrics["pixel_top1"] = is_right[has_neighbor].double().mean().item()
        if queries.features.shape[1] > 0:
            metrics["knn_top1"] = knn_top1(
                queries.features, query_labels, references.features, reference_labels, allowed
            )
        return metrics

    def _encode(
        self, model: EncoderModel | None, dataset: ShardDataset, dist: Distributed
    ) -> EncodedVideos:
        """Encode up to max_videos of a dataset, the same ones every time."""
        config = self.config
        is_held_out = dataset is self.dataset
        num_videos = len(dataset.samples)
        # With data.subset, only videos of the subset may be references.
        if not is_held_out and config.data.subset:
            num_videos = config.data.subset
        data = replace(config.data, subset=min(self.max_videos, num_videos))
        evaluator = Evaluator(replace(config, data=data), dataset, dist)
        plan = evaluator.make_plan(min(config.batch_size, 32))

        def encode_batch(batch: Batch) -> Float[Tensor, "B 1+P+D"]:
            # Columns of the output: one for the loss, P for the thumbnail and D for the features.
            losses = torch.zeros(len(batch.clip), 1, device=dist.device)
            thumbnails = make_thumbnails(batch.clip)
            if model is None:
                return torch.cat((losses, thumbnails), dim=1)
            # For so few batches of another size, compiling takes longer than it saves.
            with torch.compiler.set_stance("force_eager"):
                if isinstance(model, AdaMAE) and is_held_out:
                    output = model(batch.clip, MASK_SEED, batch.positions[0])
                    losses = output.loss_per_token.mean(dim=1, keepdim=True)
                features = encode(model, batch.clip).pooled.float()
            return torch.cat((losses, thumbnails, features), dim=1)

        module = model if isinstance(model, nn.Module) else nn.Identity()
        width = config.model.dimensions.encoder_width if model else 0
        widths = [1, THUMBNAIL_SIZE**2, width]
        results = evaluator.compute(module, plan, encode_batch, sum(widths))
        samples = [plan.row(position).sample for position in range(len(plan))]
        return EncodedVideos(samples, *results.split(widths, dim=1))


def make_thumbnails(clip: UInt8[Tensor, "B T H W C"]) -> Float[Tensor, "B P"]:
    """Average the frames and channels of each clip, and scale the mean to P pixels.

    P is THUMBNAIL_SIZE².
    """
    mean = clip.mean(dim=(1, 4), dtype=torch.float32)
    return F.adaptive_avg_pool2d(mean, THUMBNAIL_SIZE).flatten(1)


def has_one_label(dataset: ShardDataset) -> bool:
    """Return whether every video has one label, of two classes or more."""
    info = dataset.info
    return len(info.classes) > 1 and not info.num_unlabeled and not info.multi_label


def has_same_classes(one: ShardDataset, other: ShardDataset) -> bool:
    """Return whether every video of both datasets has one label, of the same classes."""
    is_labeled = has_one_label(one) and has_one_label(other)
    return is_labeled and one.info.classes == other.info.classes


def find_allowed_neighbors(
    query_dataset: ShardDataset,
    query_samples: Sequence[int],
    reference_dataset: ShardDataset,
    reference_samples: Sequence[int],
    group: str,
) -> Bool[Tensor, "queries references"]:
    """Find which references may be a query's neighbors: other bytes, another source and group.

    A copy, or another segment of the same recording, would be the nearest neighbor without telling
    anything about the features.

    group: the field of a video that names its group, such as the person in it. A video without the
    field is in no group.
    """
    queries = [query_dataset.samples[sample] for sample in query_samples]
    references = [reference_dataset.samples[sample] for sample in reference_samples]
    is_other_video = find_differences([v.sha256 for v in queries], [v.sha256 for v in references])
    is_other_source = find_differences([v.source for v in queries], [v.source for v in references])
    is_other_group = find_differences(
        [v.fields.get(group) for v in queries], [v.fields.get(group) for v in references]
    )
    query_has_group = torch.tensor([group in v.fields for v in queries])
    reference_has_group = torch.tensor([group in v.fields for v in references])
    is_other_group |= ~query_has_group[:, None] | ~reference_has_group
    return is_other_video & is_other_source & is_other_group


def find_differences(
    queries: list[Any], references: list[Any]
) -> Bool[Tensor, "queries references"]:
    """Return which values of queries (rows) differ from which of references (columns)."""
    pairs = np.array(queries, dtype=object)[:, None] != np.array(references, dtype=object)
    return torch.from_numpy(pairs.astype(bool))


def knn_top1(
    queries: Float[Tensor, "Q D"],
    query_labels: Int[Tensor, " Q"],
    references: Float[Tensor, "R D"],
    reference_labels: Int[Tensor, " R"],
    allowed: Bool[Tensor, "Q R"],
) -> float:
    """Compute the 20-NN accuracy of the queries that have any allowed neighbor, by features.

    Each of the nearest neighbors by cosine similarity s of centered features votes for its class
    with the weight exp(s / KNN_TEMPERATURE); neighbors that are not allowed have the weight 0.
    """
    # Features of a masked autoencoder have a large mean, beside which all are alike.
    center = references.mean(dim=0)
    similarity = F.normalize(queries - center, dim=1) @ F.normalize(references - center, dim=1).T
    num_neighbors = min(KNN_NEIGHBORS, len(references))
    nearest = similarity.masked_fill(~allowed, -torch.inf).topk(num_neighbors, dim=1)
    weights = (nearest.values / KNN_TEMPERATURE).exp()
    votes = F.one_hot(reference_labels[nearest.indices]) * weights[..., None]
    is_right = votes.sum(dim=1).argmax(dim=1) == query_labels
    return is_right[allowed.any(dim=1)].double().mean().item()


def rankme(features: Float[Tensor, "V D"]) -> float:
    """Compute the smooth rank of the features (RankMe, Garrido et al. 2023, arXiv 2210.02885).

    It is the exponential of the entropy of the singular values: 1 if all features are alike, and
    at most D.
    """
    values = np.linalg.svd(features.numpy().astype(np.float64), compute_uv=False)
    p = values / max(values.sum(), 1e-12) + 1e-7
    return float(np.exp(-(p * np.log(p)).sum()))


def read_features(folder: Path) -> tuple[list[dict[str, Any]], Float[Tensor, "V 2D"]]:
    """Read the metadata and features of all videos that extract_features.py has written.

    Features are the mean and the standard deviation over the windows of a video, since how they
    change tells motions apart. Raise InputError if there are none, or one has no label.
    """
    metadata = []
    features = []
    for video in read_feature_files(folder):
        if not video.metadata.get("label"):
            raise InputError(
                f"{video.file} has no label: extract features of class folders, or of shards with"
                " labels"
            )
        metadata.append(video.metadata)
        std, mean = torch.std_mean(video.features, dim=0, correction=0)
        features.append(torch.cat((mean, std)))
    if not metadata:
        raise InputError(
            f"{folder} has no features as safetensors or for webdataset: run extract_features.py,"
            " or name labeled shards"
        )
    return metadata, torch.stack(features)
