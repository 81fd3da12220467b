"""Find the moments of videos whose features are most like a query's."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

from adamae.common.errors import InputError
from adamae.common.progress import progress_bar
from adamae.training.feature_files import StoredFeatures, list_feature_files, read_feature_files

# The files whose mean is taken off all features. They are spread evenly over the folder.
NUM_CENTER_FILES = 64
# Windows that are compared at once. With 768 features each, they are 768 KiB and stay in the cache
# of a core.
BLOCK = 256

Frames = Int[np.ndarray, "W 2"]


@dataclass(frozen=True, order=True)
class Moment:
    """A window of a video, and how much it is like the query: 1 is the same, 0 is unlike."""

    score: float
    # The name of the video in the features, and in their input.
    key: str
    source: str
    # Of the first and the last frame: seconds in the source, and numbers in the video or segment.
    times: tuple[float, float]
    frames: tuple[int, int]


class Query(NamedTuple):
    """What moments are compared with."""

    features: Float[np.ndarray, " D"]
    # A window among those that are searched, which is no result, nor are those that overlap it.
    own: Moment | None = None


def find_moments(folder: Path, query: Query, num_moments: int) -> list[Moment]:
    """Return the moments in a folder of features that are most like the query, the best first.

    Windows of a video that overlap a better one are left out. One file is in memory at a time.
    Raise InputError if there are no features, some are damaged or of another width.
    """
    files = list_feature_files(folder)
    center = average_features(files, len(query.features))
    best: list[Moment] = []
    # Below this score, nothing can be among the best.
    floor = -np.inf
    # Two threads took 1.3 times as long for files of 1,000 windows of 96 features, since they wait
    # for the GIL, and as long for those of 768 features.
    for file in progress_bar(files, unit="file"):
        moments = _search_file(file, query, center, num_moments, floor)
        best = heapq.nlargest(num_moments, best + moments)
        if len(best) == num_moments:
            floor = best[-1].score
    return best


def _search_file(
    file: Path, query: Query, center: Float[np.ndarray, " D"], num_moments: int, floor: float
) -> list[Moment]:
    """Return the best moments of each video in a file of features, from the score `floor` on."""
    moments: list[Moment] = []
    for video in read_features(file, len(query.features)):
        scores = score_windows(video.features.numpy(), query.features, center)
        own = query.own
        if own is not None and own.key == video.metadata["key"]:
            scores[_find_overlaps(video.frames, np.array(own.frames))] = -np.inf
        scores[scores < floor] = -np.inf
        moments += pick_moments(video, scores, num_moments)
    return moments


def read_features(file: Path, width: int) -> Iterator[StoredFeatures]:
    """Yield the features in a file; raise InputError if windows do not have `width` of them."""
    for video in read_feature_files(file):
        if video.features.shape[1] != width:
            raise InputError(
                f"the query has {width} features, and {file} has {video.features.shape[1]} of each"
                " window: search features of the query's model"
            )
        yield video


def average_features(files: list[Path], width: int) -> Float[np.ndarray, " D"]:
    """Average the features, `width` a window, of a part of the files.

    Features of a masked autoencoder have a large mean, beside which all are alike.
    """
    total = torch.zeros(width, dtype=torch.float64)
    num_windows = 0
    for file in files[:: max(1, len(files) // NUM_CENTER_FILES)]:
        for video in read_features(file, width):
            total += video.features.sum(dim=0).double()
            num_windows += len(video.features)
    return (total / num_windows).float().numpy()


def score_windows(
    features: Float[np.ndarray, "W D"],
    query: Float[np.ndarray, " D"],
    center: Float[np.ndarray, " D"],
) -> Float[np.ndarray, " W"]:
    """Compute the cosine similarity of each window to the query, both without the center."""
    direction = query - center
    direction /= max(np.linalg.norm(direction), 1e-12)
    scores = np.empty(len(features), np.float32)
    # One for all blocks: memory that is new is slower than the arithmetic.
    centered = np.empty((min(BLOCK, len(features)), len(center)), np.float32)
    for start in range(0, len(features), BLOCK):
        block = features[start : start + BLOCK]
        differences = np.subtract(block, center, out=centered[: len(block)])
        norms = np.sqrt(np.vecdot(differences, differences))
        scores[start : start + BLOCK] = differences @ direction / np.maximum(norms, 1e-12)
    return scores


def pick_moments(
    video: StoredFeatures, scores: Float[np.ndarray, " W"], num_moments: int
) -> Iterator[Moment]:
    """Yield up to `num_moments` windows with the best scores that do not overlap.

    `scores` are changed: those of overlapping windows become -inf.
    """
    for _ in range(num_moments):
        index = int(scores.argmax())
        score = float(scores[index])
        if score == -np.inf:
            return
        start, end = video.times[index].tolist()
        first, last = video.frames[index].tolist()
        metadata = video.metadata
        yield Moment(score, metadata["key"], metadata["source"], (start, end), (first, last))
        scores[_find_overlaps(video.frames, video.frames[index])] = -np.inf


def _find_overlaps(frames: Frames, window: Int[np.ndarray, "2"]) -> np.ndarray:
    """Return which windows have frames in common with one window."""
    first, last = window
    return (frames[:, 0] <= last) & (frames[:, 1] >= first)
