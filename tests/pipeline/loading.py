"""Shared by the tests of the loader: short plans, what clips show, and processes that others have started."""

import signal
import time
from collections.abc import Collection
from itertools import islice
from pathlib import Path

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


def first_batches(dataset: ShardDataset, config: DataConfig, count: int, first: int = 0, **others: int) -> list[Batch]:
    with ClipLoader(dataset, plan_of(dataset, config, **others), CPU, config, None) as loader:
        return list(islice(loader.batches(first), count))


def numbers_in(clip: torch.Tensor) -> list[int]:
    """Read the frame numbers that a clip [T, H, W, C] shows."""
    return [read_number(frame) for frame in clip.cpu().numpy()]


def check_frames(batches: list[Batch], plan: ClipPlan, dataset: ShardDataset, first: int = 0) -> None:
    """Check that each batch is the plan's; frame k of video i shows number i + k."""
    check_replaced(batches, plan, dataset, (), first)


def check_replaced(
    batches: list[Batch], plan: ClipPlan, dataset: ShardDataset, bad: Collection[str], first: int = 0
) -> int:
    """Check the same where the videos with keys `bad` are replaced as planned. Return how many clips were."""
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
            assert numbers_in(clip) == [(frame + int(key[1:])) % LEVELS for frame in used.frames]
    return num_replaced


class OneVideoPlan(ClipPlan):
    """Clips of one video at many starts and strides, also beyond its end."""

    views, num_frames, frame_size, batch_size = 1, 4, FrameSize(32, 32), 20

    def __init__(self, length: int, crop: Crop) -> None:
        clips = [
            tuple(range(start, start + 4 * stride, stride))
            for stride in (1, 2, 3, 5, 7)
            for start in range(0, length - 3 * stride, 1 if stride == 1 else 3)
        ]
        clips += [(length - 1,) * 4, (length - 2, length - 1, length - 1, length - 1), (0, 0, length - 1, length - 1)]
        self.rows = [PlanRow(place, 0, frames, crop, flip=False) for place, frames in enumerate(clips)]

    def batch(self, index: int) -> list[PlanRow]:
        return self.rows[index * self.batch_size : (index + 1) * self.batch_size]


def list_descendants(pid: int) -> list[int]:
    found = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return found + [pid for child in found for pid in list_descendants(child)]


def wait_for_the_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "they are still there"
        time.sleep(0.01)


def take_interrupts() -> None:
    """Undo what a shell does to programs in its background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()  # nobody may have asked how it ended
    except (FileNotFoundError, ProcessLookupError):
        return False
