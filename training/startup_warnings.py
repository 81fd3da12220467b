"""Warn, before a run starts, of data from which it will hardly learn."""

import math
import re
from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from jaxtyping import Int64

from adamae.common.logging import format_count
from adamae.model.weights.external_layouts import list_own_features
from adamae.pipeline.config import DEFAULT_STRIDE, DataConfig
from adamae.pipeline.planning.plan import NTSC_TOLERANCE, frame_step, largest_stride
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.config import TrainConfig
from adamae.training.distributed import count_ranks
from adamae.training.held_out import has_same_classes

# So many videos of a dataset are looked at; shards hold them in random order.
MAX_CHECKED = 2**18
# So many sources are compared: they are read from JSON, 16,384 in 0.4 s.
MAX_SOURCES = 2**14
# From docs/training.md, "How many videos you have": by size, to pre-train from scratch.
MIN_VIDEOS = {"tiny": 0, "small": 3_000, "base": 50_000}
# From the same place: at any size, to continue from other weights.
MIN_CONTINUED = 300


def startup_warnings(config: TrainConfig, dataset: ShardDataset, device: torch.device) -> list[str]:
    """Return a warning for each problem of the model, the dataset and the held-out videos."""
    num_videos = len(dataset.samples)
    if config.data.subset:
        num_videos = min(config.data.subset, num_videos)
    warnings = warn_of_scale(config, num_videos, device)
    warnings += note_own_features(config)
    warnings += note_views(config, num_videos)
    warnings += note_short_views(dataset, config.data, config.model.num_frames)
    warnings += warn_of_videos(dataset, config.data, config.model.num_frames)
    if config.task != "pretrain" and config.data.flip:
        warnings += warn_of_flips(dataset.info.classes)
    if config.evaluation.shards:
        held_out = ShardDataset.open(config.evaluation.shards, config.data)
        warnings += warn_of_held_out(dataset, held_out, config.task != "pretrain")
    return warnings


def warn_of_held_out(
    dataset: ShardDataset, held_out: ShardDataset, is_classifier: bool
) -> list[str]:
    """Return a warning of held-out videos that are trained on, and one of classes that are not."""
    warnings = []
    num_shared = count_shared_videos(held_out, dataset)
    if num_shared:
        warnings.append(
            f"WARNING: {num_shared} of {len(held_out.samples)} videos of evaluation.shards are"
            " also trained on (the same bytes or source): evaluation results will be"
            " optimistically biased"
        )
    if is_classifier and has_same_classes(dataset, held_out):
        unseen = np.setdiff1d(
            held_out.column("label").astype(np.int64), dataset.column("label").astype(np.int64)
        )
        if len(unseen) > 0:
            names = ", ".join(repr(held_out.info.classes[label]) for label in unseen[:3])
            warnings.append(
                f"WARNING: evaluation.shards has {format_count(len(unseen), 'class')} ({names})"
                " without a video to learn from, whose videos are never recognized: add some"
            )
    return warnings


def warn_of_flips(classes: Sequence[str]) -> list[str]:
    """Return a warning if names of classes tell left from right, which flipped clips do not."""
    for name in classes:
        # "SwipeLeft" and "turn-left" have the word, "bright" has not.
        words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
        if any(word.lower() in ("left", "right") for word in words):
            return [
                f"WARNING: classes tell left from right ({name!r}), but half of the clips are"
                " mirrored: set data.flip=false"
            ]
    return []


def warn_of_scale(config: TrainConfig, num_videos: int, device: torch.device) -> list[str]:
    """Return a warning of a model too large for a CPU, and one of too few videos for it."""
    size = config.model.size
    warnings = []
    # A probe's encoder may have another architecture, and a size of its own.
    if device.type == "cpu" and size != "tiny" and not config.task.endswith("_probe"):
        warnings.append(
            f"WARNING: a model of size {size} may take weeks without a GPU: on a CPU, start with"
            " --config configs/demo.yaml (size tiny, 48 pixels), which takes minutes"
        )
    min_videos = MIN_VIDEOS.get(size, MIN_VIDEOS["base"])
    if config.init_from:
        min_videos = min(min_videos, MIN_CONTINUED)
    if config.task == "pretrain" and num_videos < min_videos:
        command = "--config configs/continue_small.yaml init_from=WEIGHTS"
        advice = f"continue from published weights: {command}"
        if num_videos < MIN_CONTINUED:
            advice = "extract features with published weights instead (docs/weights.md)"
        warnings.append(
            f"WARNING: {num_videos:,} videos are few for pre-training at size {size}, which needs"
            f" about {min_videos:,}: {advice} (docs/training.md, How many videos you have)"
        )
    return warnings


def note_own_features(config: TrainConfig) -> list[str]:
    """Return a sentence where the model cannot be exported to other projects' layouts."""
    features = list_own_features(config.model)
    # A probe is exported nowhere, and says so.
    if not features or config.task in ("linear_probe", "attentive_probe"):
        return []
    names = " and ".join(features)
    return [
        f"no other project, such as transformers, has {names}: this model can be exported with"
        " --to encoder only"
    ]


def note_views(config: TrainConfig, num_videos: int) -> list[str]:
    """Return a sentence on how many videos are compared, and a warning if there are too few."""
    views = config.model.views
    if views == 1:
        return []
    num_compared = config.clips_per_step(count_ranks()) // views
    notes = [f"a step compares {views} views of each of {num_compared} videos"]
    if num_videos < num_compared:
        notes.append(
            f"WARNING: there are {format_count(num_videos, 'video')}, so a step holds some twice,"
            " and takes them for different ones: lower batch_size (or global_batch) to"
            f" {num_videos * views}"
        )
    return notes


def note_short_views(dataset: ShardDataset, data: DataConfig, num_frames: int) -> list[str]:
    """Return a sentence on videos without room for views that begin data.views_apart_s apart."""
    if data.views_apart_s == 0:
        return []
    stored_frames, fps, strides = read_timing(dataset)
    step = frame_step(fps, strides, data)
    num_later = np.floor(data.views_apart_s * fps / step + NTSC_TOLERANCE)
    # The last frame of the last view is the one nearest to its time.
    is_short = (num_frames - 1 + num_later) * step >= stored_frames - 0.5
    if not is_short.any():
        return []
    return [
        f"{is_short.sum()} of {len(stored_frames)} videos are too short for clips that begin"
        f" {data.views_apart_s:g} s apart (data.views_apart_s): their views begin closer together"
    ]


def read_timing(dataset: ShardDataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the stored frames, frames per second and strides of videos of a dataset."""
    stored_frames = dataset.column("num_frames", MAX_CHECKED).astype(np.int64)
    strides = np.maximum(1, dataset.column("frame_stride", MAX_CHECKED).astype(np.int64))
    return stored_frames, dataset.column("fps", MAX_CHECKED), strides


def warn_of_videos(dataset: ShardDataset, data: DataConfig, num_frames: int) -> list[str]:
    """Return a warning of videos that are shorter than a clip, and one of low frame rates."""
    stored_frames, fps, strides = read_timing(dataset)
    if data.sampling == "segments":
        # One frame from each of num_frames parts of the video.
        spans = np.full(len(stored_frames), num_frames - 1)
        return warn_of_short_videos(
            stored_frames, spans, "frames are repeated", "lower model.num_frames"
        )
    warnings = []
    # The last frame of a clip, in stored frames after the first one, rounded to the nearest.
    spans = (num_frames - 1) * frame_step(fps, strides, data)
    spans = np.floor(spans + 0.5).astype(np.int64)
    is_slow = spans < num_frames - 1
    if data.fps and is_slow.any():
        warnings.append(
            f"WARNING: {is_slow.sum()} of {len(stored_frames)} videos have fewer than"
            f" {data.fps:g} frames per second (the slowest has {fps[is_slow].min():g}): frames are"
            " repeated; lower data.fps"
        )
    # The largest stride at which no video is too short, which must be one that all shards have.
    multiple = math.lcm(*dataset.info.frame_strides)
    max_stride = largest_stride((stored_frames - 1) * strides + 1, num_frames)
    max_stride = max_stride // multiple * multiple
    advice = "lower model.num_frames"
    if data.fps:
        advice = f"raise data.fps or {advice}"
    elif 0 < max_stride < (data.frame_stride or DEFAULT_STRIDE):
        advice = f"set data.frame_stride={max_stride} or {advice}"
    return warnings + warn_of_short_videos(
        stored_frames, spans, "their last frame is repeated", advice
    )


def warn_of_short_videos(
    num_frames: Int64[np.ndarray, " V"], spans: Int64[np.ndarray, " V"], effect: str, advice: str
) -> list[str]:
    """Return a warning if a video has no frame at its clip's span, which is counted from 0."""
    is_short = num_frames <= spans
    if not is_short.any():
        return []
    return [
        f"WARNING: {is_short.sum()} of {len(num_frames)} videos are shorter than a clip (the"
        f" shortest has {num_frames[is_short].min()} of {spans[is_short].max() + 1} frames):"
        f" {effect}; {advice}"
    ]


def count_shared_videos(one: ShardDataset, other: ShardDataset) -> int:
    """Count the videos of `one` that are in `other` too.

    They are compared by their bytes, and the first MAX_SOURCES of each also by their source.
    Memory is bounded by the size of `one`, the held-out videos: those of `other` pass in blocks.
    """
    hashes = np.concatenate(list(one.read_hashes()))
    shared: set[bytes] = set()
    for block in other.read_hashes():
        # The first of four words tells nearly all videos apart.
        is_candidate = np.isin(block[:, 0], hashes[:, 0])
        shared.update(map(bytes, block[is_candidate]))
    is_shared = [digest in shared for digest in map(bytes, hashes)]
    sources = {sample.source for sample in islice(other.samples, MAX_SOURCES)}
    for index, sample in enumerate(islice(one.samples, MAX_SOURCES)):
        is_shared[index] |= sample.source in sources
    return sum(is_shared)
