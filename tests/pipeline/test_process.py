"""Processes that decode give what threads give, are replaced when they hang or crash, and end with their user."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from itertools import islice
from pathlib import Path

import pytest
import torch
from loading import CPU, check_frames, check_replaced, plan_of
from made_videos import broken_copy, encode
from test_planes import CROPS, NUMBERS, SIZE, make_on_cpu, make_rows, make_sample

from pipeline.config import MAX_THREADS_OF_ONE_PROCESS, DataConfig
from pipeline.decoding.process import VideoProcess
from pipeline.decoding.upload import HostClips
from pipeline.decoding.video_source import VideoSource
from pipeline.loader import ClipLoader
from pipeline.planning.plan import PlanRow
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.gops import VideoSlice
from pipeline.video_error import VideoError

DATA = encode(16, pattern=True)
VIDEO, SAMPLE = VideoSlice(DATA, NUMBERS, 16), make_sample()
PROCESSES = DataConfig(frame_stride=1, processes=True, num_threads=2, max_bad_fraction=0.9)


@pytest.fixture
def process() -> Iterator[VideoProcess]:
    process = VideoProcess(timeout=20)
    yield process
    process.close()


def cut(source: VideoSource, video: VideoSlice = VIDEO, rows: list[PlanRow] | None = None) -> torch.Tensor:
    rows = rows or make_rows(CROPS[0])
    clips = torch.empty(len(rows), len(video.numbers), *SIZE, 3, dtype=torch.uint8)
    source.cut_views(video, SAMPLE, rows, SIZE, lambda view, time, write: write(clips[view, time].numpy()))  # type: ignore[arg-type, return-value]
    return clips


def test_images_and_planes_are_those_of_a_thread(process: VideoProcess) -> None:
    """Of one clip, of more, for which the shared memory grows, and of one again."""
    for rows in (make_rows(CROPS[0]), make_rows(*CROPS), make_rows(CROPS[1], flip=True)):
        assert torch.equal(cut(process, rows=rows), make_on_cpu(DATA, rows, SAMPLE))
        made = []
        for source in (process, VideoSource()):
            host = HostClips((len(rows), len(NUMBERS), *SIZE, 3), None, takes_frames=True)
            host.allocate(100)  # frames need not come first in the memory of a batch
            frames = source.copy_planes(VIDEO, SAMPLE, rows, SIZE, host.allocate)
            assert frames is not None
            assert frames.num_decoded > 0
            host.add_frames(0, rows, frames)
            made.append(host.on_device())
        assert torch.equal(*made)


def test_what_is_wrong_with_a_video_is_said_by_the_process(process: VideoProcess) -> None:
    for bad in (VideoSlice(b"no video", NUMBERS, 16), VideoSlice(DATA[:900], NUMBERS, 16)):
        messages = []
        for source in (process, VideoSource()):
            with pytest.raises(VideoError) as error:
                cut(source, bad)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
    cut(process)


def stop(process: VideoProcess) -> int:
    """Have the process hang; return its number."""
    cut(process)
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGSTOP)
    return process._process.pid


def test_a_process_that_hangs_or_crashes_costs_its_video(process: VideoProcess) -> None:
    hung = stop(process)
    process._timeout = 0.2
    with pytest.raises(VideoError, match=r"took more than 0\.2 s"):
        cut(process)
    process._timeout = 20
    crashing = stop(process)
    assert crashing != hung
    killer = threading.Timer(0.2, os.kill, (crashing, signal.SIGKILL))
    killer.start()
    with pytest.raises(VideoError, match="was ended by SIGKILL"):
        cut(process)
    cut(process)


def test_closing_is_no_fault_of_the_video_that_is_decoded(process: VideoProcess) -> None:
    stop(process)
    closer = threading.Timer(0.2, process.close)
    closer.start()
    with pytest.raises(CancelledError):
        cut(process)


def test_the_loader_uses_processes_and_ends_them(short_shards: Path, tmp_path: Path) -> None:
    bad = {"v02", "v05"}
    for dataset in (ShardDataset.open(short_shards), broken_copy(short_shards, tmp_path / "broken", bad)):
        plan = plan_of(dataset, PROCESSES)
        for scales_on_device in (False, True):
            with ClipLoader(dataset, plan, CPU, PROCESSES, None) as loader:
                loader.scales_on_device = scales_on_device
                batches = list(islice(loader.batches(0), 6))
                if "broken" in str(dataset.folder):
                    assert check_replaced(batches, plan, dataset, bad) <= loader.counters["bad_clips"]
                else:
                    check_frames(batches, plan, dataset)
                processes = loader._decoder._processes
                assert len(processes) == PROCESSES.num_threads
            assert all(used._process and used._process.returncode is not None for used in processes)


def test_processes_are_for_more_threads_than_one_process_keeps_busy() -> None:
    most = MAX_THREADS_OF_ONE_PROCESS
    assert [DataConfig(num_threads=number).uses_processes for number in (most, most + 1)] == [False, True]
    assert DataConfig(num_threads=1, processes=True).uses_processes


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from test_process import VideoProcess, cut
process = VideoProcess(20)
cut(process)
print(process._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_whom_it_works_for(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(path=sys.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worked_for:
        assert worked_for.stdout is not None
        pid = int(worked_for.stdout.readline())
        worked_for.send_signal(number)
        worked_for.wait(20)
    deadline = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()  # nobody may have asked how it ended
    except (FileNotFoundError, ProcessLookupError):
        return False
