"""Videos decoded in other processes: PyAV releases and takes Python's lock a hundred times a clip, and the threads of
one process would wait for each other, and for the training step, to get it back. A crash or hang costs one video.

Such a process imports this module, and with it PyAV and NumPy, but not PyTorch. It reads the shards by itself, and
leaves frames in memory that it shares with whom it works for.
"""

import math
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from common.errors import InputError
from pipeline.decoding.planes import PlanarFrames
from pipeline.decoding.sources import find_source
from pipeline.planning.crops import FrameSize
from pipeline.planning.plan import PlanRow
from pipeline.reading.reader import LocalClip
from pipeline.shards import arrays
from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice
from pipeline.video_error import VideoError

# Which schedulers send to every process of a run, for it to save what it has done. To be run before all imports.
IGNORE_SIGNALS = "import signal as s; [s.signal(n, s.SIG_IGN) for n in (s.SIGHUP, s.SIGTERM, s.SIGUSR1, s.SIGUSR2)]"


class HungError(VideoError):
    """Decoding takes too long."""


class Task(NamedTuple):
    """Clips to cut from one video."""

    video: VideoSlice | LocalClip
    sample: Sample
    rows: list[PlanRow]
    size: FrameSize
    takes_frames: bool  # whether planes will do (see HostClips)


class Decoded(NamedTuple):
    """What a task has left in the shared memory."""

    start: int  # of the images [views, T, H, W, C]
    frames: PlanarFrames | None  # instead of images; their offsets are places in the shared memory
    counts: dict[str, float]  # see loader.COUNTERS


Reply = tuple[list[Decoded | VideoError], int] | Exception  # see carry_out_all


class SharedMemory:
    """Memory without a name: nothing is left of it when the processes that know its file have ended."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.used = 0  # bytes, of this process's allocations
        self._bytes = np.empty(0, np.uint8)  # what is mapped

    def allocate(self, num_bytes: int) -> tuple[int, UInt8[np.ndarray, " num_bytes"]]:
        """Return the next bytes, behind the place where they begin."""
        start, self.used = self.used, self.used + num_bytes
        if self.used > os.fstat(self.file).st_size:
            os.ftruncate(self.file, self.used)
        return start, self.map(self.used)[start:]

    def map(self, num_bytes: int) -> UInt8[np.ndarray, " num_bytes"]:
        """Return the first bytes."""
        if num_bytes > len(self._bytes):
            self._bytes = np.frombuffer(mmap.mmap(self.file, num_bytes), np.uint8)
        return self._bytes[:num_bytes]


class DecodeProcess:
    """A process that starts with the first tasks, and anew after it was ended: by itself, or for it hung.

    For one thread; only `close` may come from another one.
    """

    def __init__(self, timeout: float) -> None:
        """timeout: seconds after which tasks count as hung."""
        self._timeout = timeout
        self._memory = SharedMemory(os.memfd_create("clips"))
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def decode(self, tasks: Sequence[Task]) -> tuple[list[Decoded | VideoError], UInt8[np.ndarray, " bytes"]]:
        """Return what became of each task, and the shared memory, which holds it until the next call.

        Raise HungError if that takes too long, VideoError if the process crashes, InputError or OSError where a shard
        cannot be read.
        """
        if self._closed:
            raise CancelledError
        if all(task.sample.container == arrays.CONTAINER for task in tasks):  # there is nothing to decode
            reply = carry_out_all(tasks, self._memory)
        else:
            reply = self._send(tasks)
        if isinstance(reply, Exception):
            raise reply
        results, used = reply
        return results, self._memory.map(used)

    def close(self) -> None:
        """End the process, whatever it is doing; a call from another thread raises CancelledError."""
        if not self._closed:
            self._closed = True
            self._end()
            os.close(self._memory.file)

    def _send(self, tasks: Sequence[Task]) -> Reply:
        if self._process is None or self._process.poll() is not None:
            self._start()
        with self._explain_end(VideoError, "the process that decoded it"):
            self._connection.send(tasks)
            if not self._connection.poll(self._timeout):
                self._end()
                raise HungError(f"reading and decoding took more than {self._timeout:g} s")
            reply: Reply = self._connection.recv()
        return reply

    def _start(self) -> None:
        self._process, self._connection = start_process(answer, self._memory.file)
        if self._closed:  # meanwhile
            self._end()
        with self._explain_end(InputError, "a process for decoding"):
            self._connection.recv()  # once it has imported all it needs

    @contextmanager
    def _explain_end(self, kind: type[Exception], name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            assert self._process is not None
            how = describe_end(self._process)
            if self._closed:
                raise CancelledError from error
            raise kind(f"{name} {how}") from error

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()


def start_process(serve: Callable[[int, int], None], file: int) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that calls `serve` with a socket, whose other end is returned, and with `file`, open there."""
    ours, theirs = Pipe()
    files = theirs.fileno(), file
    process = subprocess.Popen(
        [sys.executable, "-c", f"{IGNORE_SIGNALS}; from {serve.__module__} import {serve.__name__} as f; f{files}"],
        pass_fds=files, stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the process that this one works for
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    theirs.close()
    return process, ours


def describe_end(process: "subprocess.Popen[bytes]") -> str:
    """Wait for the end of a process, and say how it came."""
    code = process.wait()
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def carry_out(task: Task, memory: SharedMemory) -> Decoded:
    started = time.perf_counter()
    video = task.video.read() if isinstance(task.video, LocalClip) else task.video
    read = time.perf_counter()
    source, start, cut = find_source(video.data), memory.used, (video, task.sample, task.rows)
    frames = source.copy_planes(*cut, task.size, memory.allocate) if task.takes_frames else None
    if frames is not None:
        num_decoded = frames.num_decoded
    else:
        shape = len(task.rows), len(video.numbers), *task.size, arrays.count_channels([task.sample.codec])
        start, images = memory.allocate(math.prod(shape))
        num_decoded = source.cut_views(*cut, images.reshape(shape))
    counts = {
        "videos_read": 1, "bytes_read": len(video.data), "frames_decoded": num_decoded,
        "read_seconds": read - started, "decode_seconds": time.perf_counter() - read,
    }  # fmt: skip
    return Decoded(start, frames, counts)


def carry_out_all(tasks: Sequence[Task], memory: SharedMemory) -> Reply:
    """Return what becomes of each task, and how much memory holds it; or an error that is not a video's."""
    memory.used = 0
    results: list[Decoded | VideoError] = []
    try:
        for task in tasks:
            try:
                results.append(carry_out(task, memory))
            except VideoError as error:
                results.append(error)
    except (InputError, OSError) as error:  # of the shard
        return error
    return results, memory.used


def answer(socket: int, file: int) -> None:
    """Carry out tasks, in such a process, until nobody is left who could send some."""
    connection, memory = Connection(socket), SharedMemory(file)
    with suppress(OSError, EOFError):
        connection.send("ready")
        while True:
            connection.send(carry_out_all(connection.recv(), memory))
