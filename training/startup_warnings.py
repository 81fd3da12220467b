"""Warn of data that a run will hardly learn from, before it starts."""

import numpy as np

from pipeline.config import DataConfig
from pipeline.shards.dataset import ShardDataset
from training.config import TrainConfig

MAX_CHECKED = 2**20  # videos of each dataset; shards hold them in random order


def startup_warnings(config: TrainConfig, dataset: ShardDataset) -> list[str]:
    """Return a sentence for each finding."""
    found = warn_of_short_videos(dataset, config.data, config.model.num_frames)
    if config.evaluation.shards:
        held_out = ShardDataset.open(config.evaluation.shards, config.data)
        if shared := count_shared_videos(held_out, dataset):
            found.append(
                f"WARNING: {shared} of {len(held_out.samples)} videos of evaluation.shards are also trained on:"
                " evaluation results will be optimistically biased"
            )
    return found


def warn_of_short_videos(dataset: ShardDataset, data: DataConfig, num_frames: int) -> list[str]:
    """Return a sentence on the videos with fewer frames than a clip spans, if there are any."""
    stored = dataset.column("num_frames", MAX_CHECKED).astype(np.int64)
    needed = np.full_like(stored, num_frames)
    if data.sampling == "strided":
        stored_stride = np.maximum(1, dataset.column("frame_stride", MAX_CHECKED).astype(np.int64))
        needed = (num_frames - 1) * (data.frame_stride // stored_stride) + 1
    short = stored < needed
    if not short.any():
        return []
    checked = str(len(stored)) if len(stored) == len(dataset.samples) else f"the first {len(stored)}"
    repeated = "their last frame is repeated" if data.sampling == "strided" else "frames are repeated"
    return [
        f"WARNING: {short.sum()} of {checked} videos are shorter than a clip (the shortest has {stored[short].min()} of"
        f" {needed[short].max()} frames): {repeated}; lower data.frame_stride or model.num_frames"
    ]


def count_shared_videos(one: ShardDataset, other: ShardDataset) -> int:
    """Count the videos of `one` that are in `other` too, by their bytes."""
    known = set(map(bytes, other.column("sha256")))
    return sum(video in known for video in map(bytes, one.column("sha256")))
