"""What a run says about itself: a progress bar, `metrics.jsonl`, TensorBoard. Nothing here waits for the device
except `report`, once every `log_every` steps and before a checkpoint, so that what is saved has been logged."""

import json
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from devices import device_name, usable_precision
from durable import write_text
from errors import InputError
from progress import progress_bar
from terminal import say
from training.config import TrainConfig
from training.distributed import Process, mean_over_processes
from training.failures import CALM
from training.run_folder import RunFolder
from training.schedule import Horizon

SKIPPED = "skipped_updates"  # share of the steps whose gradient was not finite, so that they changed nothing
MAX_IDLE_STEPS = 10  # one gradient may overflow; ten in a row do not come back


class Metrics:
    """Sums per-step tensors on the device; reads, averages over processes and writes them when asked."""

    def __init__(self, folder: RunFolder, process: Process, horizon: Horizon, first_step: int) -> None:
        self.process, self.horizon, self.first_step = process, horizon, first_step
        self.sums: dict[str, Tensor] = {}
        self.steps = 0
        self.idle_steps = 0  # the newest ones, of which none changed the weights
        self.started = time.perf_counter()
        self.waited = 0.0
        self.file = self.writer = None
        if process.is_first:
            _forget_after(folder.metrics, first_step)
            self.file = folder.metrics.open("a", encoding="utf-8")
            # Steps that a killed run logged after its last checkpoint are logged again.
            self.writer = SummaryWriter(str(folder.tensorboard), purge_step=first_step + 1)
        self.bar = progress_bar(
            unit="step", total=horizon.total_steps, initial=first_step, disable=not process.is_first
        )

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            value = value.detach().float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.steps += 1
        self.bar.update()

    def announce(self, config: TrainConfig) -> None:
        if self.process.is_first:
            say(self.horizon.describe(config, self.first_step), sys.stderr)
            device, used = self.process.device, usable_precision(self.process.device, config.precision)
            why = "" if used == config.precision else f", because this CPU has no units for {config.precision}"
            say(f"{self.process.world_size} × {device_name(device)} in {used}{why}", sys.stderr)

    def report(self, step: int, lr: float, counters: Mapping[str, float]) -> None:
        """Write the means since the last report, over all processes; `counters`: of this process's loader.

        Raises InputError where no step has changed the weights for long.
        """
        names = list(self.sums)
        means = mean_over_processes(torch.stack([self.sums[name] for name in names]) / self.steps)
        values = dict(zip(names, means.tolist(), strict=True))  # the one moment at which the host waits
        seconds = time.perf_counter() - self.started
        waited = counters["wait_seconds"] - self.waited
        values |= {
            "lr": lr,
            "clips_per_second": self.steps * self.horizon.global_batch / seconds,
            "step_time_ms": 1000 * seconds / self.steps,
            "data_wait_share": waited / seconds,
            "peak_memory_gib": peak_memory_gib(self.process.device),
        }
        values |= {f"pipeline/{name}": float(count) for name, count in counters.items()}
        self.write(step, values)
        self.idle_steps = self.idle_steps + self.steps if values[SKIPPED] == 1 else 0
        if self.idle_steps >= min(MAX_IDLE_STEPS, self.horizon.total_steps):
            first = step - self.idle_steps + 1
            raise InputError(f"the run has diverged: not one gradient of steps {first} to {step} is finite; {CALM}")
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

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write figures of one step, in the first process."""
        if self.file is None or self.writer is None:
            return
        print(json.dumps({"step": step, **values}), file=self.file, flush=True)
        for name, value in values.items():
            self.writer.add_scalar(name if "/" in name else f"train/{name}", value, step)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.file is not None and self.writer is not None:
            self.file.close()
            self.writer.close()


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of the CUDA device, or of this process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _forget_after(file: Path, step: int) -> None:
    """Drop the lines that a killed run wrote after its last checkpoint, which will be written again."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            continue
    write_text(file, "".join(kept))
