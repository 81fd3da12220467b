"""HostLoader in a process of its own: whenever its threads or the plan hold Python's lock, a training step would wait.

Clips come in memory that both processes know: nothing of them is sent or copied.
"""

import subprocess
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.decoding.policy import DecoderPolicy
from pipeline.decoding.process import describe_end, start_process
from pipeline.host_loader import HostBatch, HostLoader
from pipeline.planning.plan import ClipPlan
from pipeline.shards.dataset import ShardDataset
from pipeline.shared_blocks import SharedBlocks

AHEAD = 2  # batches that are asked for: one is uploaded during a training step, the next is waiting


class LoaderProcess:
    """HostLoader's counterpart. `pending` are the batches that are ready."""

    takes_frames = False  # see HostClips

    def __init__(
        self,
        dataset: ShardDataset,
        plan: ClipPlan,
        config: DataConfig,
        quarantine: Path | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._made_of, self._stream = (dataset, plan, config, quarantine), stream
        self._process: subprocess.Popen[bytes] | None = None
        self._in_upload: list[HostBatch] = []  # or waiting for it
        self._earlier, self._newest = Counter[str](), Counter[str]()  # counts of earlier processes, of this one
        self._has_ended = False  # the plan
        self.pending: deque[HostBatch] = deque()

    @property
    def counts(self) -> Counter[str]:
        """Sums since the start; seconds are summed over threads."""
        return self._earlier + self._newest

    def start(self, first: int) -> None:
        """Begin with the plan's batch number `first`, in a new process."""
        self.close()
        self._earlier, self._newest = self.counts, Counter()
        self._has_ended = False
        self._memory = SharedBlocks(is_pinned=self._stream is not None)
        self._process, self._connection = start_process(serve, self._memory.fileno())
        with self._explain_end():
            self._connection.send((*self._made_of, self.takes_frames, first))
        for _ in range(AHEAD):
            self._ask()

    def take(self) -> HostBatch | None:
        """Wait for the next batch; None: the plan has ended. Raise what HostLoader raises, and InputError if the
        process has ended."""
        while not self.pending and not self._has_ended:
            self._receive()
        return self.pending.popleft() if self.pending else None

    def top_up(self) -> None:
        """Ask for one more batch, and look which ones have come."""
        self._ask()
        while self._connection.poll():
            self._receive()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None
        self._connection.close()
        self.pending.clear()
        self._in_upload.clear()
        if self._stream is not None:
            self._stream.synchronize()
        self._memory.close()

    def _ask(self) -> None:
        """Ask for a batch, and tell whose memory is no longer needed."""
        uploaded = [batch.number for batch in self._in_upload if batch.host.is_uploaded]
        self._in_upload = [batch for batch in self._in_upload if batch.number not in uploaded]
        with self._explain_end():
            self._connection.send(uploaded)

    def _receive(self) -> None:
        with self._explain_end():
            reply = self._memory.loads(self._connection.recv_bytes())
        if isinstance(reply, Exception):
            raise reply
        batch, self._newest = reply
        if batch is None:
            self._has_ended = True
            return
        batch.host.stream = self._stream
        self._in_upload.append(batch)
        self.pending.append(batch)

    @contextmanager
    def _explain_end(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            assert self._process is not None
            raise InputError(
                f"the process that loads clips {describe_end(self._process)}; if memory was short, lower data.prefetch"
                " or data.num_threads"
            ) from error


def serve(socket: int, file: int) -> None:
    """Load batches, in such a process, whenever one is asked for, until nobody is left who could ask."""
    connection, memory = Connection(socket), SharedBlocks(file)
    lent: dict[int, HostBatch] = {}  # whose memory is still needed, by their numbers
    with suppress(ConnectionError, EOFError):
        try:
            dataset, plan, config, quarantine, takes_frames, first = connection.recv()
            policy = DecoderPolicy(dataset, torch.device("cpu"), replace(config, decoder="pyav"))
            loader = HostLoader(dataset, plan, policy, config, quarantine, memory=memory)
            loader.takes_frames = takes_frames
            loader.start(first)
        except Exception as error:  # whoever asks for a batch raises it
            connection.send_bytes(memory.dumps(with_traceback(error)))
            return
        with closing(loader):
            while True:
                for number in connection.recv():
                    del lent[number]
                reply = load(loader)
                if isinstance(reply, tuple) and (batch := reply[0]):
                    lent[batch.number] = batch
                connection.send_bytes(memory.dumps(reply))


def load(loader: HostLoader) -> tuple[HostBatch | None, Counter[str]] | Exception:
    """Return the next batch, or why there is none."""
    try:
        batch = loader.take()
        loader.top_up()
    except Exception as error:
        return with_traceback(error)
    return batch and replace(batch, jobs=[]), loader.counts


def with_traceback(error: Exception) -> Exception:
    """Add a traceback, which is not pickled, to an error that is nobody's bad input."""
    if not isinstance(error, InputError):
        error.add_note(traceback.format_exc())
    return error
