"""Videos decoded in other processes: PyAV releases and takes Python's lock a hundred times a clip, and the threads of
one process would wait for each other, and for the training step, to get it back. A crash or hang costs one video.

Such a process imports this module, and with it PyAV and NumPy, but not PyTorch. It reads the shards by itself, and
leaves frames in memory that it shares with whom it works for.
"""

import math
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
from pipeline.shared_blocks import Block, SharedBlocks
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
    images: Block | None  # where they go; None: to the scratch memory, or their frames, if planes will do


class Decoded(NamedTuple):
    """What a task has left in the scratch memory, from `start` on: frames, or images [views, T, H, W, C]."""

    start: int
    frames: PlanarFrames | None
    counts: dict[str, float]  # see loader.COUNTERS


Reply = tuple[list[Decoded | VideoError], int] | Exception  # see carry_out_all


class Scratch:
    """Memory of a process that is used from its beginning for every call."""

    def __init__(self, memory: UInt8[np.ndarray, " bytes"]) -> None:
        self.memory = memory
        self.used = 0  # bytes

    def allocate(self, num_bytes: int) -> tuple[int, UInt8[np.ndarray, " num_bytes"]]:
        """Return the next bytes, behind the place where they begin."""
        start, self.used = self.used, self.used + num_bytes
        return start, self.memory[start : self.used]


class DecodeProcess:
    """A process that starts with the first tasks, and anew after it was ended: by itself, or for it hung.

    For one thread; only `close` may come from another one.
    """

    def __init__(self, memory: SharedBlocks, num_bytes: int, timeout: float) -> None:
        """num_bytes: what tasks need of scratch memory at most; timeout: seconds after which they count as hung."""
        self._memory, self._scratch = memory, Scratch(memory.allocate(num_bytes))
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def decode(self, tasks: Sequence[Task]) -> tuple[list[Decoded | VideoError], UInt8[np.ndarray, " bytes"]]:
        """Return what became of each task, and the scratch memory, which holds it until the next call.

        Raise HungError if that takes too long, VideoError if the process crashes, InputError or OSError where a shard
        cannot be read.
        """
        if self._closed:
            raise CancelledError
        if all(task.sample.container == arrays.CONTAINER for task in tasks):  # there is nothing to decode
            reply = carry_out_all(tasks, self._memory, self._scratch)
        else:
            reply = self._send(tasks)
        if isinstance(reply, Exception):
            raise reply
        results, used = reply
        return results, self._scratch.memory[:used]

    def close(self) -> None:
        """End the process, whatever it is doing; a call from another thread raises CancelledError."""
        if not self._closed:
            self._closed = True
            self._end()

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
        self._process, self._connection = start_process(answer, self._memory.fileno())
        if self._closed:  # meanwhile
            self._end()
        with self._explain_end(InputError, "a process for decoding"):
            self._connection.send(self._memory.find(self._scratch.memory))
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


def carry_out(task: Task, memory: SharedBlocks, scratch: Scratch) -> Decoded:
    started = time.perf_counter()
    video = task.video.read() if isinstance(task.video, LocalClip) else task.video
    read = time.perf_counter()
    source, start, cut = find_source(video.data), scratch.used, (video, task.sample, task.rows)
    frames = None if task.images else source.copy_planes(*cut, task.size, scratch.allocate)
    if frames is not None:
        num_decoded = frames.num_decoded
    else:
        shape = len(task.rows), len(video.numbers), *task.size, arrays.count_channels([task.sample.codec])
        images = memory.view(task.images) if task.images else scratch.allocate(math.prod(shape))[1]
        num_decoded = source.cut_views(*cut, images.reshape(shape))
    counts = {
        "videos_read": 1, "bytes_read": len(video.data), "frames_decoded": num_decoded,
        "read_seconds": read - started, "decode_seconds": time.perf_counter() - read,
    }  # fmt: skip
    return Decoded(start, frames, counts)


def carry_out_all(tasks: Sequence[Task], memory: SharedBlocks, scratch: Scratch) -> Reply:
    """Return what becomes of each task, and how much of the scratch memory holds it; or an error that is not a
    video's."""
    scratch.used = 0
    results: list[Decoded | VideoError] = []
    try:
        for task in tasks:
            try:
                results.append(carry_out(task, memory, scratch))
            except VideoError as error:
                results.append(error)
    except (InputError, OSError) as error:  # of the shard
        return error
    return results, scratch.used


def answer(socket: int, file: int) -> None:
    """Carry out tasks, in such a process, until nobody is left who could send some."""
    connection, memory = Connection(socket), SharedBlocks(file)
    with suppress(OSError, EOFError):
        scratch = Scratch(memory.view(connection.recv()))
        connection.send("ready")
        while True:
            connection.send(carry_out_all(connection.recv(), memory, scratch))
