"""Check the environment and benchmark data loading: `python doctor.py [SHARDS] [section.key=value ...]`.

Prints versions and devices, how fast SHARDS are read and decoded, and the speed of a training step (of --config, as
train.py would run it), then says whether training would be data-bound. A failed check is a line that begins with "!";
the exit status is 1 then. Nothing is written, except for downloads of shards into their cache.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import InputError, run_command
from common.logging import escape, format_bytes, log

if TYPE_CHECKING:  # a missing package is a line of the report, not an ImportError
    import torch

    from pipeline.config import Decoder
    from pipeline.shards.dataset import ShardDataset
    from training.config import TrainConfig

READ_BYTES = 2**28  # of the shards, for the speed of the disk
DOWNLOADED_BYTES = 2**25  # likewise, from object storage
CPU_BATCH = 2  # clips of a step on a CPU, where a full batch takes minutes
MIN_CLIPS = 8  # measured even if they take longer than --seconds
DATA_BOUND_BELOW = 1.1  # loader speed over step speed: below, some steps wait

Probe = Callable[[], str | Iterator[str]]


class Report:
    """Lines of `name  finding`; a probe that fails is a line too."""

    def __init__(self) -> None:
        self.num_failed = 0

    def line(self, name: str, probe: Probe) -> None:
        try:
            found = probe()
            for text in [found] if isinstance(found, str) else found:
                log(f"  {name:<14}{text}")
                name = ""
        except Exception as error:  # whatever a broken installation raises
            self.num_failed += 1
            reason = " ".join(str(error).split()) or type(error).__name__
            log(f"! {name:<14}{reason if isinstance(error, InputError) else f'{type(error).__name__}: {reason}'}")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    report = Report()
    log("environment")
    for name, probe in ENVIRONMENT.items():
        report.line(name, probe)
    run = PlannedRun(options)
    if options.shards:
        log(f"dataset {escape(options.shards)}")
        report.line("content", run.describe_dataset)
        if run.dataset is not None:
            report.line("read", run.measure_reading)
            report.line("PyAV decode", partial(run.measure_decoder, "pyav"))
            report.line("DALI decode", partial(run.measure_decoder, "dali"))
    log("training step")
    report.line("speed", run.measure_step)
    if run.loader_speeds and run.step_speed:
        report.line("verdict", run.verdict)
    return 1 if report.num_failed else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python doctor.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards", nargs="?", metavar="SHARDS", help="dataset folder or URL")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as for train.py: model.size=small")
    parser.add_argument("--config", metavar="FILE", help="config of the planned run")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each measurement (default 5)")
    options = parser.parse_args(arguments)
    if options.shards and "=" in options.shards:
        options.overrides.insert(0, options.shards)
        options.shards = None
    if not 0 < options.seconds < 3600:
        raise InputError(f"--seconds is {options.seconds}: give a number above 0 and below 3600")
    return options


class PlannedRun:
    """Tries the parts of a run one by one; speeds are in clips/s."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.dataset: ShardDataset | None = None
        self.loader_speeds: dict[str, float] = {}  # by decoder
        self.step_speed = 0.0

    @cached_property
    def config(self) -> "TrainConfig":
        from training.config import parse

        file = ["--config", self.options.config] if self.options.config else []
        return parse([*file, f"data.shards={self.options.shards or 'none'}", *self.options.overrides])

    @cached_property
    def device(self) -> "torch.device":
        from common.devices import choose_device

        return choose_device(self.config.device)

    @property
    def batch_size(self) -> int:
        return self.config.batch_size if self.device.type == "cuda" else min(CPU_BATCH, self.config.batch_size)

    def describe_dataset(self) -> str:
        from pipeline.shards.dataset import ShardDataset

        dataset = self.dataset = ShardDataset.open(self.config.data)
        info = dataset.info
        codecs = ", ".join(f"{name} up to {s.max_width}×{s.max_height}" for name, s in sorted(info.codecs.items()))
        return (
            f"{info.num_samples:,} videos, {info.num_frames:,} frames, {format_bytes(info.num_bytes)} in"
            f" {len(info.shards):,} shards; {codecs}; {len(info.classes) or 'no'} classes"
        )

    def measure_reading(self) -> str:
        from pipeline.reading.storage import is_remote

        assert self.dataset is not None
        shards = [str(shard) for shard in self.dataset.shards[:64]]
        return measure_download(shards[0]) if is_remote(shards[0]) else measure_disk(shards)

    def measure_decoder(self, decoder: "Decoder") -> str:
        """Load clips with one decoder alone."""
        from pipeline.loader import ClipLoader
        from pipeline.planning.plan import TrainingPlan

        assert self.dataset is not None
        data = replace(self.config.data, decoder=decoder, dali_share=None, canonical_nodes=1, cached_batch=False)
        model = self.config.model
        plan = TrainingPlan(
            self.dataset, data, num_frames=model.num_frames, image_size=model.image_size, seed=self.config.seed,
            batch_size=self.batch_size * data.repeats,
        )  # fmt: skip
        try:
            loader = ClipLoader(self.dataset, plan, self.device, data, quarantine=None)
        except InputError as error:
            return f"not available: {error}"
        with loader:
            batches = loader.batches(0)
            next(batches)  # starting up takes longer
            clips, start = 0, time.perf_counter()
            while clips < MIN_CLIPS or time.perf_counter() - start < self.options.seconds:
                clips += len(next(batches).keys)
            self.loader_speeds[decoder] = speed = clips / (time.perf_counter() - start)
            bad = (
                f", {loader.counters['bad_clips']:.0f} clips cannot be decoded" if loader.counters["bad_clips"] else ""
            )
        height, width = plan.frame_size
        return f"{speed:.3g} clips/s of {model.num_frames} × {height}×{width}, {data.threads} CPU threads{bad}"

    def measure_step(self) -> str:
        """Time training steps on random clips."""
        import torch

        from common.devices import choose_precision
        from pipeline.loader import Batch
        from pipeline.planning.crops import FrameSize
        from train import train_step
        from training.distributed import Distributed
        from training.optimizer import make_optimizer
        from training.tasks.pretraining import Pretraining

        config, count = self.config, self.batch_size
        model = config.model
        task = Pretraining(config, None, Distributed(config.device))
        optimizer = make_optimizer(task.parameter_groups(), config.optimizer)
        shape = count, model.num_frames, *FrameSize.of(model.image_size), model.in_channels
        clip = torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device)
        batch = Batch(clip, torch.zeros(count, dtype=torch.int64), [""] * count, list(range(count)))

        def step() -> None:
            train_step(task.model, task, [batch], optimizer, config.optimizer.base_lr, config)["loss"].item()

        step()
        steps, start = 0, time.perf_counter()
        while steps == 0 or time.perf_counter() - start < self.options.seconds:
            step()
            steps += 1
        self.step_speed = steps * count / (time.perf_counter() - start)
        precision = choose_precision(self.device, config.precision)
        return (
            f"{self.step_speed:.3g} clips/s: pre-training, size {model.size}, mask ratio {model.mask_ratio:g}, batches"
            f" of {count}, {precision}"
        )

    def verdict(self) -> Iterator[str]:
        best = max(self.loader_speeds, key=self.loader_speeds.__getitem__)
        speed, how = self.loader_speeds[best], f"data.decoder={best}"
        if self.device.type == "cuda" and len(self.loader_speeds) == 2:
            # The GPU's video engines and the CPU work side by side.
            share = self.loader_speeds["dali"] / sum(self.loader_speeds.values())
            speed, how = sum(self.loader_speeds.values()), f"data.dali_share={share:.2f}"
        ratio = speed / self.step_speed
        yield f"fastest decoding: {how}, about {speed:.3g} clips/s"
        if ratio >= DATA_BOUND_BELOW:
            yield f"the loader is {ratio:.3g}× faster than the training step: not data-bound"
        else:
            yield (
                f"the loader reaches {ratio:.2f}× the speed of the training step: data-bound, stalled about"
                f" {1 - min(ratio, 1):.0%} of the time; re-encoded shards or data.repeats=2 decode faster"
            )


def measure_disk(shards: Sequence[str]) -> str:
    """Read from the disk itself: the shards are dropped from the page cache, as far as Linux allows."""
    read, start = 0, time.perf_counter()
    for shard in shards:
        with open(shard, "rb", buffering=0) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while read < READ_BYTES and (chunk := opened.read(2**22)):
                read += len(chunk)
    seconds = time.perf_counter() - start
    free = shutil.disk_usage(Path(shards[0]).parent).free
    return f"{format_bytes(read / seconds)}/s from disk ({format_bytes(read)} read), {format_bytes(free)} free"


def measure_download(shard: str) -> str:
    import fsspec

    start = time.perf_counter()
    with fsspec.open(shard, "rb", cache_type="none") as opened:
        read = len(opened.read(DOWNLOADED_BYTES))
    seconds = time.perf_counter() - start
    return f"{format_bytes(read / seconds)}/s from object storage, one connection ({format_bytes(read)} read)"


def _cores() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} available, {memory:.3g} GiB of memory"


def _torch() -> str:
    import torch

    return f"{torch.__version__}, {f'built for CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU-only build'}"


def _gpus() -> Iterator[str]:
    import torch

    if not torch.cuda.is_available():
        yield "none that PyTorch can use"
        return
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        yield f"{gpu.name}, {gpu.total_memory / 2**30:.4g} GiB, compute capability {gpu.major}.{gpu.minor}"


def _driver() -> Iterator[str]:
    if shutil.which("nvidia-smi") is None:
        yield "none: nvidia-smi not found"
        return
    command = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    yield from dict.fromkeys((done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip().splitlines())


def _triton() -> str:
    import torch

    return f"{version('triton')}{'' if torch.cuda.is_available() else '; not used without a GPU (PyTorch fallback)'}"


def _pyav() -> str:
    import av

    return f"{av.__version__}, libavcodec {'.'.join(map(str, av.library_versions['libavcodec']))}"


def _dali() -> str:
    import torch

    from pipeline.decoding.dali import CPU_CODECS, dali_is_installed

    if not dali_is_installed():
        return "not installed: PyAV decodes everything"
    import nvidia.dali

    codecs = "the GPU's codecs (NVDEC)" if torch.cuda.is_available() else f"{', '.join(sorted(CPU_CODECS))} on a CPU"
    return f"{nvidia.dali.__version__}, decodes {codecs}"


ENVIRONMENT: dict[str, Probe] = {
    "Python": lambda: f"{platform.python_version()}, {platform.system()} {platform.release()}",
    "CPU cores": _cores,
    "PyTorch": _torch,
    "GPU": _gpus,
    "driver": _driver,
    "Triton": _triton,
    "PyAV": _pyav,
    "DALI": _dali,
}

if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
