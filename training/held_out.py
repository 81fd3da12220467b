"""Measure features on held-out videos, without a classifier: k-NN accuracy, RankMe, reconstruction loss."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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

# The most videos of HeldOut, always the same ones: an evaluation must not take as long as training.
MAX_VIDEOS = 1024
# The k-NN classifier's, as DINO's (Caron et al. 2021).
NUM_NEIGHBORS = 20
TEMPERATURE = 0.07
# The side of the baseline's mean gray frame, in pixels.
THUMBNAIL = 16
# Masks are the same at every evaluation, and in every run.
MASK_SEED = 0


class HeldOut:
    """Up to `max_videos` of evaluation.shards, one clip each, for metrics that need no classifier.

    The reference set of k-NN is as many videos of data.shards, or, where those are not labeled with the same classes,
    the held-out videos themselves; no neighbor is of the same source or of the same `evaluation.group`.
    """

    def __init__(
        self, config: TrainConfig, trained: ShardDataset, max_videos: int = MAX_VIDEOS
    ) -> None:
        """Raise InputError if evaluation.shards cannot be read."""
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
        neighbors, others = (
            (samples, own) if is_alone else self._encode(model, self.reference, dist)
        )
        labels, other_labels = (
            read_labels(self.dataset, samples),
            read_labels(self.reference, neighbors),
        )
        group = self.config.evaluation.group
        allowed = find_allowed_neighbors(self.dataset, samples, self.reference, neighbors, group)
        metrics["majority_top1"] = majority_top1(labels)
        if allowed.any():
            metrics["knn_videos"] = int(allowed.any(dim=1).sum())
            distances = torch.cdist(own["thumbnail"], others["thumbnail"]).masked_fill(
                ~allowed, torch.inf
            )
            is_right = (other_labels[distances.argmin(dim=1)] == labels)[allowed.any(dim=1)]
            # What a model must exceed, since it tells scenes apart.
            metrics["pixel_top1"] = is_right.double().mean().item()
            if model is not None:
                metrics["knn_top1"] = knn_top1(
                    own["features"], labels, others["features"], other_labels, allowed
                )
        return metrics

    def _encode(
        self, model: EncoderModel | None, dataset: ShardDataset, dist: Distributed
    ) -> tuple[list[int], dict[str, Float[Tensor, "V values"]]]:
        """Return V samples and, of a clip of each, `loss` (of the held-out videos), `thumbnail` and `features`."""
        config = self.config
        is_held_out = dataset is self.dataset
        num_videos = len(dataset.samples)
        if not is_held_out and config.data.subset:
            num_videos = config.data.subset
        data = replace(config.data, subset=min(self.max_videos, num_videos))
        evaluator = Evaluator(replace(config, data=data), dataset, dist)
        plan = evaluator.make_plan(min(config.batch_size, 32))

        def encode_batch(batch: Batch) -> Float[Tensor, "B 1+P+D"]:
            losses = torch.zeros(len(batch.clip), 1, device=dist.device)
            thumbnails = make_thumbnails(batch.clip)
            if model is None:
                return torch.cat((losses, thumbnails), dim=1)
            with torch.compiler.set_stance("force_eager"):
                if isinstance(model, AdaMAE) and is_held_out:
                    losses = model(batch.clip, MASK_SEED, batch.positions[0]).loss_per_token.mean(
                        dim=1, keepdim=True
                    )
                return torch.cat(
                    (losses, thumbnails, encode(model, batch.clip).pooled.float()), dim=1
                )

        module = model if isinstance(model, nn.Module) else nn.Identity()
        width = config.model.dimensions.encoder_width if model else 0
        widths = {"loss": 1, "thumbnail": THUMBNAIL**2, "features": width}
        results = evaluator.compute(module, plan, encode_batch, sum(widths.values()))
        columns = results.split(list(widths.values()), dim=1)
        samples = [plan.row(position).sample for position in range(len(plan))]
        return samples, dict(zip(widths, columns, strict=True))


def make_thumbnails(clip: UInt8[Tensor, "B T H W C"]) -> Float[Tensor, "B P"]:
    """Average the frames and channels of each clip, and scale what is left to THUMBNAIL × THUMBNAIL pixels."""
    return F.adaptive_avg_pool2d(clip.mean(dim=(1, 4), dtype=torch.float32), THUMBNAIL).flatten(1)


def has_same_classes(one: ShardDataset, other: ShardDataset) -> bool:
    """Return whether every video of both has one label, of the same classes."""
    infos = one.info, other.info
    is_labeled = all(
        len(info.classes) > 1 and not info.num_unlabeled and not info.multi_label for info in infos
    )
    return is_labeled and one.info.classes == other.info.classes


def find_allowed_neighbors(
    dataset: ShardDataset,
    samples: Sequence[int],
    reference: ShardDataset,
    neighbors: Sequence[int],
    group: str,
) -> Bool[Tensor, "samples neighbors"]:
    """Find which videos may be a sample's neighbors: those of other bytes, another source and another group.

    group: the field of a video that names its group, such as the person in it. A video without it is in no group.
    """
    own = [dataset.samples[sample] for sample in samples]
    others = [reference.samples[neighbor] for neighbor in neighbors]
    is_other_video = find_differences([v.sha256 for v in own], [v.sha256 for v in others])
    is_other_source = find_differences([v.source for v in own], [v.source for v in others])
    own_has_group = torch.tensor([group in v.fields for v in own])
    others_have_group = torch.tensor([group in v.fields for v in others])
    is_other_group = find_differences(
        [v.fields.get(group) for v in own], [v.fields.get(group) for v in others]
    )
    is_other_group |= ~own_has_group[:, None] | ~others_have_group
    return is_other_video & is_other_source & is_other_group


def find_differences(own: list[Any], others: list[Any]) -> Bool[Tensor, "samples neighbors"]:
    """Return which values of `own` differ from which of `others`."""
    pairs = np.array(own, dtype=object)[:, None] != np.array(others, dtype=object)
    return torch.from_numpy(pairs.astype(bool))


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
    nearest = similarity.masked_fill(~allowed, -torch.inf).topk(
        min(NUM_NEIGHBORS, len(reference)), dim=1
    )
    votes = (
        F.one_hot(neighbor_labels[nearest.indices])
        * (nearest.values / TEMPERATURE).exp()[..., None]
    )
    is_right = votes.sum(dim=1).argmax(dim=1) == labels
    return is_right[allowed.any(dim=1)].double().mean().item()


def rankme(features: Float[Tensor, "V D"]) -> float:
    """Compute the smooth rank of the features (Garrido et al. 2023): 1 if they are all alike, at most D."""
    values = np.linalg.svd(features.numpy().astype(np.float64), compute_uv=False)
    p = values / max(values.sum(), 1e-12) + 1e-7
    return float(np.exp(-(p * np.log(p)).sum()))


def read_features(folder: Path) -> tuple[list[dict[str, Any]], Float[Tensor, "V 2D"]]:
    """Read the metadata and features of all labeled videos that extract_features.py has written to a folder: the mean
    and the standard deviation over windows, since how features change tells motions apart.

    Raise InputError where there are none, or one has no label.
    """
    about = []
    features = []
    for video in read_feature_files(folder):
        if not video.metadata.get("label"):
            raise InputError(
                f"{video.file} has no label: extract features of class folders, or of shards with labels"
            )
        about.append(video.metadata)
        std, mean = torch.std_mean(video.features, dim=0, correction=0)
        features.append(torch.cat((mean, std)))
    if not about:
        formats = "as safetensors or for webdataset"
        raise InputError(
            f"{folder} has no features {formats}: run extract_features.py, or name labeled shards"
        )
    return about, torch.stack(features)
