"""What worker threads do for a batch: read a video, cut its clips or leave that to DALI, replace it if it is bad."""

import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.decoding.policy import DecoderPolicy, Way
from pipeline.decoding.upload import HostClips
from pipeline.decoding.video_error import VideoError
from pipeline.decoding.workers import Task
from pipeline.planning.plan import ClipPlan, PlanRow
from pipeline.quarantine import Quarantine
from pipeline.reading.reader import Reader
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.gops import VideoSlice

Image = UInt8[np.ndarray, "H W C"]  # made once: every such type is kilobytes, kept until all garbage is collected
MAX_ATTEMPTS = 100  # videos tried in a row for one clip


@dataclass
class DecodeJob:
    """Clips cut from one video with one decode."""

    first: int  # place of the first one in the batch
    rows: list[PlanRow]
    batch: int  # its number
    may_use_dali: bool  # as DecoderPolicy says
    attempt: int = 0  # how many videos before this one could not be decoded
    for_dali: VideoSlice | None = None  # what it is to decode, kept until the clips are out
    way: Way | None = None  # how DALI is to decode that


class ClipDecoder:
    """Safe to use from many threads."""

    def __init__(
        self, dataset: ShardDataset, plan: ClipPlan, device: torch.device, config: DataConfig, quarantine: Path | None
    ) -> None:
        self._dataset, self._plan, self.reader = dataset, plan, Reader(dataset, plan)
        self._quarantine = Quarantine(dataset, quarantine, config.max_bad_fraction)
        self.policy = DecoderPolicy(dataset, device, config)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def counts(self) -> Counter[str]:
        """Sums since the start; seconds are those of all threads together."""
        with self._lock:
            return self._counts + self._dataset.cache.counts

    def count(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount  # type: ignore[assignment]  # seconds are counted too

    def make(self, task: Task, group: DecodeJob, host: HostClips) -> None:
        """Read what the group needs; write its clips to `host`, or leave the bytes in `group.for_dali`.

        A video that does not decode is replaced as the plan says. Raises InputError if too many do not, or if the
        plan allows none.
        """
        while not task.abandoned:
            sample = group.rows[0].sample
            try:
                self.reader.download(sample, task)
                started = time.perf_counter()
                cut = self.reader.clip(sample, group.rows[0].frames)
                self.count(videos_read=1, bytes_read=len(cut.data), read_seconds=time.perf_counter() - started)
                way = self.policy.way(sample, cut, group.batch) if group.may_use_dali else None
                if way:
                    group.way, group.for_dali = way, cut
                else:
                    self._cut(task, group, cut, host.clips)
                return
            except VideoError as error:
                if not task.abandoned:
                    self.replace(group, str(error))

    def replace(self, group: DecodeJob, reason: str) -> None:
        """Put another video in the place of one that cannot be decoded, and write that one down."""
        sample = group.rows[0].sample
        group.attempt += 1
        rows = [self._plan.replacement(row, group.attempt) for row in group.rows]
        found = [row for row in rows if row is not None]
        if len(found) < len(rows) or group.attempt > MAX_ATTEMPTS:
            raise InputError(f"{self._dataset.where(sample)} cannot be decoded: {reason}")
        self.count(bad_clips=len(rows))
        self._quarantine.add(sample, reason, len(rows))
        group.rows = found

    def delivered(self, clips: int) -> None:
        """Tell that a batch of so many clips is out."""
        self._quarantine.delivered(clips)
        self.count(clips=clips, frames_delivered=clips * self._plan.num_frames)

    def _cut(self, task: Task, group: DecodeJob, cut: VideoSlice, clips: UInt8[Tensor, "B T H W C"]) -> None:
        from pipeline.decoding.scaling import cut_views  # PyAV, which may be missing where DALI takes all

        images = clips.numpy()

        def store(view: int, time: int, image: Image) -> None:
            with task.lock:
                if not task.abandoned:
                    images[group.first + view, time] = image

        sample = self._dataset.samples[group.rows[0].sample]
        started = time.perf_counter()
        decoded = cut_views(cut, sample, group.rows, self._plan.frame_size, store)
        self.count(frames_decoded=decoded, decode_seconds=time.perf_counter() - started)
