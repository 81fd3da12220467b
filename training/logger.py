"""Write a run's metrics: progress bar, metrics.jsonl, TensorBoard and, by its means, Weights & Biases.

The host waits for the device only in `Logger.flush`, every `log_every` steps and before a checkpoint, so that what a
checkpoint holds has been logged.
"""

import dataclasses
import hashlib
import json
import resource
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median_low
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from adamae.common.atomic_io import write_text
from adamae.common.devices import choose_precision, get_device_name
from adamae.common.errors import InputError, name_disk_errors
from adamae.common.jsonl import read_jsonl
from adamae.common.logging import escape
from adamae.common.progress import progress_bar
from adamae.figures.sheet import save_image
from adamae.pipeline.loader import ClipLoader
from adamae.training.config import TrainConfig, to_yaml
from adamae.training.distributed import Distributed
from adamae.training.failures import DivergedError
from adamae.training.run_dir import RunDir
from adamae.training.schedule import Schedule
from adamae.training.summary import describe_scores

SKIPPED = "skipped_updates"  # fraction of the steps whose gradient was not finite, so that they changed nothing
MAX_IDLE_STEPS = 10  # one gradient may overflow; ten in a row do not recover
FIRST_STEPS = 10  # load, compile and fill caches
SLOW = 0.05  # fraction of a step that a rank waits longer for data than the median of all


class Logger:
    """Sums per-step tensors on the device; reads them, averages over ranks and writes every `log_every` steps."""

    def __init__(
        self,
        run: RunDir,
        config: TrainConfig,
        dist: Distributed,
        schedule: Schedule,
        loader: ClipLoader,
        start: int,
    ) -> None:
        self.run, self.config, self.dist, self.schedule, self.loader = (
            run,
            config,
            dist,
            schedule,
            loader,
        )
        self.start_step = start
        self._names: list[str] = []
        self._sums: Tensor | float = 0.0  # of the scalars by these names, on the device
        self._steps = 0
        self._idle_steps = 0  # the newest ones, of which none changed the weights
        self._started = time.perf_counter()
        self._waited = 0.0  # seconds for data, when a row was last written
        self._slow_ranks: set[int] = set()  # that have been named

    def __enter__(self) -> "Logger":
        total, is_main = self.schedule.total_steps, self.dist.is_main
        with ExitStack() as stack:
            if is_main:
                self._open_files(stack)
            self._bar = stack.enter_context(
                progress_bar(
                    unit="step",
                    total=total,
                    initial=self.start_step,
                    disable=not is_main,
                    delay=1e-9,
                )
            )
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        with name_disk_errors(self.run.path):
            self._closing.__exit__(*raised)

    def _open_files(self, stack: ExitStack) -> None:
        """Open what the main rank writes. Drop what a killed run logged after its checkpoint: it is logged again."""
        rows = (row for row in read_rows(self.run.metrics) if row["step"] <= self.start_step)
        write_text(self.run.metrics, "".join(json.dumps(row) + "\n" for row in rows))
        if self.config.wandb:
            stack.callback(start_wandb(self.run.path, self.config).finish)
        folder = str(self.run.path / "tensorboard")
        self._board = stack.enter_context(SummaryWriter(folder, purge_step=self.start_step + 1))
        self._board.add_text("config", f"```yaml\n{to_yaml(self.config)}```")

    def step(self, step: int, scalars: Mapping[str, Tensor]) -> None:
        """Add the scalars of a step, which stay on the device; writes their means every `log_every` steps."""
        self._names = list(scalars)
        self._sums = self._sums + torch.stack(
            [value.detach().float() for value in scalars.values()]
        )
        self._steps += 1
        self._bar.update()
        if step % self.config.log_every == 0:
            self.flush(step)

    def flush(self, step: int) -> None:
        """Write the means since the last call, over all ranks, which all call this; raise DivergedError where no step
        has changed the weights for long."""
        if isinstance(self._sums, float):
            return
        own = dict(
            zip(self._names, (self._sums / self._steps).tolist(), strict=True)
        )  # only here the host waits
        seconds = time.perf_counter() - self._started
        counters = dict(self.loader.counters)
        waited = counters["wait_seconds"] - self._waited
        self._waited = counters["wait_seconds"]
        ranks = self.dist.gather((own, waited / seconds, socket.gethostname()))
        row = {name: fmean(means[name] for means, *_ in ranks) for name in own} | {
            "lr": self.schedule.lr(step - 1),
            "clips_per_second": self._steps * self.schedule.global_batch / seconds,
            "step_time_ms": 1000 * seconds / self._steps,
            "data_wait_fraction": waited / seconds,
            "peak_memory_gib": peak_memory_gib(self.dist.device),
        }
        row |= {f"pipeline/{name}": float(count) for name, count in counters.items()}
        self.write_scalars(step, row)
        if step > self.start_step + FIRST_STEPS:
            self._name_slow_rank([wait for _, wait, _ in ranks], [host for *_, host in ranks])
        shown = {
            "loss": row.get("reconstruction_loss", row["loss"]),
            "clips/s": row["clips_per_second"],
        }
        self._bar.set_postfix(shown | {"data_wait": f"{row['data_wait_fraction']:.1%}"})
        self._idle_steps = self._idle_steps + self._steps if row[SKIPPED] == 1 else 0
        self._sums, self._steps, self._started = 0.0, 0, time.perf_counter()
        if self._idle_steps >= min(MAX_IDLE_STEPS, self.schedule.total_steps):
            first = step - self._idle_steps + 1
            raise DivergedError(
                f"the run has diverged: no gradient of steps {first} to {step} is finite"
            )

    def _name_slow_rank(self, waits: list[float], hosts: list[str]) -> None:
        """Say once of a rank that the others wait for its data; `waits`: fraction of the time, by rank."""
        wait, median = max(waits), median_low(waits)  # of two ranks, the median is the better one
        rank = waits.index(wait)
        if wait - median > SLOW and rank not in self._slow_ranks:
            self._slow_ranks.add(rank)
            line = f"note: rank {rank} on {hosts[rank]} slows down the others: it waits {wait:.0%} of the time for data"
            self._say(
                [
                    f"{line}, the median rank {median:.0%}: are its disk, network or CPU slower, or shared?"
                ]
            )

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write metrics of one step."""
        if not self.dist.is_main:
            return
        with name_disk_errors(self.run.path):
            with self.run.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            for name, value in values.items():
                self._board.add_scalar(name if "/" in name else f"train/{name}", value, step)

    def write_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation, also in words above the progress bar."""
        self.write_scalars(step, {f"evaluation/{name}": value for name, value in metrics.items()})
        self._say([f"step {step:,}: {describe_scores(metrics)}"])

    def write_image(self, step: int, name: str, image: Image.Image) -> None:
        """Write an image of one step in the main rank; the newest of its name also lies in the run's figures/."""
        with name_disk_errors(self.run.path):
            (figures := self.run.path / "figures").mkdir(exist_ok=True)
            save_image(image, figures / f"{name}.png")
            self._board.add_image(f"clips/{name}", np.asarray(image), step, dataformats="HWC")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block from step times and clips/s."""
        started = time.perf_counter()
        yield
        self._started += time.perf_counter() - started

    def announce(self, messages: list[str]) -> None:
        """Log what is about to run, then `messages`."""
        if not self.dist.is_main:
            return
        device, wanted = self.dist.device, self.config.precision
        precision = choose_precision(device, wanted)
        reason = "" if precision == wanted else f": this CPU has no native {wanted} support"
        device_line = (
            f"device: {self.dist.world_size} × {get_device_name(device)} ({precision}{reason})"
        )
        resuming = [f"resuming from step {self.start_step}"] if self.start_step else []
        self._say([*self.schedule.describe(), device_line, *resuming, *messages])

    def _say(self, sentences: list[str]) -> None:
        """Print these above the progress bar, in the main rank."""
        if (
            sentences and self.dist.is_main
        ):  # at once: where stderr is a file, the bar is written again after each
            self._bar.write("\n".join(map(escape, sentences)), file=sys.stderr)


def start_wandb(folder: Path, config: TrainConfig) -> Any:
    """Start the W&B run of a run directory, one however often it is resumed: it copies what TensorBoard gets.

    WANDB_MODE=offline keeps it on this machine. Raise InputError if the service refuses.
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
    """Read the rows of a metrics.jsonl; a line that no run wrote, or not to its end, is left out."""
    return [row for row in read_jsonl(file) if type(row.get("step")) is int]


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of the CUDA device, or of this process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
