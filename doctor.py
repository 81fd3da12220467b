"""Check the environment and benchmark data loading: `python doctor.py [SHARDS] [section.key=value ...]`.

Prints versions and devices, how fast SHARDS are loaded, as the run of --config would and in other ways, the speed and
memory of its training step, how long it would take, and whether it would be data-bound. Under torchrun, started as the
run will be, all ranks measure at the same time, an all-reduce of the gradients is timed, and the slowest rank is named.
A failed check is a line that begins with "!"; the exit status is 1 then. Nothing is written, except for downloads of
shards into their cache.
"""

import argparse
import math
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import chain, repeat
from typing import Any

from adamae.common.arguments import ArgumentParser
from adamae.common.arithmetic import ceil_div
from adamae.common.cpus import count_cpus
from adamae.common.errors import InputError, parse_early, run_command
from adamae.common.logging import format_bytes, format_duration, log
from adamae.training.config import TrainConfig, parse

PACKAGES = {"PyTorch": "torch", "Triton": "triton", "PyAV": "av", "DALI": "nvidia.dali"}
OPTIONAL = "nvidia.dali"
CONFIGURED = "this configuration"
OTHER_WAYS: dict[str, dict[str, Any]] = {  # of loading, by their overrides
    "data.repeats=1": {"decoder": "pyav", "repeats": 1},
    "data.repeats=2": {"decoder": "pyav", "repeats": 2},
    "data.decoder=dali": {"decoder": "dali", "repeats": 1},
    "data.decoder=auto": {"decoder": "auto", "repeats": 1},
}
CPU_BATCH = 2  # clips of a batch on a CPU, where a full one may take minutes
MIN_CLIPS = 8  # measured even if they take longer than --seconds
DATA_BOUND_BELOW = 1.1  # loader speed over step speed: below, some steps wait
ALL_REDUCES = 5  # that are timed
RANK = int(
    os.environ.get("RANK", "0")
)  # torchrun's; the first one reports, the others only what fails


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument(
        "shards", nargs="?", default="", metavar="SHARDS", help="dataset folder or URL"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="such as model.size=small"
    )
    parser.add_argument("--config", metavar="FILE", help="config of the planned run")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="duration of each measurement (default 5)"
    )
    options = parser.parse_intermixed_args(arguments)
    if not 0 < options.seconds < 3600:
        raise InputError(f"--seconds is {options.seconds}: must be above 0 and below 3600")
    if "=" in options.shards:
        options.shards, options.overrides = "", [options.shards, *options.overrides]
    file = ["--config", options.config] if options.config else []
    options.config = parse([*file, f"data.shards={options.shards or 'none'}", *options.overrides])
    return options


def report(name: str, lines: Iterator[str]) -> bool:
    """Log the lines of a check; return False if it fails, for a reason that then is a line."""
    try:
        for label, line in zip(chain([name], repeat("")), lines, strict=False):
            if RANK == 0:
                log(f"  {label:<14}{line}")
    except Exception as error:  # whatever a broken installation raises
        reason = " ".join(str(error).split()) or type(error).__name__
        where = f"rank {RANK} on {socket.gethostname()}: " if RANK else ""
        log(
            f"! {name:<14}{where}{reason if isinstance(error, InputError) else f'{type(error).__name__}: {reason}'}"
        )
        return False
    return True


def check_environment() -> bool:
    """Report the machine and the packages; exit if one is broken that everything else needs."""
    report("machine", describe_machine())
    broken = [module for name, module in PACKAGES.items() if not report(name, find_version(module))]
    if {OPTIONAL}.issuperset(broken):
        return not broken
    sys.exit(1)


def describe_machine() -> Iterator[str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    yield f"{count_cpus()} of {os.cpu_count()} CPU cores available, {format_bytes(memory)} of memory"


def find_version(module: str) -> Iterator[str]:
    try:
        yield import_module(module).__version__
    except ModuleNotFoundError:
        if module != OPTIONAL:
            raise
        yield "not installed: PyAV decodes everything"


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)
    IS_INTACT = check_environment()

import torch

from adamae.common.devices import choose_device, choose_precision
from adamae.pipeline.config import DataConfig
from adamae.pipeline.loader import ClipLoader
from adamae.pipeline.planning.plan import TrainingPlan
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.accounting import describe_memory
from adamae.training.distributed import Distributed, sum_over_ranks
from adamae.training.schedule import Schedule
from adamae.training.startup_warnings import startup_warnings
from adamae.training.tasks.pretraining import Pretraining
from adamae.training.timing import PretrainingStep, noise_clip, time_calls


@dataclass
class PlannedRun:
    """What the checks are about, and what they have found; speeds are in clips/s, of this rank."""

    config: TrainConfig
    shards: str  # "": none are given
    seconds: float  # of each measurement
    dist: Distributed
    dataset: ShardDataset | None = None
    clips_per_epoch: int = 1
    loader_speeds: dict[str, float] = field(default_factory=dict)  # by way of loading
    step_speed: float = 0.0

    @property
    def on_gpu(self) -> bool:
        return self.dist.device.type == "cuda"

    @property
    def first_batch(self) -> int:
        """Clips of a batch to begin with."""
        return self.config.batch_size if self.on_gpu else min(CPU_BATCH, self.config.batch_size)

    def list_ways(self) -> dict[str, DataConfig]:
        """Return how clips could be loaded: as configured, and in the other ways that there are on this device."""
        configured = replace(self.config.data, canonical_nodes=1)
        others = {way: replace(configured, **changes) for way, changes in OTHER_WAYS.items()}
        possible = {
            way: data for way, data in others.items() if self.on_gpu or data.decoder == "pyav"
        }
        return {CONFIGURED: configured} | {
            way: data for way, data in possible.items() if data != configured
        }


def main(options: argparse.Namespace) -> int:
    config = options.config
    if not report("GPUs", describe_gpus(config)):
        return 1
    with Distributed(config.device, config.timeout_s) as dist:
        config.global_batch = config.clips_per_step(dist.world_size)
        config.batch_size = min(config.batch_size, ceil_div(config.global_batch, dist.world_size))
        run, is_intact = PlannedRun(config, options.shards, options.seconds, dist), True
        for name, check in CHECKS.items():
            is_intact &= all(dist.gather(report(name, check(run))))
            if check is describe_dataset and not is_intact:
                break
    return 0 if is_intact else 1


def describe_gpus(config: TrainConfig) -> Iterator[str]:
    yield f"{torch.cuda.device_count() or 'none'} that PyTorch can use"
    for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count())):
        yield f"{gpu.name}, {format_bytes(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
    choose_device(config.device)  # raises here what is wrong with the one that is asked for


def describe_dataset(run: PlannedRun) -> Iterator[str]:
    if not run.shards:
        return
    run.dataset = ShardDataset.open(run.config.data)
    info = run.dataset.info
    codecs = ", ".join(
        f"{name} up to {s.max_width}×{s.max_height}" for name, s in sorted(info.codecs.items())
    )
    yield (
        f"{info.num_samples:,} videos, {info.num_frames:,} frames, {format_bytes(info.num_bytes)} in"
        f" {len(info.shards):,} shards; {codecs}; {len(info.classes) or 'no'} classes"
    )
    yield from startup_warnings(run.config, run.dataset, run.dist.device)


def measure_loading(run: PlannedRun) -> Iterator[str]:
    """Load clips as configured, and in the other ways, which may be impossible."""
    if run.dataset is None:
        return
    model = run.config.model
    for way, data in run.list_ways().items():
        plan = TrainingPlan(
            run.dataset,
            data,
            num_frames=model.num_frames,
            image_size=model.image_size,
            seed=run.config.seed,
            batch_size=run.first_batch * data.repeats,
            rank=run.dist.rank,
            world_size=run.dist.world_size,
        )
        try:
            speed, counters = time_loader(run, data, plan)
        except InputError as error:
            if way == CONFIGURED:
                raise
            yield f"not available with {way}: {error}"
            continue
        if way == CONFIGURED:
            run.clips_per_epoch = plan.clips_per_epoch
        run.loader_speeds[way] = speed
        reading = counters["read_seconds"] / max(
            1e-9, counters["read_seconds"] + counters["decode_seconds"]
        )
        bad = (
            f", {counters['bad_clips']:.0f} clips cannot be decoded"
            if counters["bad_clips"]
            else ""
        )
        clip = "×".join(map(str, (model.num_frames, *model.frame_size)))
        yield f"{speed:.3g} clips/s of {clip} with {way}, {data.workers} decode workers, {reading:.0%} reading{bad}"


def time_loader(
    run: PlannedRun, data: DataConfig, plan: TrainingPlan
) -> tuple[float, dict[str, float]]:
    """Return the speed of a loader and its counters."""
    assert run.dataset is not None
    with ClipLoader(run.dataset, plan, run.dist.device, data, quarantine=None) as loader:
        batches = loader.batches(0)
        next(batches)  # starting up takes longer
        clips, start = 0, time.perf_counter()
        while clips < MIN_CLIPS or time.perf_counter() - start < run.seconds:
            clips += len(next(batches).keys)
        return clips / (time.perf_counter() - start), loader.counters


def measure_step(run: PlannedRun) -> Iterator[str]:
    """Time this rank's steps on random clips, on a CPU of as many as --seconds allow, and then an all-reduce."""
    config, count, dist = run.config, run.first_batch, run.dist
    step = PretrainingStep(Pretraining(config, None, dist), config.compile)

    def time_step(repetitions: int) -> float:
        clip = noise_clip(config.model, count, dist.device)
        return statistics.mean(time_calls(partial(step, clip), dist.device, 1, repetitions)) / 1e3

    seconds = time_step(1)
    if count < config.batch_size:
        count = max(count, min(config.batch_size, int(count * run.seconds / seconds)))
        seconds = time_step(1)
    run.step_speed = count / time_step(math.ceil(run.seconds / seconds))
    precision = choose_precision(dist.device, config.precision)
    yield (
        f"{run.step_speed:.3g} clips/s{' per rank' * (dist.world_size > 1)}: pre-training, size {config.model.size},"
        f" mask ratio {config.model.mask_ratio:g}, batches of {count}, {precision}"
    )
    if dist.world_size > 1:
        yield measure_all_reduce(
            sum(p.numel() for p in step.model.parameters() if p.requires_grad), dist
        )


def measure_all_reduce(num_gradients: int, dist: Distributed) -> str:
    gradients = torch.zeros(num_gradients, device=dist.device)
    # The first one connects the ranks.
    seconds = (
        statistics.median(
            time_calls(lambda: sum_over_ranks(gradients), dist.device, 1, ALL_REDUCES)
        )
        / 1e3
    )
    moved = (
        2 * (dist.world_size - 1) / dist.world_size * gradients.nbytes
    )  # by each rank, in a ring
    backend = torch.distributed.get_backend()
    advice = ", and NCCL_DEBUG=INFO says by which interface" * (backend == "nccl")
    return (
        f"all-reduce of the gradients ({format_bytes(gradients.nbytes)}) over {dist.world_size} ranks by {backend}:"
        f" {1000 * seconds:.3g} ms, {format_bytes(moved / seconds)}/s per rank; a step hides some of it{advice}"
    )


def compare_ranks(run: PlannedRun) -> Iterator[str]:
    """Name the rank whose steps take longest, and the one whose loader is slowest."""
    if run.dist.world_size > 1:
        speeds = run.step_speed, run.loader_speeds.get(CONFIGURED)
        hosts, *columns = zip(
            *run.dist.gather((socket.gethostname(), *filter(None, speeds))), strict=True
        )
        for what, values in zip(("trains", "loads"), columns, strict=False):
            rank, median = values.index(min(values)), statistics.median(values)
            yield f"rank {rank} on {hosts[rank]} {what} {values[rank]:.3g} clips/s, the median is {median:.3g}"


def predict_memory(run: PlannedRun) -> Iterator[str]:
    if run.config.task == "pretrain" and run.dist.is_main:
        yield from (f"{part:<15}{size}" for part, size in describe_memory(run.config))


def estimate_duration(run: PlannedRun) -> Iterator[str]:
    """Estimate how long the run takes here: as the step or the loader of the slowest rank; on a CPU, which they share,
    as both."""
    config, dist = run.config, run.dist
    if config.task != "pretrain":
        return
    if run.dataset is None and config.steps is None:
        yield "give SHARDS, or steps, to estimate it"
        return
    seconds = [1 / speed for speed in (run.step_speed, run.loader_speeds.get(CONFIGURED)) if speed]
    per_clip = max(dist.gather(max(seconds, default=0.0) if run.on_gpu else sum(seconds)))
    if not per_clip:
        return
    schedule = Schedule(config, run.clips_per_epoch, dist.world_size)
    clips, speed = schedule.total_steps * schedule.global_batch, dist.world_size / per_clip
    yield (
        f"this run takes about {format_duration(clips / speed)} here: {schedule.total_steps:,} steps of"
        f" {schedule.global_batch} clips, {speed:.3g} clips/s, without evaluations"
    )


def compare_speeds(run: PlannedRun) -> Iterator[str]:
    """Compare all ways of loading with the training step; say how many cores PyAV needs beside a GPU."""
    speeds = run.loader_speeds
    if not (run.step_speed and CONFIGURED in speeds):
        return
    ratio, verdict, advice = speeds[CONFIGURED] / run.step_speed, "not data-bound", ""
    if ratio < DATA_BOUND_BELOW:
        verdict = f"data-bound, stalled about {1 - min(ratio, 1):.0%} of the time"
        advice = "; more CPU cores help too"
    made = ", ".join(f"{speed:.3g} with {way}" for way, speed in speeds.items())
    yield f"{verdict}: the training step takes {run.step_speed:.3g} clips/s, the loader makes {made}{advice}"
    if run.on_gpu:
        cores = count_cpus()
        busy = min(run.config.data.workers, cores)
        by_pyav = [way for way, data in run.list_ways().items() if data.decoder == "pyav"]
        needed = ", ".join(
            f"{math.ceil(busy * run.step_speed / speeds[way])} with {way}" for way in by_pyav
        )
        per_gpu = cores / torch.cuda.device_count()
        yield f"CPU cores per GPU that load as fast as a step: {needed}; there are {per_gpu:.3g} per GPU"


CHECKS = {
    "dataset": describe_dataset,
    "loading": measure_loading,
    "step": measure_step,
    "slowest": compare_ranks,
    "memory": predict_memory,
    "duration": estimate_duration,
    "verdict": compare_speeds,
}

if __name__ == "__main__":
    run_command(lambda: main(OPTIONS) or not IS_INTACT)
