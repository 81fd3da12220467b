"""Shared by the tests of the loader: short plans, what clips show, and processes that others have started."""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from made_videos import LEVELS, read_number

from adamae.pipeline import worker_pool
from adamae.pipeline.config import DataConfig
from adamae.pipeline.loader import Batch, ClipLoader
from adamae.pipeline.planning.crops import Crop, FrameSize
from adamae.pipeline.planning.plan import ClipPlan, PlanRow, TrainingPlan
from adamae.pipeline.shards.dataset import ShardDataset

CPU = torch.device("cpu")


def plan_of(dataset: ShardDataset, config: DataConfig, **others: int) -> TrainingPlan:
    settings = {"num_frames": 8, "image_size": 32, "seed": 0, "batch_size": 4, **others}
    return TrainingPlan(dataset, config, **settings)


@contextmanager
def open_loader(
    dataset: ShardDataset, config: DataConfig, quarantine: Path | None = None, **others: int
) -> Iterator[tuple[TrainingPlan, ClipLoader]]:
    plan = plan_of(dataset, config, **others)
    with ClipLoader(dataset, plan, CPU, config, quarantine) as loader:
        yield plan, loader


def first_batches(
    dataset: ShardDataset, config: DataConfig, count: int, first: int = 0, **others: int
) -> list[Batch]:
    with open_loader(dataset, config, **others) as (_, loader):
        return list(islice(loader.batches(first), count))


def check_first(
    dataset: ShardDataset, config: DataConfig, count: int, **others: int
) -> dict[str, float]:
    """Check that the first batches are the plan's; return the loader's counters."""
    with open_loader(dataset, config, **others) as (plan, loader):
        check_frames(list(islice(loader.batches(0), count)), plan, dataset)
        return loader.counters


def check_frames(
    batches: list[Batch],
    plan: ClipPlan,
    dataset: ShardDataset,
    first: int = 0,
    bad: Collection[str] = (),
) -> int:
    """Check that each batch is the plan's; frame k of video i shows number i + k. Return how many clips were replaced,
    as planned: those of videos with keys `bad`."""
    num_replaced = 0
    for index, batch in enumerate(batches, first):
        assert batch.positions == [row.position for row in plan.batch(index)]
        for row, key, clip in zip(plan.batch(index), batch.keys, batch.clip, strict=True):
            used, attempt = row, 0
            while dataset.samples[used.sample].key in bad:
                attempt += 1
                replacement = plan.replacement(row, attempt)
                assert replacement is not None
                used = replacement
            num_replaced += attempt > 0
            assert key == dataset.samples[used.sample].key
            shown = [read_number(frame) for frame in clip.cpu().numpy()]
            assert shown == [(frame + int(key[1:])) % LEVELS for frame in used.frames]
    return num_replaced


class RowsPlan(ClipPlan):
    """Batches of given rows; those of a video follow each other."""

    def __init__(
        self, rows: list[PlanRow], frame_size: FrameSize, crops_per_decode: int, batch_size: int
    ) -> None:
        self.rows, self.num_frames, self.frame_size = rows, len(rows[0].frames), frame_size
        self.batch_size, self.crops_per_decode = batch_size, crops_per_decode

    def positions(self, batch: int) -> range:
        return range(len(self.rows))[batch * self.batch_size : (batch + 1) * self.batch_size]

    def row(self, position: int) -> PlanRow:
        return self.rows[position]


def plan_one_video(length: int, crop: Crop) -> RowsPlan:
    """Clips of one video at many starts and strides, also beyond its end."""
    clips = [
        tuple(range(start, start + 4 * stride, stride))
        for stride in (1, 2, 3, 5, 7)
        for start in range(0, length - 3 * stride, 1 if stride == 1 else 3)
    ]
    clips += [
        (length - 1,) * 4,
        (length - 2, length - 1, length - 1, length - 1),
        (0, 0, length - 1, length - 1),
    ]
    rows = [PlanRow(place, 0, frames, crop, flip=False) for place, frames in enumerate(clips)]
    return RowsPlan(rows, FrameSize(32, 32), 1, batch_size=20)


def list_workers() -> list[int]:
    """List the decode workers of this process."""
    children = (
        Path(f"/proc/self/task/{threading.main_thread().native_id}/children").read_text().split()
    )
    return [
        int(pid)
        for pid in children
        if worker_pool.WORKER in Path(f"/proc/{pid}/cmdline").read_text()
    ]
