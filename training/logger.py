"""Write a run's metrics: progress bar, metrics.jsonl, TensorBoard and Weights & Biases.

The host waits for the device only in `Logger.flush`: every `log_every` steps, and before a
checkpoint, so that all steps of a checkpoint have been logged.
"""

import dataclasses
import hashlib
import json
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median_low
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from adamae.common.atomic_io import write_text
from adamae.common.devices import choose_precision, get_device_name
from adamae.common.errors import InputError, name_disk_errors
from adamae.common.jsonl import read_jsonl
from adamae.common.logging import escape
from adamae.common.progress import progress_bar
from adamae.pipeline.loader import ClipLoader
from adamae.training.config import TrainConfig, to_yaml
from adamae.training.distributed import Distributed
from adamae.training.failures import DivergedError
from adamae.training.run_dir import RunDir
from adamae.training.schedule import Schedule
from adamae.training.summary import describe_scores

# The fraction of steps whose gradient was not finite, so that they changed nothing.
SKIPPED = "skipped_updates"
# A gradient may overflow once; a run in which ten in a row do has not been seen to recover.
MAX_IDLE_STEPS = 10
# In the first steps, ranks load, compile and fill caches, and wait for data for that reason.
FIRST_STEPS = 10
# A rank is slow if it waits for data longer than the median rank, by this fraction of the time, in
# so many rows one after the other: on a shared machine, each rank is in turn.
SLOW = 0.05
SLOW_ROWS = 3


class Logger:
    """Adds up scalars on the device, and every `log_every` steps writes their means over all ranks.

    A context manager, entered and used by all ranks; the main rank writes.
    """

    def __init__(
        self,
        run: RunDir,
        config: TrainConfig,
        dist: Distributed,
        schedule: Schedule,
        loader: ClipLoader,
        start: int,
    ) -> None:
        """start: the step that the run resumes from, 0 for a new run."""
        self.run = run
        self.config = config
        self.dist = dist
        self.schedule = schedule
        self.loader = loader
        self.start_step = start
        # What has been added up since the last row: scalars on the device, and over how many steps.
        self._names: list[str] = []
        self._sums: Tensor | float = 0.0
        self._steps = 0
        self._started = time.perf_counter()
        # How many steps before this one have left the weights as they were.
        self._idle_steps = 0
        # The loader's counter of seconds spent waiting, when the last row was written.
        self._wait_seconds = 0.0
        # The rank that is slowest now, and in how many rows one after the other it was.
        self._slow_rank = -1
        self._slow_rows = 0
        # Ranks that a note has named.
        self._named_ranks: set[int] = set()

    def __enter__(self) -> "Logger":
        with ExitStack() as stack:
            if self.dist.is_main:
                self._open_files(stack)
            # With a delay, however short, tqdm first draws the bar when a step is done, below what
            # `announce` writes.
            self._bar = stack.enter_context(
                progress_bar(
                    unit="step",
                    total=self.schedule.total_steps,
                    initial=self.start_step,
                    disable=not self.dist.is_main,
                    delay=1e-9,
                )
            )
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        with name_disk_errors(self.run.path):
            self._closing.__exit__(*raised)

    def _open_files(self, stack: ExitStack) -> None:
        """Open metrics.jsonl, TensorBoard and Weights & Biases.

        A killed run has logged steps after its last checkpoint. They will be taken, and logged,
        again, so their rows are removed.
        """
        # In rank 0 alone: it imports boto3 and a stand-in for TensorFlow.
        from torch.utils.tensorboard import SummaryWriter

        rows = [row for row in read_rows(self.run.metrics) if row["step"] <= self.start_step]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_text(self.run.metrics, text)
        # Before TensorBoard's writer, which W&B patches in order to copy what it gets.
        if self.config.wandb:
            stack.callback(start_wandb(self.run.path, self.config).finish)
        stack.enter_context(_hide_tracebacks_of_tensorboard())
        folder = str(self.run.path / "tensorboard")
        self._board = stack.enter_context(SummaryWriter(folder, purge_step=self.start_step + 1))
        self._board.add_text("config", f"```yaml\n{to_yaml(self.config)}```")

    def step(self, step: int, scalars: Mapping[str, Tensor]) -> None:
        """Add the scalars of a step on the device; write their means every `log_every` steps."""
        self._names = list(scalars)
        values = [value.detach().float() for value in scalars.values()]
        # One addition for all scalars, and one copy to the host when they are read.
        self._sums = self._sums + torch.stack(values)
        self._steps += 1
        self._bar.update()
        if step % self.config.log_every == 0:
            self.flush(step)

    def flush(self, step: int) -> None:
        """Write the means of all steps since the last call; all ranks call this.

        Raise DivergedError if no step has changed the weights for MAX_IDLE_STEPS.
        """
        if isinstance(self._sums, float):
            return
        # The only place in the loop where the host waits for the device.
        own_values = (self._sums / self._steps).tolist()
        own_means = dict(zip(self._names, own_values, strict=True))
        seconds = time.perf_counter() - self._started
        counters = dict(self.loader.counters)
        wait_fraction = (counters["wait_seconds"] - self._wait_seconds) / seconds
        self._wait_seconds = counters["wait_seconds"]
        ranks = self.dist.gather((own_means, wait_fraction, socket.gethostname()))
        means, wait_fractions, hosts = zip(*ranks, strict=True)
        row: dict[str, float] = {}
        for name in self._names:
            row[name] = fmean(rank_means[name] for rank_means in means)
        row["lr"] = self.schedule.lr(step - 1)
        row["clips_per_second"] = self._steps * self.schedule.global_batch / seconds
        row["step_time_ms"] = 1000 * seconds / self._steps
        row["data_wait_fraction"] = wait_fraction
        row["peak_memory_gib"] = peak_memory_gib(self.dist.device)
        for name, count in counters.items():
            row[f"pipeline/{name}"] = float(count)
        self.write_scalars(step, row)
        if step > self.start_step + FIRST_STEPS:
            self._name_slow_rank(wait_fractions, hosts)
        self._bar.set_postfix(
            {
                "loss": row.get("reconstruction_loss", row["loss"]),
                "clips/s": row["clips_per_second"],
                "data_wait": f"{wait_fraction:.1%}",
            }
        )
        self._idle_steps = self._idle_steps + self._steps if row[SKIPPED] == 1 else 0
        self._sums = 0.0
        self._steps = 0
        self._started = time.perf_counter()
        if self._idle_steps >= min(MAX_IDLE_STEPS, self.schedule.total_steps):
            first = step - self._idle_steps + 1
            raise DivergedError(
                f"the run has diverged: no gradient of steps {first} to {step} is finite"
            )

    def _name_slow_rank(self, wait_fractions: Sequence[float], hosts: Sequence[str]) -> None:
        """Note, once for each rank, that the others have waited for its data for some rows."""
        longest = max(wait_fractions)
        # The low median: of two ranks, it is the better one.
        median = median_low(wait_fractions)
        rank = wait_fractions.index(longest)
        if longest - median <= SLOW:
            rank = -1
        self._slow_rows = self._slow_rows + 1 if rank == self._slow_rank else 1
        self._slow_rank = rank
        if rank >= 0 and self._slow_rows >= SLOW_ROWS and rank not in self._named_ranks:
            self._named_ranks.add(rank)
            self._print(
                f"note: rank {rank} on {hosts[rank]} slows down the others: it waits"
                f" {longest:.0%} of the time for data, the median rank {median:.0%}: are its disk,"
                " network or CPU slower, or shared?"
            )

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write metrics of one step, in the main rank."""
        if not self.dist.is_main:
            return
        with name_disk_errors(self.run.path):
            with self.run.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            for name, value in values.items():
                tag = name if "/" in name else f"train/{name}"
                self._board.add_scalar(tag, value, step)

    def write_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation, and a line of them above the progress bar."""
        self.write_scalars(step, {f"evaluation/{name}": value for name, value in metrics.items()})
        self._print(f"step {step:,}: {describe_scores(metrics)}")

    def write_image(self, step: int, name: str, image: Image.Image) -> None:
        """Write an image of one step, in the main rank.

        TensorBoard keeps those of all steps; figures/ of the run has the newest of each name.
        """
        # Matplotlib, for its font: in rank 0 alone.
        from adamae.figures.sheet import save_image

        figures = self.run.path / "figures"
        with name_disk_errors(self.run.path):
            figures.mkdir(exist_ok=True)
            save_image(image, figures / f"{name}.png")
            self._board.add_image(f"clips/{name}", np.asarray(image), step, dataformats="HWC")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from step times and clips/s."""
        started = time.perf_counter()
        yield
        self._started += time.perf_counter() - started

    def announce(self, messages: list[str]) -> None:
        """Print the schedule, the device and the step that the run resumes from, then messages."""
        if not self.dist.is_main:
            return
        device = self.dist.device
        precision = choose_precision(device, self.config.precision)
        lines = self.schedule.describe()
        device_line = f"device: {self.dist.world_size} × {get_device_name(device)} ({precision}"
        if precision != self.config.precision:
            device_line += f": this CPU has no native {self.config.precision} support"
        lines.append(f"{device_line})")
        if self.start_step:
            lines.append(f"resuming from step {self.start_step}")
        self._print(*lines, *messages)

    def _print(self, *lines: str) -> None:
        """Print lines above the progress bar, in the main rank."""
        # In one call: where stderr is a file, each call prints the bar once more.
        if self.dist.is_main:
            self._bar.write("\n".join(map(escape, lines)), file=sys.stderr)


@contextmanager
def _hide_tracebacks_of_tensorboard() -> Iterator[None]:
    """Print no traceback where TensorBoard's thread fails: the next call of its writer raises."""
    # Imported in rank 0 alone, as the writer is.
    from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread

    print_traceback = threading.excepthook

    def print_others(arguments: threading.ExceptHookArgs) -> None:
        if not isinstance(arguments.thread, _AsyncWriterThread):
            print_traceback(arguments)

    threading.excepthook = print_others
    try:
        yield
    finally:
        threading.excepthook = print_traceback


def start_wandb(folder: Path, config: TrainConfig) -> Any:
    """Start the W&B run of a run directory, which copies what TensorBoard gets.

    However often a run is resumed, it is the same W&B run. WANDB_MODE=offline keeps it on this
    machine. Raise InputError if the service refuses.
    """
    import wandb

    run_id = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    try:
        return wandb.init(
            project="adamae",
            name=config.run,
            id=run_id,
            resume="allow",
            dir=str(folder),
            sync_tensorboard=True,
            config=dataclasses.asdict(config),
            allow_val_change=True,
            settings=wandb.Settings(silent=True),
        )
    except (wandb.Error, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"wandb cannot be used ({reason}): wandb login, or WANDB_MODE=offline"
        ) from error


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics.jsonl, without lines that a kill has cut off or no run wrote."""
    return [row for row in read_jsonl(file) if type(row.get("step")) is int]


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak of the memory allocated on a GPU, or, on a CPU, of this process, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Linux counts ru_maxrss in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
