"""What worker threads do for a batch: read a video, cut its clips or leave that to DALI, replace it if it is bad."""

import os
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from errors import InputError
from pipeline.config import DataConfig
from pipeline.dataset import ShardDataset
from pipeline.graph import CPU_CODECS, dali_is_installed
from pipeline.groups import Cut
from pipeline.nvdec import Limits, NvdecError, read_limits
from pipeline.plan import ClipPlan, PlanRow
from pipeline.quarantine import Quarantine
from pipeline.reader import Reader
from pipeline.video_error import VideoError
from pipeline.workers import Task
from terminal import say

Image = UInt8[np.ndarray, "H W C"]  # made once: every such type is kilobytes, kept until all garbage is collected
MAX_ATTEMPTS = 100  # videos tried in a row for one clip


@dataclass
class Group:
    """Clips cut from one video with one decode."""

    first: int  # place of the first one in the batch
    rows: list[PlanRow]
    attempt: int = 0  # how many videos before this one could not be decoded
    for_dali: Cut | None = None  # what it is to decode, kept until the clips are out


class ClipMaker:
    """Safe to use from many threads."""

    def __init__(
        self, dataset: ShardDataset, plan: ClipPlan, device: torch.device, config: DataConfig, quarantine: Path | None
    ) -> None:
        self._dataset, self._plan, self.reader = dataset, plan, Reader(dataset)
        self._quarantine = Quarantine(dataset, quarantine, config.max_bad_share)
        self._by_dali = _codecs_for_dali(dataset, device, config)
        # Shards made by re-encoding hold nothing that decoders disagree about; videos copied into them may.
        self._all_plain = not dataset.holds_copies
        self._is_plain: dict[int, bool] = {}  # of the copied samples that have been looked at
        self._failed_in_dali: set[int] = set()
        self.all_by_dali = self._all_plain and _takes_all(self._by_dali, dataset)
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

    def make(self, task: Task, group: Group, clips: UInt8[Tensor, "B T H W C"] | None) -> None:
        """Read what the group needs; write its clips to `clips`, or leave the bytes in `group.for_dali`.

        A video that does not decode is replaced as the plan says. Raises InputError if too many do not, or if the
        plan allows none. Where `clips` is None, everything goes to DALI.
        """
        while not task.abandoned:
            sample = group.rows[0].sample
            try:
                self.reader.download(sample, task)
                started = time.perf_counter()
                cut = self.reader.clip(sample, group.rows[0].frames)
                self.count(videos_read=1, bytes_read=len(cut.data), read_seconds=time.perf_counter() - started)
                if clips is None or self._goes_to_dali(sample, cut.data):
                    group.for_dali = cut
                else:
                    self._cut(task, group, cut, clips)
                return
            except VideoError as error:
                if not task.abandoned:
                    self.replace(group, str(error))

    def replace(self, group: Group, reason: str) -> None:
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

    def keep_from_dali(self, sample: int) -> None:
        """Have PyAV decode this video from now on."""
        self._failed_in_dali.add(sample)
        self.all_by_dali = False

    def leave_dali(self) -> None:
        """Have PyAV decode all videos from now on."""
        self._by_dali = {}
        self.all_by_dali = False

    @property
    def without_dali(self) -> bool:
        return not self._by_dali

    def _suits_dali(self, sample: int) -> bool:
        video = self._dataset.samples[sample]
        limits = self._by_dali.get(video.codec)
        return limits is not None and limits.admit(video.width, video.height) and sample not in self._failed_in_dali

    def _goes_to_dali(self, sample: int, data: bytes) -> bool:
        if not self._suits_dali(sample):
            return False
        if self._all_plain:
            return True
        if sample not in self._is_plain:
            from pipeline.video import is_plain  # likewise

            self._is_plain[sample] = is_plain(data, self._dataset.samples[sample].num_frames)
        return self._is_plain[sample]

    def _cut(self, task: Task, group: Group, cut: Cut, clips: UInt8[Tensor, "B T H W C"]) -> None:
        from pipeline.cutting import cut_views  # PyAV, which may be missing where DALI takes all

        images = clips.numpy()

        def store(view: int, time: int, image: Image) -> None:
            with task.lock:
                if not task.abandoned:
                    images[group.first + view, time] = image

        sample = self._dataset.samples[group.rows[0].sample]
        started = time.perf_counter()
        decoded = cut_views(cut, sample, group.rows, self._plan.frame_size, store)
        self.count(frames_decoded=decoded, decode_seconds=time.perf_counter() - started)


def _codecs_for_dali(dataset: ShardDataset, device: torch.device, config: DataConfig) -> dict[str, Limits]:
    """On the CPU, PyAV is the faster one for every codec, so DALI decodes there only if asked to."""
    on_gpu = device.type == "cuda"
    if config.decoder == "pyav" or (config.decoder == "auto" and not on_gpu):
        return {}
    known, reason = _known_to_dali(device)
    unknown = ", ".join(sorted(dataset.info.codecs.keys() - known.keys()))
    if not unknown:
        return known
    sentence = f"DALI does not decode {unknown} on {device.type}{reason}, and {dataset.folder} holds it"
    if config.decoder == "dali":
        raise InputError(f"{sentence}: set data.decoder to auto")
    notice(f"{sentence}: PyAV does, on {config.threads} CPU threads", once_a_node=True)
    return known


def _takes_all(known: dict[str, Limits], dataset: ShardDataset) -> bool:
    """Whether DALI takes every video, as far as codec and sides tell."""
    return all(name in known and known[name].admit_all(sides) for name, sides in dataset.info.codecs.items())


def _known_to_dali(device: torch.device) -> tuple[dict[str, Limits], str]:
    """Codecs, and where there are none, the reason."""
    if not dali_is_installed():
        return {}, ", since nvidia-dali is not installed"
    if device.type == "cpu":
        return dict.fromkeys(CPU_CODECS, Limits()), ""
    try:
        return read_limits(device), ""
    except NvdecError as error:
        return {}, f", since {error}"


def notice(sentence: str, once_a_node: bool = False) -> None:
    """Tell the user of something that costs speed but stops nothing."""
    if not once_a_node or os.environ.get("LOCAL_RANK", "0") == "0":
        say(f"note: {sentence}", sys.stderr)
