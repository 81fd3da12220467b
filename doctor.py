"""Check the environment and benchmark data loading.

    python doctor.py [SHARDS] [section.key=value ...]

Prints versions and devices, how fast SHARDS are loaded, as the run of --config would and in other
ways, the speed and memory of its training step, how long it would take, and whether it would be
data-bound. Under torchrun, started as the run will be, all ranks measure at the same time, an
all-reduce of the gradients is timed, and the slowest rank is named. A failed check is a line that
begins with "!"; the exit status is 1 then. Nothing is written, except for downloads of shards into
their cache.
"""

import argparse
import math
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

from adamae.common.arguments import ArgumentParser
from adamae.common.arithmetic import ceil_div
from adamae.common.commands import command_line, log_next
from adamae.common.cpus import count_cpus
from adamae.common.errors import InputError, parse_early, run_command
from adamae.common.logging import format_bytes, format_count, format_duration, log
from adamae.training.config import TrainConfig, parse

PACKAGES = {"PyTorch": "torch", "Triton": "triton", "PyAV": "av", "DALI": "nvidia.dali"}
OPTIONAL = "nvidia.dali"
CONFIGURED = "this configuration"
# What else could be set in section `data`, by the name in the report.
OTHER_WAYS: dict[str, dict[str, Any]] = {
    "data.repeats=1": {"decoder": "pyav", "repeats": 1},
    "data.repeats=2": {"decoder": "pyav", "repeats": 2},
    "data.decoder=dali": {"decoder": "dali", "repeats": 1},
    "data.decoder=auto": {"decoder": "auto", "repeats": 1},
}
# Clips per batch on a CPU, where a full batch may take minutes.
CPU_BATCH = 2
# These are measured even if they take longer than --seconds.
MIN_CLIPS = 8
# Loader speed over step speed. The speed of a loader varies, so one that is barely faster stalls
# some steps.
DATA_BOUND_BELOW = 1.1
NUM_ALL_REDUCES = 5
# torchrun sets it. The first rank reports, the others only what fails.
RANK = int(os.environ.get("RANK", "0"))

Say = Callable[[str], None]


@dataclass(frozen=True)
class Check:
    """A named part of the report.

    `run(say)` calls `say(line)` for each line as soon as it is measured, so that the lines before
    an error are reported too, and raises what is wrong.
    """

    name: str
    run: Callable[[Say], None]

    def report(self) -> bool:
        """Log the lines of the check; return False if it fails, for a reason that is logged too."""
        label = self.name

        def say(line: str) -> None:
            nonlocal label
            if RANK == 0:
                log(f"  {label:<14}{line}")
            label = ""

        try:
            self.run(say)
        # A broken installation may raise anything, and the other checks are still of use.
        except Exception as error:
            log(f"! {self.name:<14}{describe_error(error)}")
            return False
        return True


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
    # Without SHARDS, the parser takes the first override for them.
    if "=" in options.shards:
        options.overrides.insert(0, options.shards)
        options.shards = ""
    file = ["--config", options.config] if options.config else []
    options.next_words = [*file, f"data.shards={options.shards}", *options.overrides]
    options.config = parse([*file, f"data.shards={options.shards or 'none'}", *options.overrides])
    return options


def describe_error(error: Exception) -> str:
    """Return the error in one line, with its type unless its message is meant for users."""
    line = " ".join(str(error).split())
    if not line:
        line = type(error).__name__
    elif not isinstance(error, InputError):
        line = f"{type(error).__name__}: {line}"
    if RANK != 0:
        line = f"rank {RANK} on {socket.gethostname()}: {line}"
    return line


def check_environment() -> bool:
    """Report the machine and the packages; return whether all is well.

    Exit if a package is broken without which nothing works.
    """
    Check("machine", describe_machine).report()
    broken = []
    for name, module in PACKAGES.items():
        if not Check(name, partial(find_version, module)).report():
            broken.append(module)
    if any(module != OPTIONAL for module in broken):
        sys.exit(1)
    return not broken


def describe_machine(say: Say) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    say(f"{platform.system()} {platform.release()}, Python {platform.python_version()}")
    cores = f"{count_cpus()} of {os.cpu_count()} CPU cores available"
    say(f"{cores}, {format_bytes(memory)} of memory")


def find_version(module: str, say: Say) -> None:
    try:
        say(import_module(module).__version__)
    except ModuleNotFoundError:
        if module != OPTIONAL:
            raise
        say("not installed: PyAV decodes everything")


# Mistakes and --help are answered here, before the imports that take seconds.
if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)
    IS_INTACT = check_environment()

import torch

from adamae.common.devices import choose_device, choose_precision
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.gpu_codecs import SESSION_SECONDS
from adamae.pipeline.loader import ClipLoader
from adamae.pipeline.planning.plan import TrainingPlan
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.accounting import describe_memory
from adamae.training.distributed import Distributed, sum_over_ranks
from adamae.training.parallelize import check_views
from adamae.training.schedule import Schedule
from adamae.training.startup_warnings import startup_warnings
from adamae.training.tasks.pretraining import Pretraining
from adamae.training.timing import PretrainingStep, noise_clip, time_calls


@dataclass
class PlannedRun:
    """What the checks are about, and what they have measured so far.

    Speeds are this rank's, in clips/s.
    """

    config: TrainConfig
    # "" if none are named: then only the training step is measured.
    shards: str
    # The duration of each measurement.
    seconds: float
    dist: Distributed
    dataset: ShardDataset | None = None
    clips_per_epoch: int = 1
    # By way of loading: CONFIGURED or a key of OTHER_WAYS.
    loader_speeds: dict[str, float] = field(default_factory=dict)
    step_speed: float = 0.0

    @property
    def on_gpu(self) -> bool:
        return self.dist.device.type == "cuda"

    @property
    def first_batch(self) -> int:
        """The clips of a batch to begin with; on a CPU, measure_step looks for more."""
        if self.on_gpu:
            return self.config.batch_size
        return min(CPU_BATCH * self.config.model.views, self.config.batch_size)

    def list_ways(self) -> dict[str, DataConfig]:
        """Return the ways to load clips on this device: as configured first, then the others."""
        # The batches measured here need not be divisible by the number of nodes of the run.
        configured = replace(self.config.data, canonical_nodes=1)
        ways = {CONFIGURED: configured}
        for way, changes in OTHER_WAYS.items():
            if self.config.model.views > 1:
                # There are as many views as data.repeats, whoever decodes them.
                decoder = changes["decoder"]
                way = f"data.decoder={decoder}"
                data = replace(configured, decoder=decoder)
            else:
                # A single clip of a video has no other to begin apart from.
                apart_s = 0 if changes["repeats"] == 1 else configured.views_apart_s
                data = replace(configured, **changes, views_apart_s=apart_s)
            is_possible = self.on_gpu or data.decoder == "pyav"
            if is_possible and data != configured:
                ways[way] = data
        return ways


def main(options: argparse.Namespace) -> int:
    config = options.config
    if not Check("GPUs", partial(describe_gpus, config)).report():
        return 1
    with Distributed(config.device, config.timeout_s) as dist:
        check_views(config, dist.world_size)
        config.global_batch = config.clips_per_step(dist.world_size)
        # With many ranks, the part of each in a step may be smaller than its micro-batch.
        config.batch_size = min(config.batch_size, ceil_div(config.global_batch, dist.world_size))
        run = PlannedRun(config, options.shards, options.seconds, dist)
        # Each one uses what those before it have measured.
        checks = [
            Check("loading", partial(measure_loading, run)),
            Check("step", partial(measure_step, run)),
            Check("slowest", partial(compare_ranks, run)),
            Check("memory", partial(predict_memory, run)),
            Check("duration", partial(estimate_duration, run)),
            Check("verdict", partial(compare_speeds, run)),
        ]
        # Beside a wrong path, the seconds of the other checks would be wasted.
        if not report_on_all_ranks(Check("dataset", partial(describe_dataset, run)), dist):
            return 1
        results = [report_on_all_ranks(check, dist) for check in checks]
    if not all(results):
        return 1
    if RANK == 0 and run.shards:
        log_next(command_line("train", *options.next_words))
    return 0


def report_on_all_ranks(check: Check, dist: Distributed) -> bool:
    """Return whether the check succeeds on all ranks, so that they continue or end together."""
    return all(dist.gather(check.report()))


def describe_gpus(config: TrainConfig, say: Say) -> None:
    num_gpus = torch.cuda.device_count()
    say(f"{num_gpus or 'none'} that PyTorch can use")
    for index in range(num_gpus):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        say(f"{gpu.name}, {format_bytes(gpu.total_memory)}, {capability}")
    # Raises here if PyTorch cannot use the device that is configured.
    choose_device(config.device)


def describe_dataset(run: PlannedRun, say: Say) -> None:
    if not run.shards:
        return
    run.dataset = ShardDataset.open(run.config.data)
    info = run.dataset.info
    codecs = []
    for name, codec in sorted(info.codecs.items()):
        codecs.append(f"{name} up to {codec.max_width}×{codec.max_height}")
    size = f"{format_count(info.num_samples, 'video')}, {format_count(info.num_frames, 'frame')}"
    shards = f"{format_bytes(info.num_bytes)} in {format_count(len(info.shards), 'shard')}"
    classes = format_count(len(info.classes), "class")
    say(f"{size}, {shards}; {', '.join(codecs)}; {classes}")
    for warning in startup_warnings(run.config, run.dataset, run.dist.device):
        say(warning)


def measure_loading(run: PlannedRun, say: Say) -> None:
    """Time loading as configured, and in the other ways, which may be impossible here."""
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
            say(f"not available with {way}: {error}")
            continue
        if way == CONFIGURED:
            run.clips_per_epoch = plan.clips_per_epoch
        run.loader_speeds[way] = speed
        busy_seconds = counters["read_seconds"] + counters["decode_seconds"]
        # Decode workers count these seconds; where a GPU decodes, there may be none.
        reading = counters["read_seconds"] / max(1e-9, busy_seconds)
        shape = "×".join(map(str, (model.num_frames, *model.frame_size)))
        workers = format_count(data.workers, "decode worker")
        line = f"{speed:.3g} clips/s of {shape} with {way}, {workers}"
        line += f", {reading:.0%} reading"
        if counters["bad_clips"]:
            line += f", {counters['bad_clips']:.0f} clips cannot be decoded"
        say(line)


def time_loader(
    run: PlannedRun, data: DataConfig, plan: TrainingPlan
) -> tuple[float, dict[str, float]]:
    """Return the speed of a loader in clips/s, and its counters."""
    assert run.dataset is not None
    with ClipLoader(run.dataset, plan, run.dist.device, data, quarantine=None) as loader:
        batches = loader.batches(0)
        # Untimed: workers start up before the first batch, and NVDEC opens sessions.
        warm_up_s = SESSION_SECONDS if run.on_gpu and data.decoder != "pyav" else 0.0
        start = time.perf_counter()
        next(batches)
        while time.perf_counter() - start < warm_up_s:
            next(batches)
        num_clips = 0
        start = time.perf_counter()
        while num_clips < MIN_CLIPS or time.perf_counter() - start < run.seconds:
            num_clips += len(next(batches).keys)
        return num_clips / (time.perf_counter() - start), loader.counters


def measure_step(run: PlannedRun, say: Say) -> None:
    """Time this rank's steps on random clips, and then an all-reduce.

    On a CPU, a batch has as many clips as --seconds allow.
    """
    config = run.config
    dist = run.dist
    step = PretrainingStep(Pretraining(config, None, dist), config.compile)
    batch_size = run.first_batch

    def time_step(repetitions: int) -> float:
        """Return the mean seconds of a step on `batch_size` clips."""
        clip = noise_clip(config.model, batch_size, dist.device)
        milliseconds = time_calls(partial(step, clip), dist.device, 1, repetitions)
        return statistics.mean(milliseconds) / 1e3

    seconds = time_step(1)
    if batch_size < config.batch_size:
        affordable = int(batch_size * run.seconds / seconds)
        affordable -= affordable % config.model.views
        batch_size = max(batch_size, min(config.batch_size, affordable))
        seconds = time_step(1)
    run.step_speed = batch_size / time_step(math.ceil(run.seconds / seconds))
    per_rank = " per rank" if dist.world_size > 1 else ""
    precision = choose_precision(dist.device, config.precision)
    say(
        f"{run.step_speed:.3g} clips/s{per_rank}: pre-training, size {config.model.size},"
        f" mask ratio {config.model.mask_ratio:g}, batches of {batch_size}, {precision}"
    )
    if dist.world_size > 1:
        num_gradients = sum(p.numel() for p in step.model.parameters() if p.requires_grad)
        say(measure_all_reduce(num_gradients, dist))


def measure_all_reduce(num_gradients: int, dist: Distributed) -> str:
    """Return a line with the time of an fp32 all-reduce and the bytes/s that each rank sends."""
    gradients = torch.zeros(num_gradients, device=dist.device)
    # The first call is not timed: it connects the ranks.
    milliseconds = statistics.median(
        time_calls(lambda: sum_over_ranks(gradients), dist.device, 1, NUM_ALL_REDUCES)
    )
    # In a ring of n ranks, each one sends (n - 1) / n of the bytes to add up, and again to share
    # the sums.
    num_bytes = 2 * (dist.world_size - 1) / dist.world_size * gradients.nbytes
    backend = torch.distributed.get_backend()
    size = format_bytes(gradients.nbytes)
    rate = format_bytes(num_bytes / milliseconds * 1e3)
    line = (
        f"all-reduce of the gradients ({size}) over {dist.world_size} ranks by {backend}:"
        f" {milliseconds:.3g} ms, {rate}/s per rank; a step hides some of it"
    )
    if backend == "nccl":
        line += ", and NCCL_DEBUG=INFO says by which interface"
    return line


def compare_ranks(run: PlannedRun, say: Say) -> None:
    """Name the rank that trains slowest, and the one that loads slowest."""
    if run.dist.world_size == 1:
        return
    hosts = run.dist.gather(socket.gethostname())
    own_speeds = {"trains": run.step_speed, "loads": run.loader_speeds.get(CONFIGURED, 0.0)}
    for verb, own_speed in own_speeds.items():
        speeds = run.dist.gather(own_speed)
        slowest = min(speeds)
        # What failed, or was not asked for, has no speed.
        if slowest == 0:
            continue
        rank = speeds.index(slowest)
        median = statistics.median(speeds)
        say(
            f"rank {rank} on {hosts[rank]} {verb} {slowest:.3g} clips/s, the median is {median:.3g}"
        )


def predict_memory(run: PlannedRun, say: Say) -> None:
    # The accounting covers pre-training only.
    if run.config.task == "pretrain" and run.dist.is_main:
        for part, size in describe_memory(run.config):
            say(f"{part:<15}{size}")


def estimate_duration(run: PlannedRun, say: Say) -> None:
    """Estimate how long the run takes here, from the slowest rank.

    On a GPU, a step and the loading for it overlap, so the slower one counts; on a CPU they share
    the cores, so their times add up.
    """
    config = run.config
    dist = run.dist
    if config.task != "pretrain":
        return
    if run.dataset is None and config.steps is None:
        say("give SHARDS, or steps, to estimate it")
        return
    speeds = (run.step_speed, run.loader_speeds.get(CONFIGURED, 0.0))
    seconds = [1 / speed for speed in speeds if speed > 0]
    own_seconds_per_clip = max(seconds, default=0.0) if run.on_gpu else sum(seconds)
    seconds_per_clip = max(dist.gather(own_seconds_per_clip))
    if seconds_per_clip == 0:
        return
    schedule = Schedule(config, run.clips_per_epoch, dist.world_size)
    num_clips = schedule.total_steps * schedule.global_batch
    speed = dist.world_size / seconds_per_clip
    duration = format_duration(num_clips / speed)
    say(
        f"this run takes about {duration} here: {schedule.total_steps:,} steps of"
        f" {schedule.global_batch} clips, {speed:.3g} clips/s, without evaluations"
    )


def compare_speeds(run: PlannedRun, say: Say) -> None:
    """Compare all ways of loading with the training step.

    Beside a GPU, say how many cores PyAV needs.
    """
    speeds = run.loader_speeds
    if run.step_speed == 0 or CONFIGURED not in speeds:
        return
    ratio = speeds[CONFIGURED] / run.step_speed
    if ratio < DATA_BOUND_BELOW:
        verdict = f"data-bound, stalled about {1 - min(ratio, 1):.0%} of the time"
        advice = "; more CPU cores help too"
    else:
        verdict = "not data-bound"
        advice = ""
    loaded = ", ".join(f"{speed:.3g} with {way}" for way, speed in speeds.items())
    step = f"the training step takes {run.step_speed:.3g} clips/s"
    say(f"{verdict}: {step}, the loader makes {loaded}{advice}")
    if run.on_gpu:
        say(count_needed_cores(run))


def count_needed_cores(run: PlannedRun) -> str:
    """Return a line with the CPU cores that PyAV needs to load as fast as a GPU trains.

    Example: 4 workers load 60 clips/s, a step takes 300 clips/s: 4 * 300 / 60 = 20 cores.
    """
    num_cores = count_cpus()
    num_busy = min(run.config.data.workers, num_cores)
    needed = []
    for way, data in run.list_ways().items():
        # A way that is not available has no speed.
        if data.decoder == "pyav" and way in run.loader_speeds:
            count = math.ceil(num_busy * run.step_speed / run.loader_speeds[way])
            needed.append(f"{count} with {way}")
    per_gpu = num_cores / torch.cuda.device_count()
    return (
        f"CPU cores per GPU that load as fast as a step: {', '.join(needed)};"
        f" there are {per_gpu:.3g} per GPU"
    )


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS) or not IS_INTACT)
