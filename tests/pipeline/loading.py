"""Helpers of the loader's tests: short plans, what clips show, and the processes of workers."""

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


def plan_of(dataset: ShardDataset, config: DataConfig, **settings: int) -> TrainingPlan:
    """Plan batches of 4 clips of 8 frames of 32x32, unless `settings` say otherwise."""
    defaults = {"num_frames": 8, "image_size": 32, "seed": 0, "batch_size": 4}
    return TrainingPlan(dataset, config, **{**defaults, **settings})


@contextmanager
def open_loader(
    dataset: ShardDataset, config: DataConfig, quarantine: Path | None = None, **settings: int
) -> Iterator[tuple[TrainingPlan, ClipLoader]]:
    """Open a loader on the CPU; `settings` are those of plan_of."""
    plan = plan_of(dataset, config, **settings)
    with ClipLoader(dataset, plan, CPU, config, quarantine) as loader:
        yield plan, loader


def first_batches(
    dataset: ShardDataset, config: DataConfig, count: int, first: int = 0, **settings: int
) -> list[Batch]:
    """Load `count` batches from number `first` on."""
    with open_loader(dataset, config, **settings) as (_, loader):
        return list(islice(loader.batches(first), count))


def check_first(
    dataset: ShardDataset, config: DataConfig, count: int, **settings: int
) -> dict[str, float]:
    """Check that the first batches are the plan's; return the loader's counters."""
    with open_loader(dataset, config, **settings) as (plan, loader):
        check_frames(list(islice(loader.batches(0), count)), plan, dataset)
        return loader.counters


def check_frames(
    batches: list[Batch],
    plan: ClipPlan,
    dataset: ShardDataset,
    first: int = 0,
    bad: Collection[str] = (),
) -> int:
    """Check that each batch is the plan's; frame k of video i shows number i + k.

    Videos with keys `bad` must have been replaced as planned; return how many clips were.
    """
    num_replaced = 0
    for index, batch in enumerate(batches, first):
        rows = plan.batch(index)
        assert batch.positions == [row.position for row in rows]
        for row, key, clip in zip(rows, batch.keys, batch.clip, strict=True):
            used = find_intact(row, plan, dataset, bad)
            if used is not row:
                num_replaced += 1
            assert key == dataset.samples[used.sample].key
            shown = [read_number(frame) for frame in clip.cpu().numpy()]
            assert shown == [(frame + int(key[1:])) % LEVELS for frame in used.frames]
    return num_replaced


def find_intact(
    row: PlanRow, plan: ClipPlan, dataset: ShardDataset, bad: Collection[str]
) -> PlanRow:
    """Return a row, or the first of its replacements whose video has no key in `bad`."""
    used = row
    attempt = 0
    while dataset.samples[used.sample].key in bad:
        attempt += 1
        replacement = plan.replacement(row, attempt)
        assert replacement is not None
        used = replacement
    return used


class RowsPlan(ClipPlan):
    """Batches of given rows; those of a video follow each other."""

    def __init__(
        self, rows: list[PlanRow], frame_size: FrameSize, crops_per_decode: int, batch_size: int
    ) -> None:
        self.rows = rows
        self.num_frames = len(rows[0].frames)
        self.frame_size = frame_size
        self.batch_size = batch_size
        self.crops_per_decode = crops_per_decode

    def positions(self, batch: int) -> range:
        first = batch * self.batch_size
        return range(len(self.rows))[first : first + self.batch_size]

    def row(self, position: int) -> PlanRow:
        return self.rows[position]


def plan_one_video(length: int, crop: Crop) -> RowsPlan:
    """Clips of one video at many starts and strides, also beyond its end."""
    clips: list[tuple[int, ...]] = []
    for stride in (1, 2, 3, 5, 7):
        start_step = 1 if stride == 1 else 3
        starts = range(0, length - 3 * stride, start_step)
        clips += [tuple(range(start, start + 4 * stride, stride)) for start in starts]
    last = length - 1
    clips += [(last, last, last, last), (last - 1, last, last, last), (0, 0, last, last)]
    rows = [PlanRow(position, 0, frames, crop, flip=False) for position, frames in enumerate(clips)]
    return RowsPlan(rows, FrameSize(32, 32), 1, batch_size=20)


def list_workers() -> list[int]:
    """List the decode workers of this process."""
    thread = threading.main_thread().native_id
    workers = []
    for pid in Path(f"/proc/self/task/{thread}/children").read_text().split():
        command = Path(f"/proc/{pid}/cmdline").read_text()
        if worker_pool.WORKER in command:
            workers.append(int(pid))
    return workers
