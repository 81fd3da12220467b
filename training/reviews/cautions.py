"""What a run should be warned of before it begins, with counts."""

import numpy as np

from pipeline.config import DataConfig
from pipeline.shards.dataset import ShardDataset
from training.config import TrainConfig

LOOKED_AT = 2**20  # videos of each dataset; they were put into shards in random order


def cautions(config: TrainConfig, dataset: ShardDataset) -> list[str]:
    """Sentences; none where there is nothing to say."""
    found = [short_videos(dataset, config.data, config.model.num_frames)]
    if config.evaluation.shards:
        validation = ShardDataset.open(config.evaluation.shards, config.data)
        if both := shared_videos(validation, dataset):
            found.append(
                f"warning: {both} of {len(validation.samples)} videos of evaluation.shards are learnt from"
                " too: what is right there says little of other videos"
            )
    return [sentence for sentence in found if sentence]


def short_videos(dataset: ShardDataset, data: DataConfig, num_frames: int) -> str:
    """A sentence on the videos with fewer frames than a clip reaches over; "" where there are none."""
    stored = dataset.column("num_frames", LOOKED_AT).astype(np.int64)
    needed = np.full_like(stored, num_frames)
    if data.sampling == "strided":
        thinned = np.maximum(1, dataset.column("frame_stride", LOOKED_AT).astype(np.int64))
        needed = (num_frames - 1) * (data.frame_stride // thinned) + 1
    short = stored < needed
    if not short.any():
        return ""
    seen = str(len(stored)) if len(stored) == len(dataset.samples) else f"the first {len(stored)}"
    how = "their last frame is repeated" if data.sampling == "strided" else "frames are repeated"
    return (
        f"warning: {short.sum()} of {seen} videos are shorter than a clip (from {stored[short].min()} stored"
        f" frames on, of {needed[short].max()}): {how}; a lower data.frame_stride or model.num_frames helps"
    )


def shared_videos(one: ShardDataset, other: ShardDataset) -> int:
    """How many videos of `one` are in `other` too, by their bytes."""
    known = set(map(bytes, other.column("sha256")))
    return sum(video in known for video in map(bytes, one.column("sha256")))
