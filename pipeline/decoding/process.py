"""Videos decoded in other processes: PyAV releases and takes Python's lock a hundred times a clip, and the threads of
one process wait for each other to get it back.

Run as a module, with the numbers of two inherited files, this is such a process. It imports PyAV and NumPy, but not
PyTorch.
"""

import mmap
import os
import signal
import subprocess
import sys
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from jaxtyping import UInt8

from pipeline.decoding.planes import Allocate, PlanarFrames, StoreFrame, WriteFrame
from pipeline.decoding.video_source import VideoSource
from pipeline.planning.crops import FrameSize
from pipeline.planning.plan import PlanRow
from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice
from pipeline.video_error import VideoError


class SharedMemory:
    """Memory without a name: nothing is left of it when the processes that know its file have ended."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._bytes = np.empty(0, np.uint8)
        self.used = 0  # bytes that were taken last

    def take(self, num_bytes: int) -> UInt8[np.ndarray, " num_bytes"]:
        """Return the first `num_bytes` of it."""
        if num_bytes > len(self._bytes):
            if num_bytes > os.fstat(self.file).st_size:
                os.ftruncate(self.file, num_bytes)
            self._bytes = np.frombuffer(mmap.mmap(self.file, num_bytes), np.uint8)
        self.used = num_bytes
        return self._bytes[:num_bytes]


class VideoProcess(VideoSource):
    """Decodes in another process, which starts with the first video, and anew after one that hangs or crashes.

    For one thread; only `close` may come from another one.
    """

    def __init__(self, timeout: float) -> None:
        """timeout: seconds after which a video counts as hung."""
        self._timeout = timeout
        self._memory = SharedMemory(os.memfd_create("clips"))
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def copy_planes(
        self, video: VideoSlice, sample: Sample, rows: list[PlanRow], size: FrameSize, allocate: Allocate
    ) -> PlanarFrames | None:
        frames, num_bytes = self._call(copy_planes, video, sample, rows, size)
        if frames is None:
            return None
        address, memory = allocate(num_bytes)
        memory[:] = self._memory.take(num_bytes)
        return frames._replace(offsets=[address + offset for offset in frames.offsets])

    def cut_views(
        self, video: VideoSlice, sample: Sample, rows: list[PlanRow], size: FrameSize, store: StoreFrame
    ) -> int:
        num_decoded, num_bytes = self._call(cut_views, video, sample, rows, size)
        images = self._memory.take(num_bytes).reshape(len(rows), len(video.numbers), *size, 3)
        for view, time in np.ndindex(images.shape[:2]):
            store(view, time, partial(np.copyto, src=images[view, time]))
        return num_decoded

    def close(self) -> None:
        """End the process, whatever it is doing; a call from another thread raises CancelledError."""
        self._closed = True
        self._end()

    def _call(self, *request: object) -> Any:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        try:
            self._connection.send(request)
            if not self._connection.poll(self._timeout):
                self._end()
                raise VideoError(f"decoding took more than {self._timeout:g} s")
            reply = self._connection.recv()
        except (OSError, EOFError) as error:
            code = self._process.wait()
            if self._closed:
                raise CancelledError from error
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise VideoError(f"the process that decoded it {how}") from error
        if isinstance(reply, VideoError):
            raise reply
        return reply

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        files = theirs.fileno(), self._memory.file
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.decoding.process", *map(str, files)],
            pass_fds=files, stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the process that this one works for
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        theirs.close()


def copy_planes(
    memory: SharedMemory, video: VideoSlice, sample: Sample, rows: list[PlanRow], size: FrameSize
) -> tuple[PlanarFrames | None, int]:
    """Return frames and how many bytes of `memory` hold them."""
    frames = VideoSource().copy_planes(video, sample, rows, size, lambda num_bytes: (0, memory.take(num_bytes)))
    return frames, memory.used


def cut_views(
    memory: SharedMemory, video: VideoSlice, sample: Sample, rows: list[PlanRow], size: FrameSize
) -> tuple[int, int]:
    """Return how many frames were decoded, and how many bytes of `memory` hold the images [views, T, H, W, 3]."""
    shape = len(rows), len(video.numbers), size.height, size.width, 3
    images = memory.take(int(np.prod(shape))).reshape(shape)

    def store(view: int, time: int, write: WriteFrame) -> None:
        write(images[view, time])

    return VideoSource().cut_views(video, sample, rows, size, store), memory.used


def answer_calls(connection: Connection, memory: SharedMemory) -> None:
    """Answer until nobody is left who could ask."""
    with suppress(OSError, EOFError):
        while True:
            function, *task = connection.recv()
            try:
                reply: object = function(memory, *task)
            except VideoError as error:
                reply = error
            connection.send(reply)


if __name__ == "__main__":
    number, file = map(int, sys.argv[1:])
    answer_calls(Connection(number), SharedMemory(file))
