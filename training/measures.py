"""Measure how well features classify videos, without training: the one definition of k-NN.

train.py, evaluate.py and compare.py call these functions, so that the same features, videos and k
give them the same numbers. Classifiers return the predicted class of each query, of which
`training.uncertainty` makes accuracies with errors. Those that are fitted are in
`training.frozen_classifiers`.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from adamae.common.errors import InputError
from adamae.pipeline.shards.format import Sample

# The temperature of k-NN, and its k where classes are large enough, as in DINO (Caron et al. 2021,
# arXiv 2104.14294).
KNN_TEMPERATURE = 0.07
MAX_NEIGHBORS = 20
# The side in pixels of the thumbnails that 1-NN of pixels compares.
THUMBNAIL_SIDE = 16
# Cells along each side of a frame, in which hand-made features are averaged.
GRID = 8
# The class that a query without any allowed neighbor gets.
NO_CLASS = -1
# Similarities that are computed at once, 256 MB of them: references may be hundreds of thousands.
MAX_SIMILARITIES = 2**26


class Videos(NamedTuple):
    """V videos as features, with their classes and what tells them apart."""

    features: Float[Tensor, "V D"]
    labels: Int[Tensor, " V"]
    # Numbers of the content, the source and the group of each video (`identify_videos`).
    identities: Int[Tensor, "V 3"]

    @property
    def groups(self) -> Int[Tensor, " V"]:
        """Return a number per video, the same for videos that are not independent."""
        return self.identities[:, 2]

    def select(self, index: Any) -> "Videos":
        """Return the videos at an index or a mask."""
        return Videos(self.features[index], self.labels[index], self.identities[index])


def identify_videos(splits: Sequence[Sequence[Sample]], group: str) -> list[Int[Tensor, "V 3"]]:
    """Number the contents, sources and groups of videos, alike in all splits.

    group: the field of a video that names its group, such as the person in it. A video without the
    field is a group with the others of its source.
    """
    numbers: dict[Hashable, int] = {}
    identities = []
    for samples in splits:
        rows = []
        for sample in samples:
            source = ("source", sample.source)
            group_name: Hashable = source
            if sample.fields.get(group) is not None:
                group_name = ("group", str(sample.fields[group]))
            names = (("content", sample.sha256), source, group_name)
            rows.append([numbers.setdefault(name, len(numbers)) for name in names])
        identities.append(torch.tensor(rows, dtype=torch.int64).reshape(-1, 3))
    return identities


def find_allowed(
    queries: Int[Tensor, "Q 3"], references: Int[Tensor, "R 3"]
) -> Bool[Tensor, "Q R"]:
    """Return which references may be a query's neighbors: other content, source and group.

    A copy, or another segment of the same recording, would be the nearest neighbor without telling
    anything about the features.
    """
    allowed = torch.ones(len(queries), len(references), dtype=torch.bool)
    for query_numbers, reference_numbers in zip(queries.T, references.T, strict=True):
        allowed &= query_numbers[:, None] != reference_numbers
    return allowed


def choose_neighbors(labels: Int[Tensor, " V"], neighbors: int | None = None) -> int:
    """Return k of k-NN: `neighbors`, or by default 20 or the size of the smallest class.

    With more neighbors than a class has videos, the other classes would outvote it. Raise
    InputError if there are fewer than `neighbors` videos.
    """
    if neighbors is None:
        counts = labels.bincount()
        return min(MAX_NEIGHBORS, int(counts[counts > 0].min()))
    if neighbors > len(labels):
        raise InputError(
            f"--neighbors {neighbors} is more than the {len(labels)} training videos: lower it"
        )
    return neighbors


class Neighbors(NamedTuple):
    """The k nearest references of each query, the nearest first."""

    references: Int[Tensor, "Q k"]
    # Cosine similarities of centered features, -inf of references that are not allowed.
    similarities: Float[Tensor, "Q k"]


def find_neighbors(queries: Videos, references: Videos, num_neighbors: int) -> Neighbors:
    """Find the nearest neighbors of queries among the references that are allowed.

    Features that are the same in all videos change nothing.
    """
    # Features of a masked autoencoder have a large mean, beside which all are alike.
    center = references.features.mean(dim=0)
    directions = F.normalize(references.features - center, dim=1)
    num_neighbors = min(num_neighbors, len(directions))
    indices = []
    similarities = []
    for block in split_queries(queries, len(directions)):
        similarity = F.normalize(block.features - center, dim=1) @ directions.T
        allowed = find_allowed(block.identities, references.identities)
        nearest = similarity.masked_fill(~allowed, -torch.inf).topk(num_neighbors, dim=1)
        indices.append(nearest.indices)
        similarities.append(nearest.values)
    return Neighbors(torch.cat(indices), torch.cat(similarities))


def predict_by_neighbors(
    queries: Videos, references: Videos, num_neighbors: int
) -> Int[Tensor, " Q"]:
    """Classify by k-NN; a query without an allowed neighbor gets NO_CLASS.

    Each of the nearest neighbors, at similarity s, votes for its class with the weight
    exp(s / KNN_TEMPERATURE).
    """
    neighbors = find_neighbors(queries, references, num_neighbors)
    weights = (neighbors.similarities / KNN_TEMPERATURE).exp()
    votes = F.one_hot(references.labels[neighbors.references]) * weights[..., None]
    has_neighbor = weights.any(dim=1)
    return votes.sum(dim=1).argmax(dim=1).where(has_neighbor, NO_CLASS)


def predict_by_nearest(queries: Videos, references: Videos) -> Int[Tensor, " Q"]:
    """Give each query the class of the reference at the least Euclidean distance, or NO_CLASS."""
    predicted = []
    for block in split_queries(queries, len(references.features)):
        distances = torch.cdist(block.features, references.features)
        allowed = find_allowed(block.identities, references.identities)
        nearest = distances.masked_fill(~allowed, torch.inf).argmin(dim=1)
        predicted.append(references.labels[nearest].where(allowed.any(dim=1), NO_CLASS))
    return torch.cat(predicted)


def split_queries(queries: Videos, num_references: int) -> Iterator[Videos]:
    """Yield the queries in blocks that have at most MAX_SIMILARITIES pairs with references."""
    block_size = max(1, MAX_SIMILARITIES // max(1, num_references))
    for first in range(0, len(queries.labels), block_size):
        yield queries.select(slice(first, first + block_size))


def find_majority(labels: Int[Tensor, " V"]) -> int:
    """Return the most common class, which a classifier without features always predicts."""
    return int(labels.bincount().argmax())


def make_thumbnails(clip: UInt8[Tensor, "B T H W C"]) -> Float[Tensor, "B P"]:
    """Average the frames and channels of each clip, and scale the mean to P pixels.

    P is THUMBNAIL_SIDE².
    """
    mean = clip.mean(dim=(1, 4), dtype=torch.float32)
    return F.adaptive_avg_pool2d(mean, THUMBNAIL_SIDE).flatten(1)


def average_colors(clip: UInt8[Tensor, "B T H W C"]) -> Float[Tensor, "B GGC"]:
    """Average the color over the frames of each clip, in the cells of a grid."""
    mean = clip.mean(dim=1, dtype=torch.float32).movedim(-1, 1)
    return F.adaptive_avg_pool2d(mean, GRID).flatten(1)


def average_differences(clip: UInt8[Tensor, "B T H W C"]) -> Float[Tensor, "B GG"]:
    """Average the absolute change from frame to frame, in the cells of a grid, as log(1 + x).

    It tells where how much moves, and nothing else: an encoder of videos must exceed it to be
    worth anything. A clip of one frame has no change.
    """
    frames = clip.unbind(dim=1)
    total = torch.zeros_like(frames[0][..., 0], dtype=torch.float32)
    # Frame by frame: all differences at once would take eight times the memory of the clips.
    for earlier, later in pairwise(frames):
        change = later.float() - earlier.float()
        total += change.abs().mean(dim=-1)
    mean = total / max(1, len(frames) - 1)
    cells = F.adaptive_avg_pool2d(mean[:, None], GRID)
    return cells.flatten(1).log1p()
