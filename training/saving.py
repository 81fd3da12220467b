"""Checkpoints are written beside training: a thread copies the state, hashes, writes and uploads it.

torch.distributed.checkpoint's asynchronous save was the alternative. It writes a folder of shards and a pickled index
in place, without hashes: a kill leaves half a checkpoint, nothing else could read the weights, and as every process
holds all of them (DDP), there is nothing to shard.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.errors import InputError
from common.logging import log
from training import checkpoint
from training.checkpoint import Contents, State
from training.failures import DivergedError
from training.lease import TakenOverError
from training.manifest import TrainState
from training.run_dir import RunDir

Copies = list[tuple[Tensor, Tensor]]  # from, to


class Saver:
    """Saves a run, one checkpoint at a time; a context manager, which ends when all is written.

    Only that of a run's first process writes; the others' know what has been reviewed.
    """

    def __init__(self, folder: RunDir, contents: Contents, keep: int) -> None:
        self._folder, self._contents, self._keep = folder, contents, keep
        self._host: State | None = None  # buffers, used again: new pages cost eight times as much as the copy
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_left = False  # whether a second Ctrl-C came while the thread was waited for
        self._copied = threading.Event()
        self._copied.set()
        if folder.is_main:
            self._hook = contents.optimizer.register_step_pre_hook(lambda *_: self._before_update())

    def save(self, place: TrainState, *, is_learning: bool = True) -> None:
        """Save what the modules and the optimizer hold now; the next update waits until that has been copied.

        is_learning: where it is not, this checkpoint does not push out an older one. Raises InputError if the save
        before could not be written.
        """
        self.join()
        if checkpoint.of_step(self._folder.checkpoints, place.step).exists():
            return
        state = self._contents.state()
        self._host, of_modules, of_optimizer = laid_out(state, self._host)
        learnt = {p.data_ptr() for group in self._contents.optimizer.param_groups for p in group["params"]}
        # An average of weights and statistics change outside of the optimizer, which alone waits for the thread.
        copy([pair for pair in of_modules if pair[0].data_ptr() not in learnt])
        later = [pair for pair in of_modules if pair[0].data_ptr() in learnt] + of_optimizer
        host = self._host
        self._copied.clear()
        self._start(lambda: self._write(place, host, later, is_learning))

    def join(self) -> None:
        """Wait until nothing is being written; raises what has gone wrong. A second Ctrl-C in it is not waited for."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._is_left = True
            thread.join()
            self._is_left = False
        self._raise_failure()

    def is_reviewed(self, step: int) -> bool:
        """Whether mark_reviewed was called for the checkpoint of this step."""
        return (checkpoint.of_step(self._folder.checkpoints, step) / checkpoint.REVIEWED).exists()

    def mark_reviewed(self, step: int) -> None:
        """Note that what is due at the step of this checkpoint has been done."""
        mark = checkpoint.of_step(self._folder.checkpoints, step) / checkpoint.REVIEWED

        def marked() -> None:
            mark.touch()
            self._upload()

        self._start(marked)

    def afterwards(self, job: Callable[[], None]) -> None:
        """Begin to do it when what is being written is there; what it raises, the next save does."""
        self._start(job)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._folder.is_main:
            return
        self._hook.remove()
        if self._is_left:
            return
        self.join()
        if self._folder.remote is not None:
            self._folder.remote.sync()

    def _before_update(self) -> None:
        """The weights may change when they have been copied; and a run that cannot be saved ends."""
        self._copied.wait()
        self._raise_failure()
        if self._host is None and self._thread is None and self._contents.optimizer.state:
            state = self._contents.state()
            self._start(lambda: self._make_room(state))  # beside the second step, not in the way of the first save

    def _make_room(self, state: State) -> None:
        self._host, of_modules, of_optimizer = laid_out(state, None)
        for _, buffer in (*of_modules, *of_optimizer):
            buffer.zero_()

    def _write(self, place: TrainState, state: State, later: Copies, is_learning: bool) -> None:
        copy(later)
        # On CUDA the copies stand in the stream now, before the next update.
        arrived = [_event(device) for device in {source.device for source, _ in later if source.is_cuda}]
        self._copied.set()
        for event in arrived:
            event.synchronize()
        for name, tensors in state.modules.items():
            if (found := checkpoint.first_not_finite(tensors)) is not None:
                said = f"the run has diverged: after step {place.step}, {name}'s {found} is not finite"
                raise DivergedError(said)
        checkpoint.save(self._folder.checkpoints, place, state)
        if is_learning:
            checkpoint.remove_old(self._folder.checkpoints, self._keep)
        self._upload(self._keep if is_learning else None)

    def _upload(self, keep: int | None = None) -> None:
        remote = self._folder.remote
        if remote is None:
            return
        try:
            remote.sync(keep)
        except TakenOverError:
            raise
        except InputError as error:
            log(f"{error}; {self._folder.path} keeps all of it, and the next checkpoint tries again", file=sys.stderr)

    def _start(self, job: Callable[[], None]) -> None:
        """Do it in a thread, after what is being done."""
        before = self._thread

        def watched() -> None:
            if before is not None:
                before.join()
            try:
                if self._failure is None:
                    job()
            except BaseException as error:  # said where the loop asks: by the next update, save or end
                self._failure = error
            finally:
                self._copied.set()

        self._thread = threading.Thread(target=watched, name="saving", daemon=True)
        self._thread.start()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def laid_out(state: State, buffers: State | None) -> tuple[State, Copies, Copies]:
    """A state like this one in host memory (pinned where it is CUDA's), in `buffers` where they fit; and the copies
    that would fill it, of modules and of the optimizer."""
    of_modules: Copies = []
    of_optimizer: Copies = []
    modules = _like(state.modules, buffers.modules if buffers else None, of_modules)
    optimizer = _like(state.optimizer, buffers.optimizer if buffers else None, of_optimizer)
    return State(modules, optimizer, state.about), of_modules, of_optimizer


def _like(value: Any, buffer: Any, copies: Copies) -> Any:
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):  # torchao's moments are made of others
        names, about = value.__tensor_flatten__()
        parts = {name: _like(getattr(value, name), getattr(buffer, name, None), copies) for name in names}
        kind: Any = type(value)
        return kind.__tensor_unflatten__(parts, about, value.shape, value.stride())
    if isinstance(value, Tensor):
        if not isinstance(buffer, Tensor) or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda, requires_grad=False)
        copies.append((value, buffer))
        return buffer
    if isinstance(value, dict):
        earlier = buffer if isinstance(buffer, dict) else {}
        return {name: _like(inner, earlier.get(name), copies) for name, inner in value.items()}
    if isinstance(value, list):
        return [_like(inner, None, copies) for inner in value]  # of parameter groups, which are numbers
    return value


def copy(pairs: Copies) -> None:
    for source, buffer in pairs:
        buffer.copy_(source, non_blocking=True)


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
