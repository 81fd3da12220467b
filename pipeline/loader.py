"""Batches of clips on the device, ready before they are asked for."""

import atexit
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from devices import on_device
from pipeline.config import DataConfig
from pipeline.dataset import ShardDataset
from pipeline.graph import Graph, frames_decoded, in_plan_order
from pipeline.making import ClipMaker, Group, notice
from pipeline.plan import ClipPlan, PlanRow
from pipeline.workers import Task, Workers

DOWNLOAD_AHEAD = 64  # batches between the download of an object store's shard and its first use
# After so many, DALI is hardly the one to go on with.
MAX_HUNG_GRAPHS = 3  # each keeps its memory, and the run has waited for it
MAX_FAILED_GRAPHS = 3  # in a row, over videos that PyAV decodes; to build another takes long


@dataclass(frozen=True)
class Batch:
    """Clips of one micro-step, all on the device."""

    clip: UInt8[Tensor, "B C T H W"]  # RGB; a view of [B, T, H, W, C] memory, so not contiguous
    labels: Int64[Tensor, " B"]  # -1 where a video has none
    keys: list[str]  # of the videos that are shown
    positions: list[int]  # in the plan's stream


@dataclass
class _Job:
    """A batch in the making."""

    groups: list[Group]
    tasks: list[Task]
    clips: UInt8[Tensor, "B T H W C"] | None  # where PyAV writes; None: DALI does everything
    num_bytes: int  # held until the batch is out
    fed: list[Group] | None = None  # what the DALI graph is working on; None: not handed over yet


class Loader:
    """Reads, decodes and cuts the clips of a plan in background threads; a context manager."""

    def __init__(
        self, dataset: ShardDataset, plan: ClipPlan, device: torch.device, config: DataConfig, quarantine: Path | None
    ) -> None:
        """`quarantine`: file that gets a line for every video that cannot be decoded; None: they are only counted.

        Raises InputError if data.decoder is dali and the shards hold a codec that DALI does not know on this device.
        """
        self._dataset, self._plan, self._device, self._config = dataset, plan, device, config
        self._maker = ClipMaker(dataset, plan, device, config, quarantine)
        self._remote = dataset.is_remote
        self._workers = Workers(config.threads, "clips")
        self._dali_waiter = Workers(1, "dali")
        self._graph: Graph | None = None
        self._hung_graphs = 0
        self._failed_graphs = 0  # since DALI made a batch, or a bad video was the reason why not
        self._lent: Tensor | None = None  # DALI's memory that this batch is in, or is copied or changed from
        self._in_use: deque[tuple[torch.cuda.Event, Tensor]] = deque()  # what was lent for earlier ones, until an event
        atexit.register(self.close)  # threads must not be inside FFmpeg or DALI when the interpreter goes

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all threads; the frame that each is decoding is let finish."""
        atexit.unregister(self.close)
        self._maker.reader.close()  # first: workers may be waiting for a download
        self._workers.close()
        self._dali_waiter.close()
        self._graph = None

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
        self._graph = None  # an earlier iterator may have left batches in it
        self._give_back()
        self._top_up(jobs, numbers)
        while jobs:
            started = time.perf_counter()
            self._maker.count(batches_ready=sum(all(task.future.done() for task in job.tasks) for job in jobs))
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
            self._give_back()

    def _top_up(self, jobs: deque[_Job], numbers: Iterator[int]) -> None:
        """Have `prefetch` batches in the making, fewer if they are large."""
        limit = self._config.prefetch_mib * 2**20
        while len(jobs) < self._config.prefetch and (not jobs or sum(job.num_bytes for job in jobs) < limit):
            number = next(numbers)
            rows = self._plan.batch(number)
            if not rows:
                return
            if self._remote:
                self._maker.reader.expect(row.sample for row in self._plan.batch(number + DOWNLOAD_AHEAD))
            jobs.append(self._start(rows))

    def _start(self, rows: list[PlanRow]) -> _Job:
        views = self._plan.views
        groups = [Group(first, rows[first : first + views]) for first in range(0, len(rows), views)]
        clips = None if self._maker.all_by_dali else self._empty(len(rows))
        encoded = sum(self._dataset.samples[group.rows[0].sample].size for group in groups)
        cut = len(rows) * self._plan.num_frames * math.prod(self._plan.frame_size) * 3
        return _Job(groups, [self._submit(group, clips) for group in groups], clips, encoded + cut)

    def _empty(self, count: int) -> UInt8[Tensor, "B T H W C"]:
        pinned = self._device.type == "cuda"  # so that the copy to the device does not hold up the host
        shape = (count, self._plan.num_frames, *self._plan.frame_size, 3)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)

    def _submit(self, group: Group, clips: Tensor | None) -> Task:
        return self._workers.submit(lambda task: self._maker.make(task, group, clips))

    def _finish(self, job: _Job, later: Sequence[_Job]) -> UInt8[Tensor, "B T H W C"]:
        """Wait for a batch and put it on the device."""
        self._wait_for(job)
        if self._maker.without_dali:
            self._move_to_pyav(job)
        decoded = None
        try:
            graph = self._fed(job)
            if graph is not None:
                decoded = self._lent = self._take(job, graph)
                self._failed_graphs = 0
        except RuntimeError as error:
            self._rescue(job, later, str(error))
        fed = job.fed or []
        if decoded is not None:
            self._maker.count(frames_decoded=sum(frames_decoded(group.for_dali) for group in fed if group.for_dali))
            decoded = in_plan_order(decoded, [row for group in fed for row in group.rows])
            if len(fed) == len(job.groups):
                return decoded
        assert job.clips is not None
        clips = job.clips.to(self._device, non_blocking=True)
        if decoded is not None:
            places = [group.first + view for group in fed for view in range(len(group.rows))]
            clips[on_device(places, clips.device)] = decoded
        return clips

    def _augmented(self, job: _Job, clips: UInt8[Tensor, "B T H W C"]) -> UInt8[Tensor, "B T H W C"]:
        rows = [row for group in job.groups for row in group.rows]
        if not any(row.changes or row.erased for row in rows):
            return clips
        from pipeline.augment import augmented  # torchvision takes a second to import, and only fine-tuning needs it

        return augmented(
            clips, [row.changes for row in rows], [row.erased for row in rows], [row.position for row in rows]
        )

    def _take(self, job: _Job, graph: Graph) -> UInt8[Tensor, "B T H W C"]:
        """What DALI has made of a batch; raises RuntimeError if a video of it does not decode, or DALI hangs.

        DALI cannot be interrupted: a graph that hangs is left behind.
        """

        def take(_: Task) -> Tensor:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread begins with the first GPU
            return graph.take()

        task = self._dali_waiter.submit(take)
        try:
            return self._dali_waiter.result(task, self._config.decode_timeout_s)
        except TimeoutError as error:
            self._maker.count(hung=1)
            self._hung_graphs += 1
            names = ", ".join(self._dataset.where(group.rows[0].sample) for group in job.fed or [])
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
                    job.tasks[place] = self._submit(group, job.clips)

    def _batch(self, job: _Job, clips: UInt8[Tensor, "B T H W C"]) -> Batch:
        rows = [row for group in job.groups for row in group.rows]
        samples = [self._dataset.samples[row.sample] for row in rows]
        labels = [-1 if sample.label is None else sample.label for sample in samples]
        self._maker.delivered(len(rows))
        return Batch(
            clips.permute(0, 4, 1, 2, 3),
            on_device(labels, self._device),
            [sample.key for sample in samples],
            [row.position for row in rows],
        )

    def _give_back(self) -> None:
        """Keep DALI's memory until the device has done what is queued on it by now, then let DALI have it back."""
        if self._lent is not None and self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._in_use.append((event, self._lent))
        self._lent = None
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()

    def _feed_ready(self, jobs: Sequence[_Job]) -> None:
        """Hand over what has been read, in order, so that DALI decodes it while the step runs."""
        for job in jobs:
            if self._maker.without_dali or not all(task.future.done() for task in job.tasks):
                return
            self._wait_for(job)
            try:
                self._fed(job)
            except RuntimeError:  # of an earlier batch, most likely: whichever it is, it is met again at its turn
                self._drop_graph(jobs)
                return

    def _fed(self, job: _Job) -> Graph | None:
        """Give DALI the videos of a batch that are for it, once, and return the graph that works on them, if any are.

        Raises RuntimeError if DALI does not take them.
        """
        if job.fed is None:
            job.fed = [group for group in job.groups if group.for_dali]
            if job.fed:
                if self._graph is None:
                    most_videos = self._plan.batch_size // self._plan.views
                    self._graph = Graph(self._device, self._plan, most_videos, self._config.threads)
                self._graph.feed([(group.for_dali, group.rows) for group in job.fed if group.for_dali])
        return self._graph if job.fed else None

    def _drop_graph(self, jobs: Sequence[_Job]) -> None:
        """After an error the graph is not valid any more; what it was working on is fed to a new one."""
        self._graph = None
        for job in jobs:
            job.fed = None

    def _rescue(self, job: _Job, later: Sequence[_Job], error: str) -> None:
        """After an error of DALI's, PyAV cuts this batch, and finds the video that is bad, if one is.

        DALI does not name the culprit, so all videos of the batch go to PyAV from now on.
        """
        self._drop_graph(later)
        attempts = sum(group.attempt for group in job.groups)
        for group in job.groups:
            if group.for_dali:
                self._maker.keep_from_dali(group.rows[0].sample)
                self._maker.count(rescued_clips=len(group.rows))
        self._move_to_pyav(job)
        found_bad = sum(group.attempt for group in job.groups) > attempts
        self._failed_graphs = 0 if found_bad else self._failed_graphs + 1
        if self._failed_graphs >= MAX_FAILED_GRAPHS or self._hung_graphs >= MAX_HUNG_GRAPHS:
            self._maker.leave_dali()
            reason = " ".join(error.split())[:400]
            notice(
                f"DALI has failed again and again, the last time with '{reason}': PyAV decodes all from now on, on"
                f" {self._config.threads} CPU threads"
            )

    def _move_to_pyav(self, job: _Job) -> None:
        """Have PyAV cut what DALI was to cut of a batch, and wait for it."""
        if job.clips is None:
            job.clips = self._empty(sum(len(group.rows) for group in job.groups))
        for place, group in enumerate(job.groups):
            if group.for_dali:
                group.for_dali = None
                job.tasks[place] = self._submit(group, job.clips)
        self._wait_for(job)


COUNTERS = (
    *("clips", "batches_ready", "frames_delivered", "frames_decoded", "videos_read", "bytes_read"),
    *("bad_clips", "rescued_clips", "hung", "wait_seconds"),
    *("download_seconds", "read_seconds", "decode_seconds", "cache_hits"),
)
