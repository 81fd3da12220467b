"""Check the environment and benchmark data loading: `python doctor.py [SHARDS] [section.key=value ...]`.

Prints versions and devices, how fast SHARDS are read and decoded, with one and two clips from every decoded video, and
the speed of a training step (of --config, as train.py would run it), then says whether training would be data-bound.
A failed check is a line that begins with "!"; the exit status is 1 then. Nothing is written, except for downloads of
shards into their cache.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import chain, repeat

from common.arguments import ArgumentParser
from common.cpus import count_cpus
from common.errors import InputError, parse_early, run_command
from common.logging import escape, format_bytes, log
from training.config import TrainConfig, parse

PACKAGES = {"PyTorch": "torch", "Triton": "triton", "PyAV": "av", "DALI": "nvidia.dali"}
OPTIONAL = {"nvidia.dali": "not installed: PyAV decodes everything"}
READ_BYTES = 2**28  # of the shards, for the speed of the disk
DOWNLOADED_BYTES = 2**25  # likewise, from object storage
CPU_BATCH = 2  # clips of a step on a CPU, where a full batch takes minutes
MIN_CLIPS = 8  # measured even if they take longer than --seconds
DATA_BOUND_BELOW = 1.1  # loader speed over step speed: below, some steps wait


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


def report(name: str, lines: Iterator[str]) -> bool:
    """Log the lines of a check; return False if it fails, for a reason that then is a line."""
    try:
        for label, line in zip(chain([name], repeat("")), lines, strict=False):
            log(f"  {label:<14}{line}")
    except Exception as error:  # whatever a broken installation raises
        reason = " ".join(str(error).split()) or type(error).__name__
        log(f"! {name:<14}{reason if isinstance(error, InputError) else f'{type(error).__name__}: {reason}'}")
        return False
    return True


def check_environment() -> bool:
    """Report the machine and the packages; exit if one is broken that everything else needs."""
    log("environment")
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
import torch

from common.devices import choose_device, choose_precision
from pipeline.config import Decoder
from pipeline.loader import Batch, ClipLoader
from pipeline.planning.crops import FrameSize
from pipeline.planning.plan import TrainingPlan
from pipeline.reading.storage import is_remote
from pipeline.shards.dataset import ShardDataset
from train import train_step
from training.distributed import Distributed
from training.optimizer import make_optimizer
from training.parallelize import parallelize
from training.tasks.pretraining import Pretraining


@dataclass
class PlannedRun:
    """What the checks are about, and what they have found; speeds are in clips/s."""

    config: TrainConfig
    seconds: float  # of each measurement
    device: torch.device
    dataset: ShardDataset | None = None
    loader_speeds: dict[tuple[str, int], float] = field(default_factory=dict)  # by decoder, clips per decoded video
    step_speed: float = 0.0


def main(options: argparse.Namespace) -> int:
    config = options.config
    if not report("GPUs", describe_gpus(config)):
        return 1
    run = PlannedRun(config, options.seconds, choose_device(config.device))
    if run.device.type == "cpu":
        config.batch_size = min(CPU_BATCH, config.batch_size)
    results = []
    if options.shards:
        log(f"dataset {escape(options.shards)}")
        if not report("content", describe_dataset(run)):
            return 1
    if run.dataset:
        results.append(report("read", measure_reading(run.dataset)))
        results.append(report("PyAV decode", measure_decoder(run, run.dataset, "pyav", (1, 2))))
        results.append(report("DALI decode", measure_decoder(run, run.dataset, "dali", (1,))))
        if ("dali", 1) in run.loader_speeds and run.device.type == "cuda":
            results.append(report("both decode", measure_decoder(run, run.dataset, "auto", (1,))))
    log("training step")
    results.append(report("speed", measure_step(run)))
    if run.loader_speeds and run.step_speed:
        results.append(report("verdict", compare_speeds(run)))
    return 0 if all(results) else 1


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
            batch_size=run.config.batch_size * count,
        )  # fmt: skip
        try:
            with ClipLoader(dataset, plan, run.device, data, quarantine=None) as loader:
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
    """Time training steps on random clips."""
    config, count, sizes = run.config, run.config.batch_size, run.config.model
    dist = Distributed(config.device)
    task = Pretraining(config, None, dist)
    optimizer = make_optimizer(task.parameter_groups(), config.optimizer)
    model = parallelize(task, optimizer, config, dist, count)
    shape = count, sizes.num_frames, *FrameSize.of(sizes.image_size), sizes.in_channels
    clip = torch.randint(0, 256, shape, dtype=torch.uint8, device=run.device)
    batch = Batch(clip, torch.zeros(count, dtype=torch.int64), [""] * count, list(range(count)))
    times: list[float] = []
    while len(times) < 3 or times[-1] - times[1] < run.seconds:  # the first step takes longer
        times.append(time.perf_counter())
        train_step(model, task, [batch], optimizer, config.optimizer.base_lr, config)["loss"].item()
    run.step_speed = (len(times) - 2) * count / (times[-1] - times[1])
    yield (
        f"{run.step_speed:.3g} clips/s: pre-training, size {sizes.size}, mask ratio {sizes.mask_ratio:g}, batches of"
        f" {count}, {choose_precision(run.device, config.precision)}"
    )


def compare_speeds(run: PlannedRun) -> Iterator[str]:
    """Compare decoding with the training step."""
    speeds, repeats = run.loader_speeds, min(run.config.data.repeats, 2)
    ways = {f"data.decoder=pyav data.repeats={repeats}": ("pyav", repeats)}
    ways |= {"data.decoder=dali": ("dali", 1), "data.dali_share=auto": ("auto", 1)}
    how, speed = max(((way, speeds.get(key, 0.0)) for way, key in ways.items()), key=lambda found: found[1])
    yield f"fastest decoding: {how}, about {speed:.3g} clips/s"
    ratio = speed / run.step_speed
    if ratio >= DATA_BOUND_BELOW:
        yield f"the loader is {ratio:.3g}× faster than the training step: not data-bound"
        return
    yield (
        f"the loader reaches {ratio:.2f}× the speed of the training step: data-bound, stalled about"
        f" {1 - min(ratio, 1):.0%} of the time"
    )
    if repeats == 1 and ("pyav", 2) in speeds:
        ratio = max(speeds["pyav", 2], speed) / run.step_speed
        yield f"with data.repeats=2 it reaches {ratio:.2f}×; more CPU cores help too"


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS) or not IS_INTACT)
