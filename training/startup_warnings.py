"""Warn of data that a run will hardly learn from, before it starts."""

import math
from collections.abc import Iterator

import numpy as np
import torch

from pipeline.config import DEFAULT_STRIDE, DataConfig
from pipeline.planning.plan import frame_step, largest_stride
from pipeline.shards.dataset import ShardDataset
from training.config import TrainConfig
from training.evaluation import has_same_classes

MAX_CHECKED = 2**20  # videos of each dataset; shards hold them in random order
# As docs/training.md, "How many videos you have", says: by size, from scratch, and to continue from other weights.
MIN_VIDEOS, MIN_CONTINUED = {"small": 3_000, "base": 50_000}, 300
MAX_SOURCES = 2**14  # likewise; the names of as many are read in .4 s


def startup_warnings(config: TrainConfig, dataset: ShardDataset, device: torch.device) -> list[str]:
    """Return a sentence for each finding."""
    found = warn_of_scale(config, min(config.data.subset or len(dataset.samples), len(dataset.samples)), device)
    found += warn_of_videos(dataset, config.data, config.model.num_frames)
    if config.evaluation.shards:
        held_out = ShardDataset.open(config.evaluation.shards, config.data)
        if shared := count_shared_videos(held_out, dataset):
            found.append(
                f"WARNING: {shared} of {len(held_out.samples)} videos of evaluation.shards are also trained on (the"
                " same bytes or source): evaluation results will be optimistically biased"
            )
        if config.task != "pretrain" and has_same_classes(dataset, held_out):
            found += warn_of_rare_classes(dataset, held_out)
        if has_same_classes(held_out, held_out) and not has_same_classes(held_out, dataset):
            found.append(
                "note: data.shards is not labeled with the classes of evaluation.shards: the neighbors of k-NN are the"
                " other videos of evaluation.shards"
            )
    return found


def warn_of_scale(config: TrainConfig, num_videos: int, device: torch.device) -> list[str]:
    """Return a sentence on a model too large for a CPU, and one on too few videos for pre-training it."""
    size, found = config.model.size, []
    if size == "tiny":
        return []
    if device.type == "cpu":
        found.append(
            f"WARNING: a model of size {size} may take weeks without a GPU: on a CPU, start with --config"
            " configs/demo.yaml (size tiny, 48 pixels), which takes minutes"
        )
    needed = MIN_CONTINUED if config.init_from else MIN_VIDEOS.get(size, MIN_VIDEOS["base"])
    if config.task == "pretrain" and num_videos < needed:
        advice = "continue from published weights: --config configs/continue_small.yaml init_from=WEIGHTS"
        if num_videos < MIN_CONTINUED:
            advice = "extract features with published weights instead (docs/weights.md)"
        how = "continuing" if config.init_from else "pre-training from scratch"
        found.append(
            f"WARNING: {num_videos:,} videos are few: {how} at size {size} needs about {needed:,}; {advice}"
            " (docs/training.md, How many videos you have)"
        )
    return found


def warn_of_videos(dataset: ShardDataset, data: DataConfig, num_frames: int) -> list[str]:
    """Return a sentence on the videos with fewer frames than a clip spans, and one on those of too few a second."""
    stored = dataset.column("num_frames", MAX_CHECKED).astype(np.int64)
    checked = str(len(stored)) if len(stored) == len(dataset.samples) else f"the first {len(stored)}"
    needed = np.full_like(stored, num_frames)
    repeated, found = "frames are repeated", []
    if data.sampling == "strided":
        repeated = "their last frame is repeated"
        fps = dataset.column("fps", MAX_CHECKED)
        stride = np.maximum(1, dataset.column("frame_stride", MAX_CHECKED).astype(np.float64))
        span = np.floor((num_frames - 1) * frame_step(fps, stride, data) + 0.5)
        needed = span.astype(np.int64) + 1
        slow = span < num_frames - 1
        if data.fps and slow.any():
            found.append(
                f"WARNING: {slow.sum()} of {checked} videos have fewer than {data.fps:g} frames per second (the slowest"
                f" has {fps[slow].min():g}): frames are repeated; lower data.fps"
            )
    short = stored < needed
    if short.any():
        advice = "raise data.fps or " if data.fps else ""
        if data.sampling == "strided" and not data.fps:
            advice = advise_stride(
                dataset, data, largest_stride((stored - 1) * stride.astype(np.int64) + 1, num_frames)
            )
        found.append(
            f"WARNING: {short.sum()} of {checked} videos are shorter than a clip (the shortest has"
            f" {stored[short].min()} of {needed[short].max()} frames): {repeated}; {advice}lower model.num_frames"
        )
    return found


def warn_of_rare_classes(dataset: ShardDataset, held_out: ShardDataset) -> list[str]:
    """Return a sentence on the held-out classes of which there is no video to learn from, and one on those of one."""
    trained, asked = (
        np.bincount(each.column("label").astype(np.int64), minlength=len(dataset.info.classes))
        for each in (dataset, held_out)
    )
    found = []
    for count, says in (
        (0, "no video to learn from: none of their videos is recognized"),
        (1, "one video to learn from"),
    ):
        rare = [dataset.info.classes[index] for index in np.flatnonzero((asked > 0) & (trained == count))]
        if rare:
            names = ", ".join(map(repr, rare[:3])) + (", …" if len(rare) > 3 else "")
            found.append(f"WARNING: {len(rare)} classes of evaluation.shards ({names}) have {says}; add videos of them")
    return found


def advise_stride(dataset: ShardDataset, data: DataConfig, wanted: int) -> str:
    """Say how clips come to the stride `wanted`, which their length allows: it must be a multiple of the stored one."""
    stored = math.lcm(*dataset.info.frame_strides)
    if wanted >= (data.frame_stride or DEFAULT_STRIDE):
        return ""  # few are short
    if wanted >= stored:
        return f"set data.frame_stride={wanted // stored * stored} or "
    return f"make shards with --frame-stride {wanted} and set data.frame_stride={wanted}, or "


def count_shared_videos(one: ShardDataset, other: ShardDataset) -> int:
    """Count the videos of `one` that are in `other` too, by their bytes or, of the first ones, by their source."""
    known, sources = set(map(bytes, other.column("sha256"))), set(_list_sources(other))
    is_shared = [video in known for video in map(bytes, one.column("sha256"))]
    for sample, source in enumerate(_list_sources(one)):
        is_shared[sample] |= source in sources
    return sum(is_shared)


def _list_sources(dataset: ShardDataset) -> Iterator[str]:
    return (dataset.samples[sample].source for sample in range(min(MAX_SOURCES, len(dataset.samples))))
