"""Warn of data that a run will hardly learn from, before it starts."""

import math
from itertools import islice

import numpy as np
import torch

from adamae.pipeline.config import DEFAULT_STRIDE, DataConfig
from adamae.pipeline.planning.plan import frame_step, largest_stride
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.config import TrainConfig
from adamae.training.held_out import has_same_classes

MAX_CHECKED = 2**20  # videos of each dataset; shards hold them in random order
MAX_SOURCES = 2**14  # likewise; the names of as many are read in .4 s
# As docs/training.md, "How many videos you have", says: by size, from scratch, and to continue from other weights.
MIN_VIDEOS, MIN_CONTINUED = {"tiny": 0, "small": 3_000, "base": 50_000}, 300


def startup_warnings(config: TrainConfig, dataset: ShardDataset, device: torch.device) -> list[str]:
    """Return a sentence for each finding."""
    found = warn_of_scale(
        config, min(config.data.subset or len(dataset.samples), len(dataset.samples)), device
    )
    found += warn_of_videos(dataset, config.data, config.model.num_frames)
    if config.evaluation.shards:
        held_out = ShardDataset.open(config.evaluation.shards, config.data)
        if shared := count_shared_videos(held_out, dataset):
            found.append(
                f"WARNING: {shared} of {len(held_out.samples)} videos of evaluation.shards are also trained on (the"
                " same bytes or source): evaluation results will be optimistically biased"
            )
        if config.task != "pretrain" and has_same_classes(dataset, held_out):
            unseen = np.setdiff1d(
                held_out.column("label").astype(np.int64), dataset.column("label").astype(np.int64)
            )
            if missing := [held_out.info.classes[label] for label in unseen]:
                found.append(
                    f"WARNING: {len(missing)} classes of evaluation.shards ({', '.join(map(repr, missing[:3]))}) have"
                    " no video to learn from: none of their videos is recognized; add videos of them"
                )
    return found


def warn_of_scale(config: TrainConfig, num_videos: int, device: torch.device) -> list[str]:
    """Return a sentence on a model too large for a CPU, and one on too few videos for pre-training it."""
    size, found = config.model.size, []
    if device.type == "cpu" and size != "tiny":
        found.append(
            f"WARNING: a model of size {size} may take weeks without a GPU: on a CPU, start with --config"
            " configs/demo.yaml (size tiny, 48 pixels), which takes minutes"
        )
    needed = MIN_VIDEOS.get(size, MIN_VIDEOS["base"])
    if config.init_from:
        needed = min(needed, MIN_CONTINUED)
    if config.task == "pretrain" and num_videos < needed:
        advice = "continue from published weights: --config configs/continue_small.yaml init_from=WEIGHTS"
        if num_videos < MIN_CONTINUED:
            advice = "extract features with published weights instead (docs/weights.md)"
        found.append(
            f"WARNING: {num_videos:,} videos are few for pre-training at size {size}, which needs about {needed:,}:"
            f" {advice} (docs/training.md, How many videos you have)"
        )
    return found


def warn_of_videos(dataset: ShardDataset, data: DataConfig, num_frames: int) -> list[str]:
    """Return a sentence on the videos with fewer frames than a clip spans, and one on those of too few a second."""
    stored = dataset.column("num_frames", MAX_CHECKED).astype(np.int64)
    span, found, advice, repeated = (
        np.full(len(stored), num_frames - 1),
        [],
        "",
        "frames are repeated",
    )
    if data.sampling == "strided":
        repeated = "their last frame is repeated"
        fps = dataset.column("fps", MAX_CHECKED)
        stride = np.maximum(1, dataset.column("frame_stride", MAX_CHECKED).astype(np.int64))
        span = np.floor((num_frames - 1) * frame_step(fps, stride, data) + 0.5).astype(np.int64)
        slow = span < num_frames - 1
        if data.fps and slow.any():
            found.append(
                f"WARNING: {slow.sum()} of {len(stored)} videos have fewer than {data.fps:g} frames per second (the"
                f" slowest has {fps[slow].min():g}): frames are repeated; lower data.fps"
            )
        multiple = math.lcm(*dataset.info.frame_strides)
        possible = largest_stride((stored - 1) * stride + 1, num_frames) // multiple * multiple
        if data.fps:
            advice = "raise data.fps or "
        elif 0 < possible < (data.frame_stride or DEFAULT_STRIDE):
            advice = f"set data.frame_stride={possible} or "
    short = stored <= span
    if short.any():
        found.append(
            f"WARNING: {short.sum()} of {len(stored)} videos are shorter than a clip (the shortest has"
            f" {stored[short].min()} of {span[short].max() + 1} frames): {repeated}; {advice}lower model.num_frames"
        )
    return found


def count_shared_videos(one: ShardDataset, other: ShardDataset) -> int:
    """Count the videos of `one` that are in `other` too, by their bytes or, of the first ones, by their source."""
    known = set(map(bytes, other.column("sha256")))
    is_shared = [video in known for video in map(bytes, one.column("sha256"))]
    sources = {sample.source for sample in islice(other.samples, MAX_SOURCES)}
    for number, sample in enumerate(islice(one.samples, MAX_SOURCES)):
        is_shared[number] |= sample.source in sources
    return sum(is_shared)
