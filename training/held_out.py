"""Measure features on held-out videos without a classifier.

The metrics are k-NN accuracy beside three baselines (training.measures), RankMe and, of an AdaMAE
with a decoder, the reconstruction loss. Each video is measured by one clip.
"""

import sys
from dataclasses import replace
from typing import NamedTuple, TypeGuard

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adamae.common.logging import log
from adamae.model.adamae import AdaMAE
from adamae.model.channels import Clip
from adamae.model.encoder import EncoderModel, encode
from adamae.model.encoders.encoder import Encoder
from adamae.pipeline.loader import Batch
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.config import TrainConfig
from adamae.training.distributed import Distributed
from adamae.training.evaluation import Evaluator, majority_top1, read_labels
from adamae.training.measures import (
    GRID,
    NO_CLASS,
    THUMBNAIL_SIDE,
    Videos,
    average_differences,
    choose_neighbors,
    identify_videos,
    make_thumbnails,
    predict_by_nearest,
    predict_by_neighbors,
)
from adamae.training.uncertainty import estimate_accuracy

# The maximum number of held-out videos: an evaluation must not take as long as training.
MAX_VIDEOS = 1024
# Masks are the same at every evaluation, and in every run.
MASK_SEED = 0


class EncodedVideos(NamedTuple):
    """What is computed of one clip of each of V videos, on the CPU."""

    # Numbers in ShardDataset.samples.
    samples: list[int]
    # Reconstruction losses of an AdaMAE on held-out videos, zeros otherwise.
    losses: Float[Tensor, "V 1"]
    thumbnails: Float[Tensor, "V P"]
    differences: Float[Tensor, "V GG"]
    # Without a model, D is 0.
    features: Float[Tensor, "V D"]


class HeldOut:
    """Up to `max_videos` of evaluation.shards, one clip each, for metrics that need no classifier.

    They are the queries of k-NN. Its references are as many videos of data.shards, or, where those
    are not labeled with the same classes, the held-out videos themselves. A query has no neighbor
    with the same bytes, source or group (`evaluation.group`).
    """

    def __init__(
        self,
        config: TrainConfig,
        trained: ShardDataset,
        max_videos: int = MAX_VIDEOS,
        neighbors: int | None = None,
    ) -> None:
        """Raise InputError if evaluation.shards cannot be read.

        neighbors: k of k-NN; None: as `choose_neighbors` does.
        """
        self.config = config
        self.max_videos = max_videos
        self.neighbors = neighbors
        self.dataset = ShardDataset.open(config.evaluation.shards, config.data)
        self.reference_dataset = self.dataset
        if has_same_classes(trained, self.dataset):
            self.reference_dataset = trained

    def evaluate(self, model: EncoderModel | Encoder | None, dist: Distributed) -> dict[str, float]:
        """Return the metrics of a model, or, without one, those that need none.

        They are num_videos, rankme, the reconstruction_loss of a model with a decoder, and, where
        there are labels, those of `_score_neighbors`.
        """
        queries = self._encode(model, self.dataset, dist)
        metrics: dict[str, float] = {"num_videos": len(queries.samples)}
        if model is not None:
            metrics["rankme"] = rankme(queries.features)
        if has_decoder(model):
            metrics["reconstruction_loss"] = queries.losses.mean().item()
        if not self.dataset.info.has_one_label:
            return metrics
        references = queries
        if self.reference_dataset is not self.dataset:
            references = self._encode(model, self.reference_dataset, dist)
        return metrics | self._score_neighbors(queries, references)

    def _score_neighbors(
        self, queries: EncodedVideos, references: EncodedVideos
    ) -> dict[str, float]:
        """Return the accuracy of k-NN and of three baselines.

        - majority_top1: of always naming the most frequent class of the references.
        - knn_videos: the number of queries that have any allowed neighbor. Without any, it and what
          follows are missing.
        - pixel_top1: of the class of the nearest thumbnail, over these queries.
        - difference_top1: of k-NN of frame differences, over these queries.
        - knn_top1: of k-NN, over these queries, and its standard error, knn_error; only with a
          model.
        - knn_neighbors: k.
        """
        labels = read_labels(self.dataset, queries.samples)
        reference_labels = read_labels(self.reference_dataset, references.samples)
        identities, reference_identities = identify_videos(
            [
                [self.dataset.samples[sample] for sample in queries.samples],
                [self.reference_dataset.samples[sample] for sample in references.samples],
            ],
            self.config.evaluation.group,
        )
        metrics = {"majority_top1": majority_top1(labels, reference_labels)}
        num_neighbors = choose_neighbors(reference_labels, self.neighbors)

        def predict(name: str) -> Int[Tensor, " Q"]:
            query_videos = Videos(getattr(queries, name), labels, identities)
            reference_videos = Videos(
                getattr(references, name), reference_labels, reference_identities
            )
            if name == "thumbnails":
                return predict_by_nearest(query_videos, reference_videos)
            return predict_by_neighbors(query_videos, reference_videos, num_neighbors)

        # Pixels tell scenes apart, and differences motions: a model must exceed both.
        predictions = {
            "pixel_top1": predict("thumbnails"),
            "difference_top1": predict("differences"),
        }
        if queries.features.shape[1] > 0:
            predictions["knn_top1"] = predict("features")
        has_neighbor = predictions["pixel_top1"] != NO_CLASS
        if not has_neighbor.any():
            return metrics
        metrics["knn_videos"] = int(has_neighbor.sum())
        metrics["knn_neighbors"] = num_neighbors
        for name, predicted in predictions.items():
            is_right = (predicted == labels)[has_neighbor].numpy()
            estimate = estimate_accuracy(is_right, identities[has_neighbor, 2].numpy())
            metrics[name] = estimate.value
            if name == "knn_top1":
                metrics["knn_error"] = estimate.error
        return metrics

    def _encode(
        self, model: EncoderModel | Encoder | None, dataset: ShardDataset, dist: Distributed
    ) -> EncodedVideos:
        """Encode up to max_videos of a dataset, the same ones every time.

        Training videos that cannot be decoded are left out and counted on stderr, as a run trains
        without them, too.
        """
        config = self.config
        is_held_out = dataset is self.dataset
        num_videos = len(dataset.samples)
        # With data.subset, only videos of the subset may be references.
        if not is_held_out and config.data.subset:
            num_videos = config.data.subset
        data = replace(config.data, subset=min(self.max_videos, num_videos))
        evaluator = Evaluator(replace(config, data=data), dataset, dist)
        if isinstance(model, Encoder):
            evaluator = replace(evaluator, num_frames=model.num_frames, image_size=model.image_size)
        plan = evaluator.make_plan(min(config.batch_size, 32), leaves_out=not is_held_out)

        def encode_batch(batch: Batch) -> Float[Tensor, "B columns"]:
            losses = torch.zeros(len(batch.clip), 1, device=dist.device)
            columns = [losses, make_thumbnails(batch.clip), average_differences(batch.clip)]
            if model is None:
                return torch.cat(columns, dim=1)
            # For so few batches of another size, compiling takes longer than it saves.
            with torch.compiler.set_stance("force_eager"):
                if has_decoder(model) and is_held_out:
                    output = model(batch.clip, MASK_SEED, batch.positions[0])
                    columns[0] = output.loss_per_token.mean(dim=1, keepdim=True)
                columns.append(pool(model, batch.clip).float())
            return torch.cat(columns, dim=1)

        module = model if isinstance(model, nn.Module) else nn.Identity()
        width = 0
        if isinstance(model, Encoder):
            width = model.dim
        elif model is not None:
            width = model.config.dimensions.encoder_width
        widths = [1, THUMBNAIL_SIDE**2, GRID**2, width]
        results = evaluator.compute(module, plan, encode_batch, sum(widths))
        samples = torch.tensor([plan.row(position).sample for position in range(len(plan))])
        if not is_held_out:
            # The loss of training videos is 0, or NaN where they were left out.
            is_decoded = results[:, 0] == 0
            num_left_out = int((~is_decoded).sum())
            if num_left_out and dist.is_main:
                log(
                    f"WARNING: {num_left_out} of {len(results)} neighbors of k-NN cannot be decoded"
                    " and are left out",
                    sys.stderr,
                )
            samples = samples[is_decoded]
            results = results[is_decoded]
        return EncodedVideos(samples.tolist(), *results.split(widths, dim=1))


def has_decoder(model: EncoderModel | Encoder | None) -> TypeGuard[AdaMAE]:
    """Return whether a model has a decoder, whose errors are measured."""
    return isinstance(model, AdaMAE) and model.decoder is not None


def pool(model: EncoderModel | Encoder, clip: Clip) -> Float[Tensor, "B D"]:
    """Compute a vector per clip."""
    if isinstance(model, Encoder):
        return model.pooled(clip)
    return encode(model, clip).pooled


def has_same_classes(one: ShardDataset, other: ShardDataset) -> bool:
    """Return whether every video of both datasets has one label, of the same classes."""
    is_labeled = one.info.has_one_label and other.info.has_one_label
    return is_labeled and one.info.classes == other.info.classes


def rankme(features: Float[Tensor, "V D"]) -> float:
    """Compute the smooth rank of the features (RankMe, Garrido et al. 2023, arXiv 2210.02885).

    It is the exponential of the entropy of the singular values: 1 if all features are alike, and
    at most D. Other than there, the mean is subtracted first. What all videos share tells none of
    them apart, and where it is large, its one singular value hides the others: of features whose
    rank was 18 to 28 without the mean, it was 2 to 6 with it.
    """
    matrix = features.numpy().astype(np.float64)
    values = np.linalg.svd(matrix - matrix.mean(axis=0), compute_uv=False)
    p = values / max(values.sum(), 1e-12) + 1e-7
    return float(np.exp(-(p * np.log(p)).sum()))
