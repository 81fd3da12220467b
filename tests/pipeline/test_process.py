"""Processes that decode are replaced when they hang or crash, and end with their user."""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import UInt8
from loading import CPU, check_replaced, plan_of, take_interrupts, wait_for_the_end
from made_videos import broken_copy, encode
from test_planes import CROPS, NUMBERS, SIZE, make_on_cpu, make_on_device, make_rows, make_sample

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.decoding.clip_decoder import ClipDecoder, DecodeJob
from pipeline.decoding.process import Decoded, DecodeProcess, HungError, Task
from pipeline.decoding.upload import HostClips
from pipeline.loader import ClipLoader
from pipeline.planning.crops import Crop
from pipeline.reading.reader import LocalClip
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.gops import VideoSlice
from pipeline.shared_blocks import SharedBlocks
from pipeline.video_error import VideoError

DATA = encode(16, pattern=True)
VIDEO, SAMPLE = VideoSlice(DATA, NUMBERS, 16), make_sample()
CONFIG = DataConfig(frame_stride=1, num_threads=2, max_bad_fraction=0.9)


MEMORY = SharedBlocks()


def make_process() -> DecodeProcess:
    return DecodeProcess(MEMORY, num_bytes=2**20, timeout=20)


@pytest.fixture
def process() -> Iterator[DecodeProcess]:
    process = make_process()
    yield process
    process.close()


def allocate_images(*crops: Crop) -> UInt8[np.ndarray, "views T H W 3"]:
    return MEMORY.allocate(len(crops) * len(NUMBERS) * SIZE.height * SIZE.width * 3).reshape(-1, len(NUMBERS), *SIZE, 3)


def make_task(images: np.ndarray | None, *crops: Crop, video: VideoSlice = VIDEO) -> Task:
    return Task(video, SAMPLE, make_rows(*crops), SIZE, None if images is None else MEMORY.find(images))


def cut(process: DecodeProcess) -> None:
    """Have one clip cut."""
    images = allocate_images(CROPS[0])
    ((decoded,), _) = process.decode([make_task(images, CROPS[0])])
    assert isinstance(decoded, Decoded)
    assert (images == make_on_cpu(DATA, make_rows(CROPS[0]), SAMPLE).numpy()).all()


def test_several_videos_are_decoded_one_behind_the_other(process: DecodeProcess) -> None:
    """Images, planes, and what is wrong with a video; again with fewer."""
    bad = [VideoSlice(b"no video", NUMBERS, 16), VideoSlice(DATA[:900], NUMBERS, 16)]
    for crops in (CROPS, CROPS[:1]):
        images, others, more = allocate_images(*crops), allocate_images(*crops), allocate_images(CROPS[1])
        tasks = [make_task(images, *crops), *(make_task(others, *crops, video=video) for video in bad)]
        tasks += [make_task(None, *crops), make_task(more, CROPS[1])]
        (decoded, *faults, planes, _), scratch = process.decode(tasks)
        for video, fault in zip(bad, faults, strict=True):
            with pytest.raises(VideoError) as error:
                make_on_cpu(video.data, make_rows(*crops), SAMPLE)
            assert isinstance(fault, VideoError)
            assert str(fault) == str(error.value)
        assert isinstance(decoded, Decoded)
        assert decoded.counts["bytes_read"] == len(DATA)
        for found, shown in ((images, crops), (more, CROPS[1:2])):
            assert (found == make_on_cpu(DATA, make_rows(*shown), SAMPLE).numpy()).all()
        assert isinstance(planes, Decoded)
        assert planes.frames is not None
        host = HostClips((len(crops), len(NUMBERS), *SIZE, 3), None, takes_frames=True)
        host.allocate(len(scratch))[1][:] = scratch
        host.add_frames(0, make_rows(*crops), planes.frames)
        assert torch.equal(host.on_device(), make_on_device(DATA, make_rows(*crops), SAMPLE))


def stop(process: DecodeProcess) -> int:
    """Have the process hang; return its number."""
    cut(process)
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGSTOP)
    return process._process.pid


def before_the_answer(process: DecodeProcess, happens: Callable[[], object]) -> None:
    """Have something happen after the next tasks are sent."""
    poll = process._connection.poll

    def let_happen(timeout: float) -> bool:
        happens()
        return poll(timeout)

    process._connection.poll = let_happen  # type: ignore[assignment, method-assign]


def test_a_process_that_hangs_or_crashes_is_replaced(process: DecodeProcess) -> None:
    hung = stop(process)
    process._timeout = 0.2
    with pytest.raises(HungError, match=r"took more than 0\.2 s"):
        cut(process)
    process._timeout = 20
    crashing = stop(process)
    assert crashing != hung
    before_the_answer(process, lambda: os.kill(crashing, signal.SIGKILL))
    with pytest.raises(VideoError, match="was ended by SIGKILL"):
        cut(process)
    cut(process)


@pytest.mark.parametrize(("name", "error"), [("nothing.tar", InputError), ("", IsADirectoryError)])
def test_a_shard_that_cannot_be_read_is_no_fault_of_its_videos(
    process: DecodeProcess, tmp_path: Path, name: str, error: type[Exception]
) -> None:
    task = make_task(None, CROPS[0])._replace(video=LocalClip(tmp_path / name, SAMPLE, None, NUMBERS))
    with pytest.raises(error):
        process.decode([make_task(None, CROPS[0]), task])
    cut(process)


def test_no_file_stays_open() -> None:
    gc.collect()  # of other tests
    before = os.listdir("/proc/self/fd")
    process = make_process()
    cut(process)
    process.close()
    del process
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_the_whole_job_ends_no_process(process: DecodeProcess, number: signal.Signals) -> None:
    cut(process)
    used = process._process
    assert used is not None
    used.send_signal(number)
    cut(process)
    assert process._process is used


def test_closing_is_no_fault_of_the_video_that_is_decoded(process: DecodeProcess) -> None:
    stop(process)
    before_the_answer(process, process.close)
    for _ in range(2):
        with pytest.raises(CancelledError):
            cut(process)


@pytest.mark.parametrize("error", [VideoError("ended by SIGSEGV"), HungError("decoding took long")])
def test_only_the_video_that_ends_a_process_is_replaced(
    short_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: VideoError
) -> None:
    """The others of the same call are decoded once more, by themselves."""
    dataset, report = ShardDataset.open(short_shards), tmp_path / "quarantine.jsonl"
    plan, fatal, decode = plan_of(dataset, CONFIG), dataset.samples[3].key, DecodeProcess.decode

    def crash(self: DecodeProcess, tasks: Sequence[Task]) -> object:
        if any(task.sample.key == fatal for task in tasks):
            raise error
        return decode(self, tasks)

    monkeypatch.setattr(DecodeProcess, "decode", crash)
    with ClipLoader(dataset, plan, CPU, CONFIG, report) as loader:
        assert check_replaced(list(islice(loader.batches(0), 6)), plan, dataset, {fatal}) > 0
        assert (loader.counters["timeouts"] > 0) == isinstance(error, HungError)
    (line,) = map(json.loads, report.read_text().splitlines())
    assert (line["key"], line["reason"]) == (fatal, str(error))


def test_frames_for_the_device_come_from_processes_as_well(short_shards: Path, tmp_path: Path) -> None:
    bad = {"v02", "v05"}
    for dataset in (ShardDataset.open(short_shards), broken_copy(short_shards, tmp_path / "broken", bad)):
        plan = plan_of(dataset, CONFIG)
        with ClipLoader(dataset, plan, CPU, CONFIG, None) as loader:
            loader._host.takes_frames = True
            batches = list(islice(loader.batches(0), 6))
            there = bad if "broken" in str(dataset.folder) else ()
            assert check_replaced(batches, plan, dataset, there) <= loader.counters["bad_clips"]


@pytest.mark.parametrize(("batch_size", "at_once"), [(2, {1}), (6, {3}), (24, {4})])
def test_small_batches_keep_all_processes_busy(
    short: ShardDataset, monkeypatch: pytest.MonkeyPatch, batch_size: int, at_once: set[int]
) -> None:
    """Two threads and two batches: at least two calls for each thread."""
    calls: list[int] = []
    decode = ClipDecoder.decode

    def decode_counted(self: ClipDecoder, jobs: Sequence[DecodeJob]) -> None:
        calls.append(len(jobs))
        decode(self, jobs)

    monkeypatch.setattr(ClipDecoder, "decode", decode_counted)
    config = replace(CONFIG, prefetch=2)
    with ClipLoader(short, plan_of(short, config, batch_size=batch_size), CPU, config, None) as loader:
        next(loader.batches(0))
    assert set(calls) == at_once


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from test_process import cut, make_process
process = make_process()
cut(process)
print(process._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_whom_it_works_for(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(path=sys.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=take_interrupts,
    ) as worked_for:  # fmt: skip
        assert worked_for.stdout is not None
        pid = int(worked_for.stdout.readline())
        worked_for.send_signal(number)
        worked_for.wait(20)
    wait_for_the_end([pid])
