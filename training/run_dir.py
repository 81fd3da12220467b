"""The directory of a run: `config.yaml, checkpoints/, metrics.jsonl, report.html, figures/, tensorboard/, profile/,
quarantine.jsonl`.

A run in object storage has such a directory on every node too, from which training.remote_run uploads. A checkpoint is
copied to host memory at once, and hashed, written and uploaded by a thread beside training.
"""

import math
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout
from pebble.concurrent import thread
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from adamae.common.atomic_io import write_text
from adamae.common.errors import InputError
from adamae.common.locks import exclusive_lock
from adamae.common.logging import log
from adamae.model.weights.find_weights import find_file
from adamae.model.weights.read_config import run_config
from adamae.pipeline.reading.storage import is_remote
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
from adamae.training.remote_run import RemoteRun, TakenOverError, local_run, staging


class BackgroundWriter:
    """Does one job after another, in threads; `wait` raises what went wrong."""

    def __init__(self) -> None:
        self._last: Future[None] | None = None

    @property
    def failed(self) -> bool:
        """Whether the newest job has; the next `wait` says why."""
        return self._last is not None and self._last.done() and self._last.exception() is not None

    def start(self, job: Callable[[], None]) -> None:
        """Do a job after those that were started before, unless one of them fails."""
        before = self._last

        def work() -> None:
            if before is not None:
                before.result()
            job()

        self._last = thread(name="writer")(
            work
        )()  # a daemon: a second Ctrl-C does not wait for an upload

    def wait(self) -> None:
        """Wait until all is done, and raise what went wrong; after an interrupt, later calls do not wait again."""
        last, self._last = self._last, None
        if last is not None:
            last.result()


class RunDir:
    """Holds a run's directory for one training job; a context manager, entered and used by all ranks.

    Entering decides, for all ranks and after the remote copy is here, whether the run is new or resumes, and from which
    checkpoint. The main rank alone writes.
    """

    def __init__(self, config: TrainConfig, dist: Distributed) -> None:
        self.config, self.dist = config, dist
        self.path = staging(config.run) if is_remote(config.run) else Path(config.run)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.remote = RemoteRun(config.run, self.path) if is_remote(config.run) else None
        self.is_new = True
        self.checkpoint: Path | None = (
            None  # to continue from: of its own or, if it is new, of the run that it forks
        )
        self._next_save_s = math.inf  # by the monotonic clock
        self.writer = BackgroundWriter()

    @property
    def is_save_due(self) -> bool:
        """Whether it is time for a checkpoint; the main rank knows."""
        return self.dist.is_main and time.monotonic() >= self._next_save_s

    def __enter__(self) -> "RunDir":
        with ExitStack() as stack:
            if self.dist.is_main:
                self._lock(stack)
            self.dist.barrier()
            if self.remote is not None and self.dist.is_node_main and not self.dist.is_main:
                self.remote.fetch()  # on a node of its own
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
                    if self.remote is not None and self.checkpoints.exists():
                        self.remote.sync()
            except DivergedError as diverged:
                error = diverged
        if isinstance(error, DivergedError):
            saved = list_checkpoints(self.checkpoints)
            fork = (
                f" with init_keep=optimizer init_from={saved[-1]}, which is finite" if saved else ""
            )
            advice = (
                f"lower optimizer.base_lr or set optimizer.clip_grad_norm, in another run={fork}"
            )
            raise DivergedError(f"{error}; {advice}") from error

    def load(
        self, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer, start: TrainState
    ) -> TrainState:
        """Load the checkpoint that the run continues from; return how far the run is, `start` if there is none.

        The files' hashes are checked once per node: that takes longer than reading them."""
        state = start
        if self.checkpoint is not None:
            if self.dist.is_node_main:
                check_checkpoint(self.checkpoint, start)
            self.dist.barrier()
            state = load_checkpoint(self.checkpoint, modules, optimizer)
        if self.dist.is_main:
            if self.is_new:
                write_text(self.path / "config.yaml", to_yaml(self.config))
            if self.remote is not None:
                self.remote.take_over()
                self.remote.sync()  # storage that refuses to be written to says so now, not at the first checkpoint
        self._next_save_s = time.monotonic() + 60 * min(1.0, self.config.checkpoint_minutes)
        return state

    def save(
        self,
        state: TrainState,
        modules: dict[str, nn.Module],
        optimizer: torch.optim.Optimizer,
        metadata: dict[str, str],
    ) -> None:
        """Copy what a checkpoint holds, and write it in a thread; raise what went wrong with the one before."""
        if not self.dist.is_main:
            return
        self.writer.wait()
        self._next_save_s = time.monotonic() + 60 * self.config.checkpoint_minutes
        if (self.checkpoints / f"step-{state.step:08d}").exists() or state.step == 0:
            return
        states = {name: module.state_dict() for name, module in modules.items()}
        weights, moments = tree_map_only(Tensor, copy_to_host, (states, optimizer.state_dict()))
        copied = (
            torch.cuda.current_stream().record_event() if self.dist.device.type == "cuda" else None
        )
        self.writer.start(lambda: self._write(state, weights, moments, metadata, copied))

    def _lock(self, stack: ExitStack) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            stack.enter_context(exclusive_lock(self.path / ".lock", wait=False))
        except Timeout as error:
            raise InputError(
                f"{self.path} is locked by another training job: wait for it, or set run="
            ) from error
        stack.callback(self._remove_if_unused)
        for partial in self.checkpoints.glob(
            ".*.partial"
        ):  # left by a kill in the middle of a save
            shutil.rmtree(partial)
        if self.remote is not None:
            self.remote.fetch()

    def _find_checkpoint(self) -> None:
        own = list_checkpoints(self.checkpoints)
        if len(set(self.dist.gather(own[-1].name if own else ""))) > 1:
            raise InputError(
                f"the ranks of this run find different checkpoints in {self.path}: use a folder that all nodes share;"
                " if they do, try again in a minute"
            )
        if not own:
            self.checkpoint = self._find_source()
            return
        self.is_new, self.checkpoint = False, own[-1]
        if changed := differences(self.config, run_config(self.path)):
            raise InputError(
                f"{self.path} was made with another configuration ({'; '.join(changed)}): restore it, or start a new"
                f" run= with init_from={self.config.run}, and init_keep=optimizer to continue at its step"
            )

    def _find_source(self) -> Path | None:
        """Return the checkpoint that a new run forks, if it does."""
        if self.config.init_keep == "weights":
            return None
        checkpoint = find_file(local_run(self.config.init_from)).parent
        if not parse_step(checkpoint.name):
            raise InputError(
                f"init_keep=optimizer needs a run or one of its checkpoints, and init_from={self.config.init_from} is"
                " none: remove init_keep, which takes the weights alone"
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
        if copied is not None:
            copied.synchronize()
        for name, tensors in modules.items():
            for tensor_name, value in tensors.items():
                if not bool(value.isfinite().all()):
                    raise DivergedError(
                        f"the run has diverged: after step {state.step}, {name}'s {tensor_name} is not finite"
                    )
        save_checkpoint(self.checkpoints, state, modules, optimizer, metadata)
        for old in list_checkpoints(self.checkpoints)[: -self.config.keep_checkpoints]:
            shutil.rmtree(old)
        if self.remote is not None:
            try:
                self.remote.sync(self.config.keep_checkpoints)
            except TakenOverError:
                raise
            except InputError as error:
                log(
                    f"{error}; {self.path} keeps everything, and the next checkpoint tries again",
                    file=sys.stderr,
                )

    def _remove_if_unused(self) -> None:
        """Remove the directory of a run that has failed before it began."""
        if {file.name for file in self.path.iterdir()} <= {".lock"}:
            shutil.rmtree(self.path)
