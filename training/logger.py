"""Write a run's metrics: progress bar, metrics.jsonl, TensorBoard, Weights & Biases.

The host waits for the device only in `Logger.flush`, every `log_every` steps and before a checkpoint, so that what a
checkpoint holds has been logged.
"""

import dataclasses
import gc
import hashlib
import json
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from common.atomic_io import write_text
from common.devices import choose_precision, find_attention_kernel
from common.errors import InputError, name_disk_errors
from common.logging import escape, format_duration, format_number
from common.progress import progress_bar
from figures.sheet import save_image
from pipeline.loader import ClipLoader
from training.config import TrainConfig, to_yaml
from training.distributed import Distributed
from training.failures import DivergedError
from training.run_dir import RunDir
from training.schedule import Schedule
from training.stragglers import StragglerDetector
from training.summary import describe_scores

SKIPPED = "skipped_updates"  # fraction of the steps whose gradient was not finite, so that they changed nothing
TIMED_S = 10  # of steps, before a run's duration is estimated
MAX_IDLE_STEPS = 10  # one gradient may overflow; ten in a row do not recover


class Logger:
    """Sums per-step tensors on the device; reads them, averages over ranks and writes every `log_every` steps."""

    def __init__(
        self, run: RunDir, config: TrainConfig, dist: Distributed, schedule: Schedule, loader: ClipLoader, start: int
    ) -> None:
        self.run, self.config, self.dist, self.schedule, self.loader = run, config, dist, schedule, loader
        self.start_step = start
        self.stragglers = StragglerDetector(dist)
        self._names: list[str] = []
        self._sums: Tensor | float = 0.0  # of the scalars by these names, on the device
        self._steps = 0
        self._idle_steps = 0  # the newest ones, of which none changed the weights
        self._started = time.perf_counter()
        self._timed: tuple[int, float] | None = start, time.perf_counter()  # since which step; None: it has been said
        self._waited = 0.0  # seconds for data, when a row was last written
        self._writers: list[Any] = []  # of WRITERS

    def __enter__(self) -> "Logger":
        # Half a million objects of imported modules stay. To scan them takes 0.3 s, in the middle of a step and so
        # rarely that the garbage of 10 minutes waits for it; without them, a full collection takes 0.3 ms.
        gc.collect()
        gc.freeze()
        gc.collect()  # from here Python counts how many objects there are, and so how often it collects
        total, is_main = self.schedule.total_steps, self.dist.is_main
        with ExitStack() as stack:
            stack.callback(gc.unfreeze)
            for name in ("files", *self.config.metrics) if is_main else ():
                self._writers.append(WRITERS[name](self.run, self.config, self.start_step))
                stack.callback(self._writers[-1].close)
            self._bar = stack.enter_context(
                progress_bar(unit="step", total=total, initial=self.start_step, disable=not is_main, delay=1e-9)
            )
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        with name_disk_errors(self.run.path):
            self._closing.__exit__(*raised)

    def step(self, step: int, scalars: Mapping[str, Tensor]) -> None:
        """Add the scalars of a step, which stay on the device; writes their means every `log_every` steps."""
        self._names = list(scalars)
        self._sums = self._sums + torch.stack([value.detach().float() for value in scalars.values()])
        self._steps += 1
        self._bar.update()
        self._estimate_duration(step)
        if step % self.config.log_every == 0:
            self.flush(step)

    def _estimate_duration(self, step: int) -> None:
        """Say, once TIMED_S have been measured, how long the run takes; the host is at most log_every steps ahead."""
        if self._timed is None:
            return
        is_compiling = self.dist.device.type == "cuda" or self.config.compile
        if is_compiling and step == self.start_step + 1:
            self._timed = step, time.perf_counter()
        first, started = self._timed
        if (seconds := time.perf_counter() - started) > TIMED_S and step > first:
            steps_left, speed = self.schedule.total_steps - step, (step - first) / seconds
            clips = f"{format_number(speed * self.schedule.global_batch)} clips/s"
            self._say(
                [f"the remaining {steps_left:,} steps take about {format_duration(steps_left / speed)} ({clips})"]
            )
            self._timed = None

    def flush(self, step: int) -> None:
        """Write the means since the last call, over all ranks, which all call this; raise DivergedError where no step
        has changed the weights for long."""
        if isinstance(self._sums, float):
            return
        own = dict(zip(self._names, (self._sums / self._steps).tolist(), strict=True))  # only here the host waits
        seconds = time.perf_counter() - self._started
        counters = dict(self.loader.counters)
        waited = counters["wait_seconds"] - self._waited
        self._waited = counters["wait_seconds"]
        row, notes = self.stragglers.gather(own, self._steps, seconds, waited)
        row |= {
            "lr": self.schedule.lr(step - 1),
            "clips_per_second": self._steps * self.schedule.global_batch / seconds,
            "step_time_ms": 1000 * seconds / self._steps,
            "data_wait_fraction": waited / seconds,
            "peak_memory_gib": peak_memory_gib(self.dist.device),
        }
        row |= {f"pipeline/{name}": float(count) for name, count in counters.items()}
        self.scalars(step, row)
        self._say(notes)
        shown = {"loss": row.get("reconstruction_loss", row["loss"]), "clips/s": row["clips_per_second"]}
        self._bar.set_postfix(shown | {"data_wait": f"{row['data_wait_fraction']:.1%}"})
        self._idle_steps = self._idle_steps + self._steps if row[SKIPPED] == 1 else 0
        self._sums, self._steps, self._started = 0.0, 0, time.perf_counter()
        if self._idle_steps >= min(MAX_IDLE_STEPS, self.schedule.total_steps):
            first = step - self._idle_steps + 1
            raise DivergedError(f"the run has diverged: no gradient of steps {first} to {step} is finite")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write metrics of one step."""
        with name_disk_errors(self.run.path):
            for writer in self._writers:
                writer.scalars(step, values)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation, also in words above the progress bar."""
        self.scalars(step, {f"evaluation/{name}": value for name, value in metrics.items()})
        self._say([f"step {step:,}: {describe_scores(metrics)}"])

    def image(self, step: int, name: str, image: Image.Image) -> None:
        """Write an image of one step; the newest of its name also lies in the run's figures/."""
        with name_disk_errors(self.run.path):
            for writer in self._writers:
                writer.image(step, name, image)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block from step times and clips/s."""
        started = time.perf_counter()
        yield
        paused = time.perf_counter() - started
        self._started += paused
        if self._timed is not None:
            self._timed = self._timed[0], self._timed[1] + paused

    def announce(self, messages: list[str]) -> None:
        """Log what is about to run, then `messages`."""
        if not self.dist.is_main:
            return
        device, model, wanted = self.dist.device, self.config.model, self.config.precision
        precision = choose_precision(device, wanted)
        reason = "" if precision == wanted else f": this CPU has no native {wanted} support"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        ranks = f"{self.dist.world_size} × " if self.dist.world_size > 1 else ""
        heads, width = model.dimensions.encoder_heads, model.dimensions.encoder_width
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        q = torch.empty((1, heads, model.num_tokens, width // heads), device=device, dtype=dtype, requires_grad=True)
        device_line = f"device: {ranks}{name} ({precision}{reason}), attention by {find_attention_kernel(q)}"
        resuming = [f"resuming from step {self.start_step}"] if self.start_step else []
        self._say([*self.schedule.describe(), device_line, *resuming, *messages])

    def _say(self, sentences: list[str]) -> None:
        """Print these above the progress bar, in the main rank."""
        if sentences and self.dist.is_main:  # at once: where stderr is a file, the bar is written again after each
            self._bar.write("\n".join(map(escape, sentences)), file=sys.stderr)


class RunDirWriter:
    """metrics.jsonl and figures/ in the run directory."""

    def __init__(self, run: RunDir, config: TrainConfig, start_step: int) -> None:
        self._run = run
        if run.metrics.exists():  # what a killed run logged after its last checkpoint will be logged again
            rows = (row for row in read_rows(run.metrics) if row["step"] <= start_step)
            write_text(run.metrics, "".join(json.dumps(row) + "\n" for row in rows))

    def close(self) -> None:
        """Leave the files, which are written at once."""

    def scalars(self, step: int, row: Mapping[str, Any]) -> None:
        with self._run.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **row}) + "\n")

    def image(self, step: int, name: str, image: Image.Image) -> None:
        self._run.figures.mkdir(exist_ok=True)
        save_image(image, self._run.figures / f"{name}.png")


class TensorBoardWriter(SummaryWriter):
    """Scalars, images and the configuration as TensorBoard's event files."""

    def __init__(self, run: RunDir, config: TrainConfig, start_step: int) -> None:
        super().__init__(str(run.tensorboard), purge_step=start_step + 1)  # as above
        self.add_text("config", f"```yaml\n{to_yaml(config)}```")

    def scalars(self, step: int, row: Mapping[str, Any]) -> None:
        for name, value in group_names(row).items():
            self.add_scalar(name, value, step)

    def image(self, step: int, name: str, image: Image.Image) -> None:
        self.add_image(f"clips/{name}", np.asarray(image), step, dataformats="HWC")


class WandbWriter:
    """One W&B run per run directory, however often it is started; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, run: RunDir, config: TrainConfig, start_step: int) -> None:
        """Raise InputError if the package is missing or the service refuses."""
        try:
            import wandb
        except ImportError as error:
            raise InputError("metrics contains wandb, which is not installed: pip install 'adamae[wandb]'") from error
        self._wandb: Any = wandb
        run_id = hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:16]
        try:
            self._run = wandb.init(
                project="adamae", name=config.run, id=run_id, resume="allow", dir=str(run.path),
                settings=wandb.Settings(silent=True),
            )  # fmt: skip
        except (wandb.Error, OSError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"wandb cannot be used ({reason}): wandb login, or WANDB_MODE=offline") from error
        self._run.config.update(dataclasses.asdict(config), allow_val_change=True)
        self.close = self._run.finish

    def scalars(self, step: int, row: Mapping[str, Any]) -> None:
        self._run.log(group_names(row), step=step)

    def image(self, step: int, name: str, image: Image.Image) -> None:
        self._run.log({f"clips/{name}": self._wandb.Image(image)}, step=step)


# One more place for metrics: a class with `scalars`, `image` and `close`, and a line here.
WRITERS: dict[str, Any] = {"files": RunDirWriter, "tensorboard": TensorBoardWriter, "wandb": WandbWriter}


def group_names(row: Mapping[str, Any]) -> dict[str, float]:
    """Name a row's values in groups: train/…, evaluation/…, pipeline/…"""
    return {name if "/" in name else f"train/{name}": value for name, value in row.items()}


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics.jsonl; a line that no run wrote, or not to its end, is skipped."""
    if file.exists():
        with file.open("rb") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict) and type(row.get("step")) is int:
                    yield row


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of the CUDA device, or of this process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
