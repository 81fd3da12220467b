"""Shared by the tests of the loader: short plans, and what clips show."""

from itertools import islice

import torch
from made_videos import LEVELS, read_number

from pipeline.config import DataConfig
from pipeline.loader import Batch, ClipLoader
from pipeline.planning.crops import Crop, FrameSize
from pipeline.planning.plan import ClipPlan, PlanRow, TrainingPlan
from pipeline.shards.dataset import ShardDataset

CPU = torch.device("cpu")


def plan_of(dataset: ShardDataset, config: DataConfig, **others: int) -> TrainingPlan:
    settings = {"num_frames": 8, "image_size": 32, "seed": 0, "batch_size": 4, **others}
    return TrainingPlan(dataset, config, **settings)


def first_batches(dataset: ShardDataset, config: DataConfig, count: int, first: int = 0) -> list[Batch]:
    with ClipLoader(dataset, plan_of(dataset, config), CPU, config, None) as loader:
        return list(islice(loader.batches(first), count))


def numbers_in(clip: torch.Tensor) -> list[int]:
    """Frame numbers that a clip [T, H, W, C] shows."""
    return [read_number(frame) for frame in clip.numpy()]


def check_frames(batches: list[Batch], plan: ClipPlan, first: int = 0) -> None:
    """Each batch is the plan's, and frame k of video i shows number i + k."""
    for index, batch in enumerate(batches, first):
        assert batch.positions == [row.position for row in plan.batch(index)]
        for row, key, clip in zip(plan.batch(index), batch.keys, batch.clip, strict=True):
            assert numbers_in(clip) == [(frame + int(key[1:])) % LEVELS for frame in row.frames]


class OneVideoPlan(ClipPlan):
    """Clips of one video at every start and stride, also beyond its end."""

    views, num_frames, frame_size, batch_size = 1, 4, FrameSize(32, 32), 20

    def __init__(self, length: int, crop: Crop) -> None:
        clips = [
            tuple(range(start, start + 4 * stride, stride))
            for stride in (1, 2, 3, 5, 7)
            for start in range(length - 3 * stride)
        ]
        clips += [(length - 1,) * 4, (length - 2, length - 1, length - 1, length - 1), (0, 0, length - 1, length - 1)]
        self.rows = [PlanRow(place, 0, 0, frames, crop, flip=False) for place, frames in enumerate(clips)]

    def batch(self, index: int) -> list[PlanRow]:
        return self.rows[index * self.batch_size : (index + 1) * self.batch_size]

    def replacement(self, row: PlanRow, attempt: int) -> None:
        return None
