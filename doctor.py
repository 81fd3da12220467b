"""Check the environment and benchmark data loading: `python doctor.py [SHARDS] [section.key=value ...]`.

Prints versions and devices, how fast SHARDS are read and decoded, with one and two clips from every decoded video, the
speed and memory of a training step (of --config, as train.py would run it), how long the run would take, and whether it
would be data-bound. Under torchrun, started as the run will be, all ranks measure at the same time, an all-reduce of
the gradients is timed, and the slowest rank is named. A failed check is a line that begins with "!"; the exit status is
1 then. Nothing is written, except for downloads of shards into their cache.
"""

import argparse
import fcntl
import math
import os
import platform
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import chain, repeat

from common.arguments import ArgumentParser
from common.cpus import count_cpus
from common.errors import InputError, parse_early, run_command
from common.logging import escape, format_bytes, format_duration, log
from training.config import TrainConfig, parse

PACKAGES = {"PyTorch": "torch", "Triton": "triton", "PyAV": "av", "DALI": "nvidia.dali"}
OPTIONAL = {"nvidia.dali": "not installed: PyAV decodes everything"}
READ_BYTES = 2**28  # of the shards, for the speed of the disk
DOWNLOADED_BYTES = 2**25  # likewise, from object storage
CPU_BATCH = 2  # clips of a batch on a CPU, where a full one may take minutes
MIN_CLIPS = 8  # measured even if they take longer than --seconds
DATA_BOUND_BELOW = 1.1  # loader speed over step speed: below, some steps wait
ALL_REDUCES = 5  # that are timed
SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
RANK = int(os.environ.get("RANK", "0"))  # torchrun's; the first one reports, the others only what fails


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("shards", nargs="?", default="", metavar="SHARDS", help="dataset folder or URL")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as model.size=small")
    parser.add_argument("--config", metavar="FILE", help="config of the planned run")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each measurement (default 5)")
    options = parser.parse_intermixed_args(arguments)
    if not 0 < options.seconds < 3600:
        raise InputError(f"--seconds is {options.seconds}: must be above 0 and below 3600")
    if "=" in options.shards:
        options.shards, options.overrides = "", [options.shards, *options.overrides]
    file = ["--config", options.config] if options.config else []
    options.config = parse([*file, f"data.shards={options.shards or 'none'}", *options.overrides])
    return options


def say(line: str) -> None:
    if RANK == 0:
        log(line)


def report(name: str, lines: Iterator[str]) -> bool:
    """Log the lines of a check; return False if it fails, for a reason that then is a line."""
    try:
        for label, line in zip(chain([name], repeat("")), lines, strict=False):
            say(f"  {label:<14}{line}")
    except Exception as error:  # whatever a broken installation raises
        reason = " ".join(str(error).split()) or type(error).__name__
        where = f"rank {RANK} on {socket.gethostname()}: " if RANK else ""
        log(f"! {name:<14}{where}{reason if isinstance(error, InputError) else f'{type(error).__name__}: {reason}'}")
        return False
    return True


def check_environment() -> bool:
    """Report the machine and the packages; exit if one is broken that everything else needs."""
    say("environment")
    report("machine", describe_machine())
    broken = [module for name, module in PACKAGES.items() if not report(name, find_version(module))]
    if not OPTIONAL.keys() >= set(broken):
        sys.exit(1)
    return not broken


def describe_machine() -> Iterator[str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    yield f"{count_cpus()} of {os.cpu_count()} CPU cores available, {format_bytes(memory)} of memory"


def find_version(module: str) -> Iterator[str]:
    try:
        yield import_module(module).__version__
    except ModuleNotFoundError:
        if module not in OPTIONAL:
            raise
        yield OPTIONAL[module]


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)
    IS_INTACT = check_environment()

import fsspec
import numpy as np
import torch
from torch import nn

from benchmarks.memory_vs_ratio import describe_memory
from common.devices import autocast_to, choose_device, choose_precision
from pipeline.config import Decoder
from pipeline.loader import Batch, ClipLoader
from pipeline.planning.crops import FrameSize
from pipeline.planning.plan import TrainingPlan
from pipeline.reading.storage import is_remote
from pipeline.shards.dataset import ShardDataset
from train import train_step
from training.distributed import Distributed, sum_over_ranks
from training.optimizer import make_optimizer
from training.parallelize import parallelize
from training.schedule import Schedule
from training.startup_warnings import MAX_CHECKED, startup_warnings
from training.tasks.pretraining import Pretraining


@dataclass
class PlannedRun:
    """What the checks are about, and what they have found; speeds are in clips/s, of this rank."""

    config: TrainConfig
    seconds: float  # of each measurement
    dist: Distributed
    dataset: ShardDataset | None = None
    loader_speeds: dict[tuple[str, int], float] = field(default_factory=dict)  # by decoder, clips per decoded video
    step_speed: float = 0.0
    forward_ms: float = 0.0  # of a step, where there are several ranks

    @property
    def first_batch(self) -> int:
        """Clips of a batch to begin with."""
        return min(CPU_BATCH, self.config.batch_size) if self.dist.device.type == "cpu" else self.config.batch_size

    @property
    def planned_speed(self) -> float:
        """What the loader makes as the run is configured, or by the nearest way that was measured."""
        data = self.config.data
        nearest = ("pyav", min(data.repeats, 2))
        key = ("dali", 1) if data.decoder == "dali" else ("auto", 1) if data.dali_share == "auto" else nearest
        return self.loader_speeds.get(key) or self.loader_speeds.get(nearest, 0.0)


def main(options: argparse.Namespace) -> int:
    config = options.config
    if not report("GPUs", describe_gpus(config)):
        return 1
    with Distributed(config.device, config.distributed.timeout_s) as dist:
        return 0 if all(list(check_run(PlannedRun(config, options.seconds, dist), options.shards))) else 1


def check_run(run: PlannedRun, shards: str) -> Iterator[bool]:
    """Report all checks but those of the environment; all ranks take the same ones."""
    config, dist, on_cpu = run.config, run.dist, run.dist.device.type == "cpu"
    config.global_batch = config.clips_per_step(dist.world_size)
    config.batch_size = min(config.batch_size, -(-config.global_batch // dist.world_size))
    if shards:
        say(f"dataset {escape(shards)}")
        is_readable = all(dist.gather(report("content", describe_dataset(run))))
        yield is_readable
        if not is_readable:
            return
    if run.dataset:
        yield report("read", measure_reading(run.dataset))
        yield report("PyAV decode", measure_decoder(run, run.dataset, "pyav", (1, 2)))
        dali = iter(["needs a GPU"]) if on_cpu else measure_decoder(run, run.dataset, "dali", (1,))
        yield report("DALI decode", dali)
        if not on_cpu and ("dali", 1) in run.loader_speeds:
            yield report("both decode", measure_decoder(run, run.dataset, "auto", (1,)))
    say("training step")
    yield report("speed", measure_step(run))
    if dist.world_size > 1:
        yield report("slowest", compare_ranks(run))
    if config.task == "pretrain":
        if dist.is_main:
            yield report("memory", (f"{part:<15}{size}" for part, size in describe_memory(config)))
        yield report("duration", estimate_duration(run))
    if run.loader_speeds and run.step_speed:
        yield report("verdict", compare_speeds(run))


def describe_gpus(config: TrainConfig) -> Iterator[str]:
    yield f"{torch.cuda.device_count() or 'none'} that PyTorch can use"
    if shutil.which("nvidia-smi"):
        queries = "name,memory.total,compute_cap,driver_version,power.limit"
        command = ["nvidia-smi", f"--query-gpu={queries}", "--format=csv"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        yield from (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip().splitlines()
    choose_device(config.device)  # raises here what is wrong with the one that is asked for


def describe_dataset(run: PlannedRun) -> Iterator[str]:
    run.dataset = ShardDataset.open(run.config.data)
    info = run.dataset.info
    codecs = ", ".join(f"{name} up to {s.max_width}×{s.max_height}" for name, s in sorted(info.codecs.items()))
    yield (
        f"{info.num_samples:,} videos, {info.num_frames:,} frames, {format_bytes(info.num_bytes)} in"
        f" {len(info.shards):,} shards; {codecs}; {len(info.classes) or 'no'} classes"
    )
    lengths = run.dataset.column("num_frames", MAX_CHECKED) / run.dataset.column("fps", MAX_CHECKED)
    shortest, median, longest = map(format_duration, np.quantile(lengths, [0, 0.5, 1]))
    yield f"{median} is the median length of a video, {shortest} the shortest, {longest} the longest"
    yield from startup_warnings(run.config, run.dataset, run.dist.device)


def measure_reading(dataset: ShardDataset) -> Iterator[str]:
    """Read from object storage, or from the disk itself: the shards are dropped from the page cache before."""
    remote = is_remote(dataset.shards[0])
    source, wanted = ("object storage, one connection", DOWNLOADED_BYTES) if remote else ("disk", READ_BYTES)
    read, start = 0, time.perf_counter()
    for shard in dataset.shards:
        with fsspec.open(shard, "rb", cache_type="none") as opened:
            if not remote:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while read < wanted and (chunk := opened.read(2**22)):
                read += len(chunk)
        if read >= wanted:
            break
    speed = read / (time.perf_counter() - start)
    free = "" if remote else f", {format_bytes(shutil.disk_usage(dataset.folder).free)} free"
    yield f"{format_bytes(speed)}/s from {source} ({format_bytes(read)} read){free}"


def measure_decoder(
    run: PlannedRun, dataset: ShardDataset, decoder: Decoder, repeats: tuple[int, ...]
) -> Iterator[str]:
    """Load clips with one decoder alone, or with both (auto), `repeats` of them from every decoded video."""
    sizes = run.config.model
    for count in repeats:
        data = replace(
            run.config.data, decoder=decoder, repeats=count, dali_share="auto" if decoder == "auto" else None,
            canonical_nodes=1,
        )  # fmt: skip
        plan = TrainingPlan(
            dataset, data, num_frames=sizes.num_frames, image_size=sizes.image_size, seed=run.config.seed,
            batch_size=run.first_batch * count, rank=run.dist.rank, world_size=run.dist.world_size,
        )  # fmt: skip
        try:
            with ClipLoader(dataset, plan, run.dist.device, data, quarantine=None) as loader:
                batches = loader.batches(0)
                next(batches)  # starting up takes longer
                clips, start = 0, time.perf_counter()
                while clips < MIN_CLIPS or time.perf_counter() - start < run.seconds:
                    clips += len(next(batches).keys)
                speed = clips / (time.perf_counter() - start)
        except InputError as error:
            yield f"not available: {error}"
            return
        run.loader_speeds[decoder, count] = speed
        size = "×".join(map(str, (sizes.num_frames, *FrameSize.of(sizes.image_size))))
        bad = f", {loader.counters['bad_clips']:.0f} clips cannot be decoded" if loader.counters["bad_clips"] else ""
        yield f"{speed:.3g} clips/s of {size}, {data.workers} decode workers, {count} per decoded video{bad}"


def measure_step(run: PlannedRun) -> Iterator[str]:
    """Time training steps on random clips, on a CPU of as many as --seconds allow; of several ranks an all-reduce."""
    config, count, sizes, dist = run.config, run.first_batch, run.config.model, run.dist
    task = Pretraining(config, None, dist)
    optimizer = make_optimizer(task.parameter_groups(), config.optimizer)
    model = parallelize(task, optimizer, config, dist, count)

    def forward(batch: Batch) -> torch.Tensor:
        with autocast_to(dist.device, config.precision):
            return task.loss(task.model, batch)[0]

    def step(batch: Batch) -> torch.Tensor:
        return train_step(model, task, [batch], optimizer, config.optimizer.base_lr, config)["loss"]

    def measure(call: Callable[[Batch], torch.Tensor], number: int) -> float:
        shape = count, sizes.num_frames, *FrameSize.of(sizes.image_size), sizes.in_channels
        clip = torch.randint(0, 256, shape, dtype=torch.uint8, device=dist.device)
        batch = Batch(clip, torch.zeros(count, dtype=torch.int64), [""] * count, list(range(count)))
        start = time.perf_counter()
        for _ in range(number):
            call(batch).item()
        return (time.perf_counter() - start) / number

    measure(step, 1)  # which takes longer
    if count < config.batch_size:
        count = max(count, min(config.batch_size, int(count * run.seconds / measure(step, 1))))
    steps = max(dist.gather(math.ceil(run.seconds / measure(step, 1))))  # all ranks take as many
    run.step_speed = count / measure(step, steps)
    run.forward_ms = 1000 * measure(forward, steps)
    precision = choose_precision(dist.device, config.precision)
    yield (
        f"{run.step_speed:.3g} clips/s{' per rank' * (dist.world_size > 1)}: pre-training, size {sizes.size},"
        f" mask ratio {sizes.mask_ratio:g}, batches of {count}, {precision}"
    )
    if dist.world_size > 1:
        yield from measure_all_reduce(model, dist)


def measure_all_reduce(model: nn.Module, dist: Distributed) -> Iterator[str]:
    gradients = torch.zeros(sum(p.numel() for p in model.parameters() if p.requires_grad), device=dist.device)
    times = []
    for _ in range(ALL_REDUCES + 1):
        start = time.perf_counter()
        sum_over_ranks(gradients)[0].item()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[1:])  # the first one connects the ranks
    moved = 2 * (dist.world_size - 1) / dist.world_size * gradients.nbytes  # by each rank, in a ring
    backend = torch.distributed.get_backend()
    yield (
        f"all-reduce of the gradients ({format_bytes(gradients.nbytes)}) over {dist.world_size} ranks by {backend}:"
        f" {1000 * seconds:.3g} ms, {format_bytes(moved / seconds)}/s per rank; a step hides some of it"
    )
    interfaces = sorted(set(dist.gather(find_interface(os.environ["MASTER_ADDR"]))))
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    yield (
        f"interface to the first node: {', '.join(interfaces)}; {variable} is {os.environ.get(variable, 'not set')}"
        + "; NCCL_DEBUG=INFO says what NCCL uses, sockets or InfiniBand" * (backend == "nccl")
    )


def find_interface(address: str) -> str:
    """Name the network interface that leads to an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: the kernel chooses a route
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                if socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24]) == own:
                    return f"{name} ({own})"
    return own


def compare_ranks(run: PlannedRun) -> Iterator[str]:
    """Name the rank whose forward passes take longest, and the one whose loader is slowest."""
    ranks = run.dist.gather((socket.gethostname(), run.forward_ms, run.planned_speed))
    hosts, forwards, speeds = zip(*ranks, strict=True)
    rank = forwards.index(max(forwards))
    median = statistics.median(forwards)
    yield f"rank {rank} on {hosts[rank]}: {forwards[rank]:.3g} ms per forward pass, the median is {median:.3g}"
    if all(speeds):
        rank, median = speeds.index(min(speeds)), statistics.median(speeds)
        yield f"rank {rank} on {hosts[rank]} loads {speeds[rank]:.3g} clips/s, the median is {median:.3g}"


def estimate_duration(run: PlannedRun) -> Iterator[str]:
    """Estimate how long the run takes here: as the step or the loader of the slowest rank; on a CPU, which they share,
    as both."""
    config, sizes = run.config, run.config.model
    clips_per_epoch = 1
    if run.dataset:
        plan = TrainingPlan(
            run.dataset, config.data, num_frames=sizes.num_frames, image_size=sizes.image_size, seed=config.seed,
            batch_size=config.data.repeats,
        )  # fmt: skip
        clips_per_epoch = plan.clips_per_epoch
    loading = 1 / run.planned_speed if run.planned_speed else 0.0
    seconds = [1 / run.step_speed, loading]
    per_clip = max(run.dist.gather(max(seconds) if run.dist.device.type == "cuda" else sum(seconds)))
    if not run.dataset and config.steps is None:
        yield "give SHARDS, or steps, to estimate it"
        return
    schedule, world_size = Schedule(config, clips_per_epoch, run.dist.world_size), run.dist.world_size
    clips = schedule.total_steps * schedule.global_batch
    yield (
        f"this run takes about {format_duration(clips * per_clip / world_size)} here: {schedule.total_steps:,} steps of"
        f" {schedule.global_batch} clips, {world_size / per_clip:.3g} clips/s, without evaluations"
    )


def compare_speeds(run: PlannedRun) -> Iterator[str]:
    """Compare all ways of loading with the training step; say how many cores PyAV needs beside a GPU."""
    ways = {"data.repeats=1": ("pyav", 1), "data.repeats=2": ("pyav", 2)}
    ways |= {"data.decoder=dali": ("dali", 1), "data.dali_share=auto": ("auto", 1)}
    speeds = {way: run.loader_speeds[key] for way, key in ways.items() if key in run.loader_speeds}
    ratio = run.planned_speed / run.step_speed
    verdict = "not data-bound"
    if ratio < DATA_BOUND_BELOW:
        verdict = f"data-bound, stalled about {1 - min(ratio, 1):.0%} of the time"
    made = ", ".join(f"{speed:.3g} with {way}" for way, speed in speeds.items())
    yield f"{verdict}: the training step takes {run.step_speed:.3g} clips/s, the loader makes {made}"
    best = max(speeds, key=lambda way: speeds[way])
    if ratio < DATA_BOUND_BELOW and speeds[best] > run.planned_speed:
        yield f"{best} reaches {speeds[best] / run.step_speed:.2f}× the speed of the step; more CPU cores help too"
    if run.dist.device.type == "cuda" and ("pyav", 1) in run.loader_speeds:
        cores, gpus = count_cpus(), torch.cuda.device_count()
        busy = min(run.config.data.workers, cores)
        needed = ", ".join(
            f"{math.ceil(busy * run.step_speed / speed)} with {way}"
            for way, speed in speeds.items()
            if ways[way][0] == "pyav"
        )
        yield f"CPU cores per GPU that load as fast as a step: {needed}; there are {cores / gpus:.3g} per GPU"


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS) or not IS_INTACT)
