"""Find the moments of videos whose features are most like a query's."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from adamae.common.errors import InputError
from adamae.common.progress import progress_bar
from adamae.training.extraction import prefetch
from adamae.training.feature_files import StoredFeatures, list_feature_files, read_feature_files

# The files whose mean is taken off all features. They are spread evenly over the folder.
NUM_CENTER_FILES = 64
# Windows that are compared at once: 24 MiB of 768 features each, which is about a CPU's cache.
BLOCK = 8192

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

    Windows of a video that overlap a better one are left out. One file is in memory at a time, and
    the next one. Raise InputError if there are no features, some are damaged or of another width.
    """
    files = list_feature_files(folder)
    center = average_features(files)
    if center.shape != query.features.shape:
        raise InputError(
            f"the query has {len(query.features)} features, and {folder} has {len(center)} of each"
            " window: take a query of the same model"
        )
    best: list[Moment] = []
    for video in prefetch(_read_all(files)):
        scores = score_windows(video.features.numpy(), query.features, center)
        own = query.own
        if own is not None and own.key == video.metadata["key"]:
            scores[_find_overlaps(video.frames, np.array(own.frames))] = -np.inf
        threshold = best[0].score if len(best) == num_moments else -np.inf
        for moment in pick_moments(video, scores, num_moments, threshold):
            heapq.heappush(best, moment)
            if len(best) > num_moments:
                heapq.heappop(best)
    return sorted(best, reverse=True)


def _read_all(files: list[Path]) -> Iterator[StoredFeatures]:
    for file in progress_bar(files, unit="file"):
        yield from read_feature_files(file)


def average_features(files: list[Path]) -> Float[np.ndarray, " D"]:
    """Average the features of a part of the files.

    Features of a masked autoencoder have a large mean, beside which all are alike.
    """
    total = np.zeros(())
    num_windows = 0
    for file in files[:: max(1, len(files) // NUM_CENTER_FILES)]:
        for video in read_feature_files(file):
            total = total + video.features.numpy().sum(axis=0, dtype=np.float64)
            num_windows += len(video.features)
    return (total / num_windows).astype(np.float32)


def score_windows(
    features: Float[np.ndarray, "W D"],
    query: Float[np.ndarray, " D"],
    center: Float[np.ndarray, " D"],
) -> Float[np.ndarray, " W"]:
    """Compute the cosine similarity of each window to the query, both without the center."""
    direction = query - center
    direction /= max(np.linalg.norm(direction), 1e-12)
    scores = np.empty(len(features), np.float32)
    for start in range(0, len(features), BLOCK):
        block = features[start : start + BLOCK] - center
        norms = np.sqrt(np.einsum("wd,wd->w", block, block))
        scores[start : start + BLOCK] = block @ direction / np.maximum(norms, 1e-12)
    return scores


def pick_moments(
    video: StoredFeatures, scores: Float[np.ndarray, " W"], num_moments: int, threshold: float
) -> Iterator[Moment]:
    """Yield up to `num_moments` windows that score above the threshold and do not overlap.

    `scores` are changed: those of overlapping windows become -inf.
    """
    for _ in range(num_moments):
        index = int(scores.argmax())
        score = float(scores[index])
        if score <= threshold:
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
