"""Keep the directory of a run.

It holds config.yaml, checkpoints/, metrics.jsonl, report.html, figures/, tensorboard/, profile/ and
quarantine.jsonl. A run in object storage has such a directory on every node too, from which
training.remote_run uploads. The loop copies a checkpoint to host memory; a thread beside training
hashes and writes it, and another one uploads what has been written.
"""

import math
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout
from pebble.concurrent import thread
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from adamae.common.atomic_io import remove_partials, write_text
from adamae.common.errors import InputError
from adamae.common.locations import is_remote
from adamae.common.locks import exclusive_lock
from adamae.model.weights.find_weights import find_file
from adamae.model.weights.read_config import run_config
from adamae.training.checkpoint import (
    TrainState,
    check_checkpoint,
    copy_to_host,
    list_checkpoints,
    load_checkpoint,
    parse_step,
    save_checkpoint,
)
from adamae.training.config import TrainConfig, differences, to_yaml
from adamae.training.distributed import Distributed
from adamae.training.failures import DivergedError
from adamae.training.remote_run import RemoteRun, Uploader, local_run, staging


class BackgroundWriter:
    """Does one job after another in threads; `wait` raises the error of a job that has failed."""

    def __init__(self) -> None:
        self._last: Future[None] | None = None

    @property
    def failed(self) -> bool:
        """Return whether the newest job has failed; the next `wait` raises its error."""
        return self._last is not None and self._last.done() and self._last.exception() is not None

    def start(self, job: Callable[[], None]) -> None:
        """Do a job after those that were started before, unless one of them fails."""
        previous = self._last

        # pebble's thread is a daemon, so that a second Ctrl-C does not wait for it.
        @thread(name="writer")
        def work() -> None:
            if previous is not None:
                previous.result()
            job()

        self._last = work()

    def wait(self) -> None:
        """Wait until all jobs are done, and raise the error of one that has failed."""
        last = self._last
        # Before waiting: after an interrupt, the end of the run does not wait again.
        self._last = None
        if last is not None:
            last.result()


class RunDir:
    """A run's directory, held for one training job; a context manager, entered by all ranks.

    Entering downloads a run that is in object storage, then decides for all ranks whether the run
    is new or resumes, and from which checkpoint. The main rank alone writes.
    """

    def __init__(self, config: TrainConfig, dist: Distributed) -> None:
        self.config = config
        self.dist = dist
        self.path = Path(config.run)
        self.remote: RemoteRun | None = None
        self.uploader: Uploader | None = None
        if is_remote(config.run):
            self.path = staging(config.run)
            self.remote = RemoteRun(config.run, self.path, config.data.download_timeout_s)
            self.uploader = Uploader(self.remote, config.keep_checkpoints)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.is_new = True
        # The checkpoint to continue from: the run's own or, of a new one, that of the run it forks.
        self.checkpoint: Path | None = None
        self.writer = BackgroundWriter()
        # Set when a signal has asked for the end, so that nobody waits long for storage.
        self.is_stopping = False
        # When the next checkpoint is due, by the monotonic clock.
        self._next_save_s = math.inf

    @property
    def failed(self) -> bool:
        """Return whether checkpoints cannot be kept any more; the end of the run raises why."""
        return self.writer.failed or (self.uploader is not None and self.uploader.failed)

    @property
    def is_save_due(self) -> bool:
        """Return whether it is time for a checkpoint; ranks' clocks differ, so one decides."""
        return self.dist.is_main and time.monotonic() >= self._next_save_s

    def __enter__(self) -> "RunDir":
        with ExitStack() as stack:
            if self.dist.is_main:
                self._lock(stack)
            self.dist.barrier()
            # Other nodes have folders of their own.
            if self.remote is not None and self.dist.is_node_main and not self.dist.is_main:
                self.remote.fetch()
            self.dist.barrier()
            self._find_checkpoint()
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        with self._held:
            try:
                if self.dist.is_main:
                    self.writer.wait()
                    if self.uploader is not None and self.checkpoints.exists():
                        is_stopping = self.is_stopping or kind is KeyboardInterrupt
                        self.uploader.finish(is_stopping=is_stopping)
            except DivergedError as diverged:
                error = diverged
        if isinstance(error, DivergedError):
            advice = "lower optimizer.base_lr or set optimizer.clip_grad_norm, in another run="
            # _write has refused weights that are not finite.
            finite = list_checkpoints(self.checkpoints)
            if finite:
                advice += f" with init_keep=optimizer init_from={finite[-1]}, which is finite"
            raise DivergedError(f"{error}; {advice}") from error

    def load(
        self, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer, start: TrainState
    ) -> TrainState:
        """Load the checkpoint that the run continues from.

        Return how far the run is, or `start` if there is no checkpoint. Raise InputError if the
        checkpoint does not fit, or storage cannot be written to.
        """
        state = start
        if self.checkpoint is not None:
            # Hashing takes longer than reading, so only one rank per node does it.
            if self.dist.is_node_main:
                check_checkpoint(self.checkpoint, start)
            self.dist.barrier()
            state = load_checkpoint(self.checkpoint, modules, optimizer)
        if self.dist.is_main:
            if self.is_new:
                write_text(self.path / "config.yaml", to_yaml(self.config))
            if self.remote is not None:
                self.remote.take_over()
                # Storage that cannot be written to is found out now, not at the first checkpoint.
                self.remote.sync()
        # The first checkpoint comes after a minute at most: report and plots come with it.
        self._next_save_s = time.monotonic() + 60 * min(1.0, self.config.checkpoint_minutes)
        return state

    def save(
        self,
        state: TrainState,
        modules: dict[str, nn.Module],
        optimizer: torch.optim.Optimizer,
        metadata: dict[str, str],
    ) -> None:
        """Copy modules and optimizer to host memory, and start to write a checkpoint of them.

        modules: by the names of their files, whose headers get `metadata`. Raise the error of the
        checkpoint before, if it could not be written.
        """
        if not self.dist.is_main:
            return
        self.writer.wait()
        self._next_save_s = time.monotonic() + 60 * self.config.checkpoint_minutes
        if (self.checkpoints / f"step-{state.step:08d}").exists() or state.step == 0:
            return
        states = {name: module.state_dict() for name, module in modules.items()}
        weights, moments = tree_map_only(Tensor, copy_to_host, (states, optimizer.state_dict()))
        copied = None
        if self.dist.device.type == "cuda":
            copied = torch.cuda.current_stream().record_event()
        self.writer.start(partial(self._write, state, weights, moments, metadata, copied))

    def _lock(self, stack: ExitStack) -> None:
        """Take the directory for this job, remove what a kill has left, and download the run."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            stack.enter_context(exclusive_lock(self.path / ".lock", wait=False))
        except Timeout as error:
            raise InputError(
                f"{self.path} is locked by another training job: wait for it, or set run="
            ) from error
        stack.callback(self._remove_if_unused)
        for partial_checkpoint in self.checkpoints.glob(".*.partial"):
            shutil.rmtree(partial_checkpoint)
        remove_partials(self.path)
        if self.remote is not None:
            self.remote.fetch()

    def _find_checkpoint(self) -> None:
        """Decide whether the run is new, and set the checkpoint that it continues from."""
        own = list_checkpoints(self.checkpoints)
        newest_name = own[-1].name if own else ""
        if len(set(self.dist.gather(newest_name))) > 1:
            raise InputError(
                f"the ranks of this run find different checkpoints in {self.path}: use a folder"
                " that all nodes share; if they do, try again in a minute"
            )
        if not own:
            self.checkpoint = self._find_source()
            return
        self.is_new = False
        self.checkpoint = own[-1]
        changes = differences(self.config, run_config(self.path))
        if changes:
            raise InputError(
                f"{self.path} was made with another configuration ({'; '.join(changes)}): restore"
                f" it, or start a new run= with init_from={self.config.run}, and"
                " init_keep=optimizer to continue at its step"
            )

    def _find_source(self) -> Path | None:
        """Return the checkpoint that a new run forks, None if it is no fork."""
        if self.config.init_keep == "weights":
            return None
        checkpoint = find_file(local_run(self.config.init_from)).parent
        if not parse_step(checkpoint.name):
            raise InputError(
                "init_keep=optimizer needs a run or one of its checkpoints, and"
                f" init_from={self.config.init_from} is none: remove init_keep, which takes the"
                " weights alone"
            )
        return checkpoint

    def _write(
        self,
        state: TrainState,
        modules: dict[str, dict[str, Tensor]],
        optimizer: Any,
        metadata: dict[str, str],
        copied: torch.cuda.Event | None,
    ) -> None:
        """Write a checkpoint when its copies have arrived, remove old ones, and have it uploaded.

        Raise DivergedError if a weight is not finite.
        """
        if copied is not None:
            copied.synchronize()
        for name, tensors in modules.items():
            for tensor_name, value in tensors.items():
                if not bool(value.isfinite().all()):
                    raise DivergedError(
                        f"the run has diverged: after step {state.step}, {name}'s {tensor_name} is"
                        " not finite"
                    )
        save_checkpoint(self.checkpoints, state, modules, optimizer, metadata)
        for old in list_checkpoints(self.checkpoints)[: -self.config.keep_checkpoints]:
            shutil.rmtree(old)
        if self.uploader is not None:
            self.uploader.request()

    def _remove_if_unused(self) -> None:
        """Remove the directory of a run that has failed before it began."""
        # It may have been deleted meanwhile.
        if self.path.is_dir() and {file.name for file in self.path.iterdir()} <= {".lock"}:
            shutil.rmtree(self.path)
