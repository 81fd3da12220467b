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
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import InputError, run_command
from common.logging import escape, format_bytes, log

if TYPE_CHECKING:  # every check imports what it needs: a missing package is a line of the report, not an ImportError
    import torch

    from pipeline.config import DataConfig, Decoder
    from pipeline.shards.dataset import ShardDataset
    from training.config import TrainConfig

READ_BYTES = 2**28  # of the shards, for the speed of the disk
DOWNLOADED_BYTES = 2**25  # likewise, from object storage
CPU_BATCH = 2  # clips of a step on a CPU, where a full batch takes minutes
MIN_CLIPS = 8  # measured even if they take longer than --seconds
DATA_BOUND_BELOW = 1.1  # loader speed over step speed: below, some steps wait


class PlannedRun:
    """What the checks are about, and what they have found; speeds are in clips/s."""

    def __init__(self, arguments: list[str] | None) -> None:
        parser = argparse.ArgumentParser(
            prog="python doctor.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("shards", nargs="?", default="", metavar="SHARDS", help="dataset folder or URL")
        parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as model.size=small")
        parser.add_argument("--config", metavar="FILE", help="config of the planned run")
        parser.add_argument("--seconds", type=float, default=5.0, help="duration of each measurement (default 5)")
        self.options = options = parser.parse_intermixed_args(arguments)
        if not 0 < options.seconds < 3600:
            raise InputError(f"--seconds is {options.seconds}: must be above 0 and below 3600")
        if "=" in options.shards:
            options.shards, options.overrides = "", [options.shards, *options.overrides]
        self.dataset: ShardDataset | None = None
        self.loader_speeds: dict[tuple[Decoder, int], float] = {}  # by decoder and clips per decoded video
        self.step_speed = 0.0

    @cached_property
    def config(self) -> "TrainConfig":
        from training.config import parse

        options = self.options
        file = ["--config", options.config] if options.config else []
        return parse([*file, f"data.shards={options.shards or 'none'}", *options.overrides])

    @cached_property
    def device(self) -> "torch.device":
        from common.devices import choose_device

        return choose_device(self.config.device)

    @property
    def batch_size(self) -> int:
        return self.config.batch_size if self.device.type == "cuda" else min(CPU_BATCH, self.config.batch_size)

    @property
    def clip(self) -> str:
        from pipeline.planning.crops import FrameSize

        height, width = FrameSize.of(self.config.model.image_size)
        return f"{self.config.model.num_frames} × {height}×{width}"


def check_machine(run: PlannedRun) -> Iterator[str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    yield f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} CPU cores available, {format_bytes(memory)} of memory"


def check_gpus(run: PlannedRun) -> Iterator[str]:
    import torch

    yield f"{torch.cuda.device_count() or 'none'} that PyTorch can use"
    if shutil.which("nvidia-smi"):
        queries = "name,memory.total,compute_cap,driver_version,power.limit"
        command = ["nvidia-smi", f"--query-gpu={queries}", "--format=csv"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        yield from (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip().splitlines()


def check_package(run: PlannedRun, module: str, if_missing: str = "") -> Iterator[str]:
    try:
        yield import_module(module).__version__
    except ModuleNotFoundError:
        if not if_missing:
            raise
        yield if_missing


def describe_dataset(run: PlannedRun) -> Iterator[str]:
    from pipeline.shards.dataset import ShardDataset

    run.dataset = ShardDataset.open(run.config.data)
    info = run.dataset.info
    codecs = ", ".join(f"{name} up to {s.max_width}×{s.max_height}" for name, s in sorted(info.codecs.items()))
    yield (
        f"{info.num_samples:,} videos, {info.num_frames:,} frames, {format_bytes(info.num_bytes)} in"
        f" {len(info.shards):,} shards; {codecs}; {len(info.classes) or 'no'} classes"
    )


def measure_reading(run: PlannedRun) -> Iterator[str]:
    """Read from object storage, or from the disk itself: the shards are dropped from the page cache before."""
    from pipeline.reading.storage import is_remote

    if run.dataset is None:
        return
    shards = [str(shard) for shard in islice(run.dataset.shards, 64)]
    read, start = 0, time.perf_counter()
    if is_remote(shards[0]):
        import fsspec

        with fsspec.open(shards[0], "rb", cache_type="none") as opened:
            read = len(opened.read(DOWNLOADED_BYTES))
        source, more = "object storage, one connection", ""
    else:
        for shard in shards:
            with open(shard, "rb", buffering=0) as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while read < READ_BYTES and (chunk := opened.read(2**22)):
                    read += len(chunk)
        source, more = "disk", f", {format_bytes(shutil.disk_usage(Path(shards[0]).parent).free)} free"
    speed = read / (time.perf_counter() - start)
    yield f"{format_bytes(speed)}/s from {source} ({format_bytes(read)} read){more}"


def measure_decoder(run: PlannedRun, decoder: "Decoder", repeats: tuple[int, ...]) -> Iterator[str]:
    """Load clips with one decoder alone, `repeats` of them from every decoded video."""
    if run.dataset is None:
        return
    for count in repeats:
        data = replace(run.config.data, decoder=decoder, repeats=count, dali_share=None, canonical_nodes=1)
        try:
            speed, bad = time_loading(run, run.dataset, data)
        except InputError as error:
            yield f"not available: {error}"
            return
        run.loader_speeds[decoder, count] = speed
        yield (
            f"{speed:.3g} clips/s of {run.clip}, {data.workers} decode workers, {count} per decoded video"
            f"{f', {bad:.0f} clips cannot be decoded' if bad else ''}"
        )


def time_loading(run: PlannedRun, dataset: "ShardDataset", data: "DataConfig") -> tuple[float, float]:
    """Return clips/s of the loader, and how many clips could not be decoded."""
    from pipeline.loader import ClipLoader
    from pipeline.planning.plan import TrainingPlan

    model = run.config.model
    plan = TrainingPlan(
        dataset, data, num_frames=model.num_frames, image_size=model.image_size, seed=run.config.seed,
        batch_size=run.batch_size * data.repeats,
    )  # fmt: skip
    with ClipLoader(dataset, plan, run.device, data, quarantine=None) as loader:
        batches = loader.batches(0)
        next(batches)  # starting up takes longer
        clips, start = 0, time.perf_counter()
        while clips < MIN_CLIPS or time.perf_counter() - start < run.options.seconds:
            clips += len(next(batches).keys)
        return clips / (time.perf_counter() - start), loader.counters["bad_clips"]


def measure_step(run: PlannedRun) -> Iterator[str]:
    """Time training steps on random clips."""
    import torch

    from common.devices import choose_precision
    from pipeline.loader import Batch
    from pipeline.planning.crops import FrameSize
    from train import train_step
    from training.distributed import Distributed
    from training.optimizer import make_optimizer
    from training.parallelize import parallelize
    from training.tasks.pretraining import Pretraining

    config, count, sizes = run.config, run.batch_size, run.config.model
    dist = Distributed(config.device)
    task = Pretraining(config, None, dist)
    optimizer = make_optimizer(task.parameter_groups(), config.optimizer)
    model = parallelize(task, optimizer, config, dist, count)
    shape = count, sizes.num_frames, *FrameSize.of(sizes.image_size), sizes.in_channels
    clip = torch.randint(0, 256, shape, dtype=torch.uint8, device=run.device)
    batch = Batch(clip, torch.zeros(count, dtype=torch.int64), [""] * count, list(range(count)))
    times: list[float] = []
    while len(times) < 3 or times[-1] - times[1] < run.options.seconds:  # the first step takes longer
        times.append(time.perf_counter())
        train_step(model, task, [batch], optimizer, config.optimizer.base_lr, config)["loss"].item()
    run.step_speed = (len(times) - 2) * count / (times[-1] - times[1])
    yield (
        f"{run.step_speed:.3g} clips/s: pre-training, size {sizes.size}, mask ratio {sizes.mask_ratio:g}, batches of"
        f" {count}, {choose_precision(run.device, config.precision)}"
    )


def compare_speeds(run: PlannedRun) -> Iterator[str]:
    """Compare what decodes with what the step takes; on a GPU, video engines and CPU work side by side."""
    if not run.loader_speeds or not run.step_speed:
        return
    by_pyav = {count: speed for (decoder, count), speed in run.loader_speeds.items() if decoder == "pyav"}
    dali, repeats = run.loader_speeds.get(("dali", 1), 0.0), min(run.config.data.repeats, len(by_pyav))
    join = sum if run.device.type == "cuda" else max
    pyav = by_pyav.get(repeats, 0.0)
    speed = join((pyav, dali))
    how = "data.decoder=dali" if dali > pyav else f"data.decoder=pyav data.repeats={repeats}"
    if join is sum and pyav and dali:
        how = f"data.dali_share={dali / speed:.2f}"
    yield f"fastest decoding: {how}, about {speed:.3g} clips/s"
    ratio = speed / run.step_speed
    if ratio >= DATA_BOUND_BELOW:
        yield f"the loader is {ratio:.3g}× faster than the training step: not data-bound"
        return
    yield (
        f"the loader reaches {ratio:.2f}× the speed of the training step: data-bound, stalled about"
        f" {1 - min(ratio, 1):.0%} of the time"
    )
    if repeats == 1 and 2 in by_pyav:
        ratio = join((by_pyav[2], dali)) / run.step_speed
        yield f"with data.repeats=2 it reaches {ratio:.2f}×; more CPU cores help too"


CHECKS: dict[str, dict[str, Callable[[PlannedRun], Iterator[str]]]] = {
    "environment": {
        "machine": check_machine, "GPUs": check_gpus, "PyTorch": partial(check_package, module="torch"),
        "Triton": partial(check_package, module="triton"), "PyAV": partial(check_package, module="av"),
        "DALI": partial(check_package, module="nvidia.dali", if_missing="not installed: PyAV decodes everything"),
    },
    "dataset": {
        "content": describe_dataset, "read": measure_reading,
        "PyAV decode": partial(measure_decoder, decoder="pyav", repeats=(1, 2)),
        "DALI decode": partial(measure_decoder, decoder="dali", repeats=(1,)),
    },
    "training step": {"speed": measure_step, "verdict": compare_speeds},
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    run = PlannedRun(arguments)
    num_failed = 0
    for section, checks in CHECKS.items():
        if section == "dataset" and not run.options.shards:
            continue
        log(f"{section} {escape(run.options.shards)}" if section == "dataset" else section)
        for name, check in checks.items():
            try:
                for label, line in zip([name, *[""] * 99], check(run), strict=False):
                    log(f"  {label:<14}{line}")
            except Exception as error:  # whatever a broken installation raises
                num_failed += 1
                reason = " ".join(str(error).split()) or type(error).__name__
                log(f"! {name:<14}{reason if isinstance(error, InputError) else f'{type(error).__name__}: {reason}'}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
