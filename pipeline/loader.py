"""Batches of clips on the device, ready before they are asked for."""

import atexit
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from common.devices import add_device_index, to_device
from pipeline.config import DataConfig, Decoder
from pipeline.decoding.clip_decoder import ClipDecoder, DecodeJob
from pipeline.decoding.dali import Dali, Part
from pipeline.decoding.policy import may_share, notice
from pipeline.decoding.sharing import TIMED_BATCHES, RunDecoders, clips_per_second
from pipeline.decoding.upload import Copy, HostClips, Uploads
from pipeline.decoding.workers import Task, Workers
from pipeline.planning.plan import ClipPlan, PlanRow
from pipeline.shards.dataset import ShardDataset


@dataclass(frozen=True)
class Batch:
    """Clips of one micro-step, all on the device."""

    clip: UInt8[Tensor, "B T H W C"]  # contiguous, on the device
    labels: Int64[Tensor, " B"]  # -1 where a video has none
    keys: list[str]  # of the videos that are shown
    positions: list[int]  # in the plan's stream


@dataclass
class _Job:
    """A batch in the making."""

    number: int
    groups: list[DecodeJob]
    tasks: list[Task]
    host: HostClips  # where PyAV writes
    num_bytes: int  # held until the batch is out
    copy: Copy | None = None  # of `host`, on its way to the device
    parts: list[Part] | None = None  # what DALI is working on; None: not handed over yet

    @property
    def rows(self) -> list[PlanRow]:
        return [row for group in self.groups for row in group.rows]

    @property
    def for_dali(self) -> list[int]:
        """Places of the groups that may be DALI's."""
        return [place for place, group in enumerate(self.groups) if group.may_use_dali]

    def is_ready(self, places: Iterable[int]) -> bool:
        """Whether these groups are read and, if they are PyAV's, cut."""
        futures = [self.tasks[place].future for place in places]
        return all(future.done() and not future.exception() for future in futures)


class ClipLoader:
    """Reads, decodes and cuts the clips of a plan in background threads; a context manager."""

    def __init__(
        self,
        dataset: ShardDataset,
        plan: ClipPlan,
        device: torch.device,
        config: DataConfig,
        quarantine: Path | None,
        sharing: Path | float | None = 1.0,
    ) -> None:
        """`quarantine`: file that gets a line for every video that cannot be decoded; None: they are only counted.

        `sharing`: of the clips that DALI takes, how many it decodes. None: if that is for us to find (data.decoder),
        both decoders are timed. A file: it keeps what was found, for when the run goes on.

        Raises InputError if data.decoder is dali and the shards hold a codec that DALI does not know on this device.
        """
        device = add_device_index(device)
        self._dataset, self._plan, self._device, self._config = dataset, plan, device, config
        self._maker = ClipDecoder(dataset, plan, device, config, quarantine)
        self._channels = dataset.channels
        self._policy = self._maker.policy
        self._run: RunDecoders | None = None
        if isinstance(sharing, float):
            self._policy.give_dali(sharing)
        elif not self._policy.without_dali:
            self._run = RunDecoders(sharing, device, config, plan, self._policy)
            if may_share(device, config):
                self._run.share(self._clips_per_second)
        self._workers = Workers(config.threads, "clips")
        self._dali = Dali(device, plan, self._policy.dali_threads, config.decode_timeout_s)
        self._uploads = Uploads(device)
        atexit.register(self.close)  # threads must not be inside FFmpeg or DALI when the interpreter goes

    def __enter__(self) -> "ClipLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all threads; the frame that each is decoding is let finish."""
        atexit.unregister(self.close)
        self._maker.reader.close()  # first: workers may be waiting for a download
        self._workers.close()
        self._dali.close()

    @property
    def counters(self) -> dict[str, float]:
        """Sums since the start, of this process."""
        counts = self._maker.counts
        return {name: float(counts[name]) for name in COUNTERS}

    def batches(self, first: int) -> Iterator[Batch]:
        """The plan's batches from number `first` on, endless if the plan is; one iterator at a time.

        Clips from DALI lie in DALI's memory: use them on the stream that is current when the next batch is asked for,
        or copy them. Raises InputError if too many videos are bad.
        """
        numbers = iter(range(first, 2**62))
        jobs: deque[_Job] = deque()
        self._dali.drop()  # an earlier iterator may have left batches in it
        self._dali.give_back()
        self._top_up(jobs, numbers)
        while jobs:
            started = time.perf_counter()
            self._maker.count(batches_ready=sum(all(task.future.done() for task in job.tasks) for job in jobs))
            self._feed_ready(jobs)
            job = jobs.popleft()
            clips = self._finish(job, jobs)
            self._top_up(jobs, numbers)
            self._feed_ready(jobs)
            clips = self._augmented(job, clips)
            self._maker.count(wait_seconds=time.perf_counter() - started)
            batch = self._batch(job, clips)
            yield batch
            while self._config.cached_batch:
                yield batch
            self._dali.give_back()

    def _top_up(self, jobs: deque[_Job], numbers: Iterator[int]) -> None:
        """Have `prefetch` batches in the making, fewer if they are large."""
        limit = self._config.prefetch_mib * 2**20
        while len(jobs) < self._config.prefetch and (not jobs or sum(job.num_bytes for job in jobs) < limit):
            number = next(numbers)
            rows = self._plan.batch(number)
            if not rows:
                return
            self._maker.reader.reach(jobs[0].number if jobs else number)
            jobs.append(self._start(number, rows))

    def _start(self, number: int, rows: list[PlanRow]) -> _Job:
        plan, views = self._plan, self._plan.views
        turn = number * (plan.batch_size // views)
        groups = [
            DecodeJob(first, part, number, self._policy.may_use_dali(part[0].sample, number, turn + first // views))
            for first in range(0, len(rows), views)
            for part in [rows[first : first + views]]
        ]
        host = HostClips((len(rows), plan.num_frames, *plan.frame_size, self._channels), self._device.type == "cuda")
        encoded = sum(self._dataset.samples[group.rows[0].sample].size for group in groups)
        return _Job(
            number, groups, [self._submit(group, host) for group in groups], host, encoded + math.prod(host.shape)
        )

    def _submit(self, group: DecodeJob, host: HostClips) -> Task:
        # DALI begins with a batch as soon as its part is read, however much PyAV still has to do.
        return self._workers.submit(lambda task: self._maker.make(task, group, host), is_urgent=group.may_use_dali)

    def _finish(self, job: _Job, later: Sequence[_Job]) -> UInt8[Tensor, "B T H W C"]:
        """Wait for a batch and put it on the device."""
        started = time.perf_counter()
        self._wait_for(job)
        cut = time.perf_counter()
        if self._policy.has_left(job.number):
            self._move_to_pyav(job)
        decoded: list[tuple[Part, Tensor]] = []
        try:
            decoded = [(part, self._take(part)) for part in self._fed(job)]
            if decoded:
                self._dali.worked()
        except RuntimeError as error:
            self._rescue(job, later, str(error))
        else:
            if self._run:
                following = (later[-1] if later else job).number + 1
                self._run.waited(job.number, cut - started, time.perf_counter() - cut, following)
        for part, _ in decoded:
            frames = sum(part.graph.frames_decoded(group.for_dali) for group in part.groups if group.for_dali)
            self._maker.count(dali_clips=len(part.rows), frames_decoded=frames)
        return self._joined(job, decoded)

    def _joined(self, job: _Job, decoded: list[tuple[Part, Tensor]]) -> UInt8[Tensor, "B T H W C"]:
        """What DALI and PyAV have made of a batch."""
        if len(decoded) == 1 and len(decoded[0][0].groups) == len(job.groups):
            return decoded[0][1]
        clips = self._uploads.finish(job.copy or self._uploads.start(job.host))
        for part, made in decoded:
            places = [group.first + view for group in part.groups for view in range(len(group.rows))]
            for place, clip in zip(places, made, strict=True):
                clips[place].copy_(clip)  # all at once, by their indices, a CPU goes byte by byte: 9 times as long
        return clips

    def _augmented(self, job: _Job, clips: UInt8[Tensor, "B T H W C"]) -> UInt8[Tensor, "B T H W C"]:
        rows = job.rows
        if not any(row.augment_ops or row.erase_box for row in rows):
            return clips
        from pipeline.augment import augmented  # torchvision takes a second to import, and only fine-tuning needs it

        return augmented(
            clips, [row.augment_ops for row in rows], [row.erase_box for row in rows], [row.position for row in rows]
        )

    def _take(self, part: Part) -> UInt8[Tensor, "B T H W C"]:
        """What DALI has made of its part; raises RuntimeError if a video of it does not decode, or DALI hangs."""
        try:
            return self._dali.take(part)
        except TimeoutError as error:
            self._maker.count(hung=1)
            names = ", ".join(self._dataset.where(group.rows[0].sample) for group in part.groups)
            raise RuntimeError(f"no answer for {self._config.decode_timeout_s:g} s to one of {names}") from error

    def _wait_for(self, job: _Job) -> None:
        """Wait until all videos of a batch are read and PyAV's part of it is cut."""
        for place in range(len(job.groups)):
            while True:
                try:
                    self._workers.result(job.tasks[place], self._config.decode_timeout_s)
                    break
                except TimeoutError:
                    self._maker.count(hung=1)
                    # The thread that hangs may still change the old group.
                    group = job.groups[place] = replace(job.groups[place])
                    self._maker.replace(group, f"decoding took more than {self._config.decode_timeout_s:g} s")
                    job.tasks[place] = self._submit(group, job.host)

    def _batch(self, job: _Job, clips: UInt8[Tensor, "B T H W C"]) -> Batch:
        rows = job.rows
        samples = [self._dataset.samples[row.sample] for row in rows]
        labels = [-1 if sample.label is None else sample.label for sample in samples]
        self._maker.delivered(len(rows))
        return Batch(
            clips,
            to_device(labels, self._device),
            [sample.key for sample in samples],
            [row.position for row in rows],
        )

    def _feed_ready(self, jobs: Sequence[_Job]) -> None:
        """Hand over what has been read, in order, so that DALI decodes it while the step runs, and have the next batch
        brought to the device, as far as PyAV makes it."""
        for job in jobs:
            if job is jobs[0] and job.copy is None and job.is_ready(range(len(job.groups))) and job.host.is_used:
                job.copy = self._uploads.start(job.host)
            if not job.is_ready(job.for_dali):
                return
            try:
                self._fed(job)
            except RuntimeError:  # of an earlier batch, most likely: whichever it is, it is met again at its turn
                self._drop_graphs(jobs)
                return

    def _fed(self, job: _Job) -> list[Part]:
        """Give DALI the videos of a batch that are for it, once. Raises RuntimeError if DALI does not take them."""
        if job.parts is None:
            job.parts = [] if self._policy.has_left(job.number) else self._dali.feed(job.groups)
        return job.parts

    def _drop_graphs(self, jobs: Sequence[_Job]) -> None:
        """After an error; what was under way is fed to new ones."""
        self._dali.drop()
        for job in jobs:
            job.parts = None

    def _rescue(self, job: _Job, later: Sequence[_Job], error: str) -> None:
        """After an error of DALI's, PyAV cuts this batch, and finds the video that is bad, if one is.

        DALI does not name the culprit, so all videos of the batch go to PyAV, from the first batch on that has surely
        not been begun.
        """
        self._drop_graphs(later)
        attempts = sum(group.attempt for group in job.groups)
        failed = [group for group in job.groups if group.way]
        self._ban_from_dali([group.rows[0].sample for group in failed], job.number, job.number + self._config.prefetch)
        self._maker.count(rescued_clips=sum(len(group.rows) for group in failed))
        self._move_to_pyav(job)
        found_bad = sum(group.attempt for group in job.groups) > attempts
        if self._dali.failed(found_bad):
            self._ban_from_dali(None, job.number, job.number)
            reason = " ".join(error.split())[:400]
            notice(
                f"DALI has failed again and again, the last time with '{reason}': PyAV decodes all from now on, on"
                f" {self._config.threads} CPU threads"
            )

    def _ban_from_dali(self, samples: Sequence[int] | None, failed: int, since: int) -> None:
        self._policy.ban_from_dali(samples, failed, since)
        if self._run:
            self._run.ban_from_dali(samples, failed, since)

    def _move_to_pyav(self, job: _Job) -> None:
        """Have PyAV cut what DALI was to cut of a batch, and wait for it."""
        for place, group in enumerate(job.groups):
            if group.way:
                job.copy = None
                group.way, group.for_dali, group.may_use_dali = None, None, False
                job.tasks[place] = self._submit(group, job.host)
        self._wait_for(job)

    def _clips_per_second(self, plan: ClipPlan, decoder: Decoder) -> float:
        """How fast one decoder makes the clips of a plan that repeats itself."""
        config = replace(self._config, decoder=decoder, cached_batch=False)
        with ClipLoader(self._dataset, plan, self._device, config, None) as loader:
            return clips_per_second(loader, decoder, warm_up=TIMED_BATCHES if self._dataset.is_remote else 2)


COUNTERS = (
    *("clips", "dali_clips", "batches_ready", "frames_delivered", "frames_decoded", "videos_read", "bytes_read"),
    *("bad_clips", "rescued_clips", "hung", "wait_seconds"),
    *("download_seconds", "read_seconds", "decode_seconds", "cache_hits"),
)
