"""What a run says about itself: a progress bar, `metrics.jsonl`, TensorBoard and the like. Nothing here waits for the
device but `report`, once every `log_every` steps and before a checkpoint, so that what is saved has been logged."""

import gc
import json
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from common.atomic_io import atomic_write
from common.devices import choose_precision, get_device_name
from common.errors import DISK_ERRORS, name_disk_errors
from common.logging import log
from common.progress import progress_bar
from training.config import TrainConfig
from training.distributed import Distributed
from training.failures import DivergedError
from training.reviews.sinks import Sink
from training.run_dir import RunDir
from training.schedule import Horizon
from training.stragglers import Ranks, Spread

SKIPPED = "skipped_updates"  # share of the steps whose gradient was not finite, so that they changed nothing
MAX_IDLE_STEPS = 10  # one gradient may overflow; ten in a row do not come back
MAX_LINE = 2**20  # bytes of metrics.jsonl


class Metrics:
    """Sums per-step tensors on the device; reads, averages over processes and writes them when asked."""

    def __init__(
        self, folder: RunDir, process: Distributed, horizon: Horizon, first_step: int, sinks: Sequence[Sink] = ()
    ) -> None:
        self.process, self.horizon, self.first_step = process, horizon, first_step
        self.sums: dict[str, Tensor] = {}
        self.steps = 0
        self.idle_steps = 0  # the newest ones, of which none changed the weights
        self.started = time.perf_counter()
        self.waited = 0.0
        self.folder, self.ranks = folder, Ranks(process)
        self.file, self.sinks = None, sinks
        self._threads_report = threading.excepthook
        if process.is_main:
            forget_after(folder.metrics, first_step)
            self.file = folder.metrics.open("a", encoding="utf-8")
        self.bar = progress_bar(unit="step", total=horizon.total_steps, initial=first_step, disable=not process.is_main)

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            value = value.detach().float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.steps += 1
        self.bar.update()

    def announce(self, config: TrainConfig, cautions: list[str]) -> None:
        """Say what run this is; `cautions`: sentences that follow."""
        if self.process.is_main:
            log(self.horizon.describe(config, self.first_step), sys.stderr)
            for sentence in filter(None, cautions):
                log(sentence, sys.stderr)
            device, used = self.process.device, choose_precision(self.process.device, config.precision)
            why = "" if used == config.precision else f", because this CPU has no units for {config.precision}"
            log(f"{self.process.world_size} × {get_device_name(device)} in {used}{why}", sys.stderr)

    def watch(self, model: nn.Module) -> None:
        """Time the forward passes of the model that the loop calls, for the comparison of processes."""
        self.ranks.watch(model)

    def report(self, step: int, lr: float, counters: Mapping[str, float]) -> None:
        """Write the means since the last report, over all processes; `counters`: of this process's loader.

        Raises DivergedError where no step has changed the weights for long.
        """
        names = list(self.sums)
        own = (torch.stack([self.sums[name] for name in names]) / self.steps).tolist()  # here alone the host waits
        seconds = time.perf_counter() - self.started
        waited = counters["wait_seconds"] - self.waited
        means = dict(zip(names, own, strict=True))
        values, spreads = self.ranks.gather(means, self.steps, seconds, counters)
        values |= {
            "lr": lr,
            "clips_per_second": self.steps * self.horizon.global_batch / seconds,
            "step_time_ms": 1000 * seconds / self.steps,
            "data_wait_share": waited / seconds,
            "peak_memory_gib": peak_memory_gib(self.process.device),
        }
        values |= {f"pipeline/{name}": float(count) for name, count in counters.items()}
        self.write(step, values, spreads)
        if self.process.is_main:
            for sentence in self.ranks.slow_ones(spreads):
                self.bar.write(sentence, file=sys.stderr)
        self.idle_steps = self.idle_steps + self.steps if values[SKIPPED] == 1 else 0
        if self.idle_steps >= min(MAX_IDLE_STEPS, self.horizon.total_steps):
            first = step - self.idle_steps + 1
            raise DivergedError(f"the run has diverged: not one gradient of steps {first} to {step} is finite")
        shown = {"loss": values["reconstruction_loss" if "reconstruction_loss" in values else "loss"]}
        self.bar.set_postfix({**shown, "clips/s": values["clips_per_second"], "wait": values["data_wait_share"]})
        self.sums, self.steps, self.waited = {}, 0, counters["wait_seconds"]
        self.started = time.perf_counter()

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """What happens in the block is no training, and does not count as such."""
        started = time.perf_counter()
        yield
        self.started += time.perf_counter() - started

    def write(self, step: int, values: Mapping[str, float], spreads: Mapping[str, Spread] | None = None) -> None:
        """Write figures of one step, in the first process; `spreads`: those that the processes differ in."""
        if self.file is None:
            return
        compared = {name: spread._asdict() for name, spread in (spreads or {}).items()}
        with name_disk_errors(self.folder.metrics):
            line = {"step": step, **values, **({"ranks": compared} if compared else {})}
            print(json.dumps(line), file=self.file, flush=True)
        named = {name if "/" in name else f"train/{name}": value for name, value in values.items()}
        for name, spread in compared.items():
            named |= {f"ranks/{name}_{part}": spread[part] for part in ("min", "median", "max", "worst_rank")}
        with name_disk_errors(self.folder.tensorboard):
            for sink in self.sinks:
                sink.scalars(named, step)

    def show(self, name: str, picture: Image.Image, step: int) -> None:
        """Keep a picture of one step, the newest of its name also in the run's folder for its report."""
        self.folder.review.mkdir(exist_ok=True)
        with atomic_write(self.folder.review / f"{name}.png") as aside:
            picture.save(aside, "PNG")
        with name_disk_errors(self.folder.tensorboard):
            for sink in self.sinks:
                sink.picture(f"clips/{name}", picture, step)

    def __enter__(self) -> "Metrics":
        # Half a million objects of imported modules stay. To look through them takes 0.3 s, in the middle of a step and
        # so seldom that the garbage of 10 minutes waits for it; without them, a full collection takes 0.3 ms.
        gc.collect()
        gc.freeze()
        gc.collect()  # from here Python counts how many objects there are, and so how often it looks
        threading.excepthook = self._of_a_thread
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        try:
            if self.file is not None:
                with name_disk_errors(self.folder.metrics):
                    self.file.close()
            with name_disk_errors(self.folder.tensorboard):
                for sink in self.sinks:
                    sink.close()
        finally:
            gc.unfreeze()
            threading.excepthook = self._threads_report

    def _of_a_thread(self, raised: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread of its own; what the disk says there is raised here by the next figure."""
        if not isinstance(raised.exc_value, OSError) or raised.exc_value.errno not in DISK_ERRORS:
            self._threads_report(raised)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of the CUDA device, or of this process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def figures_of(line: bytes) -> dict[str, Any] | None:
    """What a line of metrics.jsonl says; None if it is none that a run wrote."""
    try:
        figures = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return figures if isinstance(figures, dict) and type(figures.get("step")) is int else None


def forget_after(file: Path, step: int) -> None:
    """Drop the lines that a killed run wrote after its last checkpoint, which will be written again.

    Lines that no run wrote are put aside and told of; the beginning of one, at the end, is what a kill leaves.
    """
    if not file.exists():
        return
    foreign = file.with_name(f"{file.name}.foreign")
    count = 0
    with atomic_write(file) as aside, file.open("rb") as before, aside.open("wb") as kept:
        for line in iter(lambda: before.readline(MAX_LINE), b""):
            figures = figures_of(line)
            if figures is not None and figures["step"] <= step:
                kept.write(line.rstrip(b"\n") + b"\n")
            elif figures is None and line.endswith(b"\n") and line.strip():
                count += 1
                with foreign.open("ab") as put_aside:
                    put_aside.write(line)
    if count:
        log(f"note: {file} held {count} lines that no run has written: they are in {foreign} now", sys.stderr)
