"""Will a run work here, and will it wait for its data? `python doctor.py [SHARDS] [section.key=value ...]`.

One page: the machine, what it decodes, how fast these shards are read and decoded, how many clips a second a training
step takes (of --config, as train.py would). What cannot be found out is a line that begins with "!", and the exit
status is 1 then. Nothing is written but downloads of shards, into their cache.
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
from pipeline.planning.crops import FrameSize

if TYPE_CHECKING:  # on a machine that lacks a package, the page is what says so
    import torch

    from pipeline.config import Decoder
    from pipeline.loader import ClipLoader
    from pipeline.shards.dataset import ShardDataset
    from training.config import TrainConfig

READ_BYTES = 2**28  # of the shards, for the speed of the disk
DOWNLOADED_BYTES = 2**25  # likewise, of a store
CPU_CLIPS = 2  # of a step on a CPU, where a whole batch takes minutes
LEAST_CLIPS = 8  # measured even if they take longer than was asked for
WAITS_BELOW = 1.1  # the loader's clips for one of the step's: with fewer, some steps wait

Probe = Callable[[], str | Iterator[str]]


class Page:
    """Lines of `name  finding`; a probe that fails is a line too."""

    def __init__(self) -> None:
        self.failed = 0

    def title(self, text: str) -> None:
        log(text)

    def line(self, name: str, probe: Probe) -> None:
        try:
            found = probe()
            for text in [found] if isinstance(found, str) else found:
                log(f"  {name:<14}{text}")
                name = ""
        except Exception as error:  # whatever a broken installation raises is what this page is for
            self.failed += 1
            reason = " ".join(str(error).split()) or type(error).__name__
            log(f"! {name:<14}{reason if isinstance(error, InputError) else f'{type(error).__name__}: {reason}'}")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    page = Page()
    page.title("machine")
    page.line("Python", lambda: f"{platform.python_version()}, {platform.system()} {platform.release()}")
    page.line("cores", _cores)
    page.line("PyTorch", _torch)
    page.line("GPU", _gpus)
    page.line("driver", _driver)
    page.line("Triton", _triton)
    page.line("PyAV", _pyav)
    page.line("DALI", _dali)
    page.line("NVDEC", _nvdec)
    run = Trial(options)
    if options.shards:
        page.title(f"shards {escape(options.shards)}")
        page.line("content", run.content)
        if run.dataset is not None:
            page.line("read", run.read_speed)
            page.line("by PyAV", partial(run.decoder_speed, "pyav"))
            page.line("by DALI", partial(run.decoder_speed, "dali"))
            if "dali" in run.made and run.device.type == "cuda":
                page.line("by both", partial(run.decoder_speed, "hybrid"))
    page.title("training step")
    page.line("takes", run.step_speed)
    if run.made and run.taken:
        page.line("so", run.verdict)
    return 1 if page.failed else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python doctor.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards", nargs="?", metavar="SHARDS", help="dataset folder or URL")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as of train.py: model.size=small")
    parser.add_argument("--config", metavar="FILE", help="of the run that is planned")
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring, for each figure (default 5)")
    options = parser.parse_args(arguments)
    if options.shards and "=" in options.shards:
        options.overrides.insert(0, options.shards)
        options.shards = None
    if not 0 < options.seconds < 3600:
        raise InputError(f"--seconds is {options.seconds}: give a number above 0 and below 3600")
    return options


class Trial:
    """The run that is planned, tried part by part; `made` and `taken` are clips a second."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.dataset: ShardDataset | None = None
        self.made: dict[str, float] = {}
        self.taken = 0.0

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
        """Clips of a trial batch; on a CPU few, which tell the same."""
        return self.config.batch_size if self.device.type == "cuda" else min(CPU_CLIPS, self.config.batch_size)

    def content(self) -> str:
        from pipeline.shards.dataset import ShardDataset

        dataset = self.dataset = ShardDataset.open(self.config.data)
        info = dataset.info
        codecs = ", ".join(f"{name} up to {s.max_width}×{s.max_height}" for name, s in sorted(info.codecs.items()))
        return (
            f"{info.num_samples:,} videos, {info.num_frames:,} frames, {format_bytes(info.num_bytes)} in"
            f" {len(info.shards):,} shards; {codecs}; {len(info.classes) or 'no'} classes"
        )

    def read_speed(self) -> str:
        from pipeline.reading.storage import is_remote

        assert self.dataset is not None
        shards = [str(shard) for shard in self.dataset.shards[:64]]
        return _download_speed(shards[0]) if is_remote(shards[0]) else _disk_speed(shards)

    def decoder_speed(self, decoder: "Decoder") -> str:
        """Clips a second of a loader with one decoder, as the run would be fed."""
        from pipeline.loader import ClipLoader
        from pipeline.planning.plan import TrainingPlan

        assert self.dataset is not None
        data, model = replace(self.config.data, decoder=decoder, canonical_nodes=1), self.config.model
        plan = TrainingPlan(
            self.dataset, data, num_frames=model.num_frames, image_size=model.image_size, seed=self.config.seed,
            batch_size=self.batch_size * data.repeats,
        )  # fmt: skip
        try:
            loader = ClipLoader(self.dataset, plan, self.device, data, quarantine=None, sharing=None)
        except InputError as error:
            return f"none: {error}"
        with loader:
            self.made[decoder] = speed = _clips_per_second(loader, self.options.seconds)
            bad = f", {loader.counters['bad_clips']:.0f} clips do not decode" if loader.counters["bad_clips"] else ""
        height, width = FrameSize.of(model.image_size)
        return f"{speed:.3g} clips/s of {model.num_frames} × {height}×{width} on {data.threads} threads{bad}"

    def step_speed(self) -> str:
        """Forward, backward and AdamW of the pre-training that the configuration says, on clips of noise."""
        import torch

        from common.devices import autocast_to, choose_precision
        from pipeline.loader import Batch
        from training.distributed import Distributed
        from training.optimizer import update
        from training.tasks.pretraining import Pretraining

        model, count = self.config.model, self.batch_size
        objective = Pretraining(self.config, Distributed(0, 1, self.device))
        optimizer = objective.optimizer()
        shape = count, model.num_frames, *FrameSize.of(model.image_size), 3
        clip = torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device)
        batch = Batch(clip, torch.zeros(count), [""] * count, list(range(count)))

        def step() -> None:
            with autocast_to(self.device, self.config.precision):
                loss = objective(objective.model, batch).loss
            loss.backward()
            update(optimizer, self.config.optimizer.base_lr, self.config.optimizer.clip_grad_norm).item()

        self.taken = count / _seconds_of(step, self.options.seconds)
        precision = choose_precision(self.device, self.config.precision)
        return f"{self.taken:.3g} clips/s: {model.size}, {model.mask_ratio:.0%} hidden, batches of {count}, {precision}"

    def verdict(self) -> str:
        best = max(self.made, key=self.made.__getitem__)
        share = self.made[best] / self.taken
        if share >= WAITS_BELOW:
            return f"the loader makes {share:.3g} × what a step takes ({best}): the run will not wait for data"
        return (
            f"the loader makes {share:.2f} × what a step takes ({best}): the run will wait for data about"
            f" {1 - min(share, 1):.0%} of the time; shards made for training, or data.repeats=2, decode faster"
        )


def _clips_per_second(loader: "ClipLoader", seconds: float) -> float:
    batches = loader.batches(first=0)
    next(batches)  # starting costs more than going on
    count, start = 0, time.perf_counter()
    while count < LEAST_CLIPS or time.perf_counter() - start < seconds:
        count += len(next(batches).positions)
    return count / (time.perf_counter() - start)


def _seconds_of(step: Callable[[], None], seconds: float) -> float:
    step()
    count, start = 0, time.perf_counter()
    while count == 0 or time.perf_counter() - start < seconds:
        step()
        count += 1
    return (time.perf_counter() - start) / count


def _disk_speed(shards: Sequence[str]) -> str:
    """Reading from the disk itself: what the page cache holds is dropped, as far as Linux does that for us."""
    read, start = 0, time.perf_counter()
    for shard in shards:
        with open(shard, "rb", buffering=0) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while read < READ_BYTES and (chunk := opened.read(2**22)):
                read += len(chunk)
    seconds = time.perf_counter() - start
    free = shutil.disk_usage(Path(shards[0]).parent).free
    return f"{format_bytes(read / seconds)}/s from the disk ({format_bytes(read)} tried); {format_bytes(free)} are free"


def _download_speed(shard: str) -> str:
    import fsspec

    start = time.perf_counter()
    with fsspec.open(shard, "rb", cache_type="none") as opened:
        read = len(opened.read(DOWNLOADED_BYTES))
    seconds = time.perf_counter() - start
    return f"{format_bytes(read / seconds)}/s from the store, one connection ({format_bytes(read)} tried)"


def _cores() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} for this process, {memory:.3g} GiB of memory"


def _torch() -> str:
    import torch

    return f"{torch.__version__}, built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no GPU'}"


def _gpus() -> Iterator[str]:
    import torch

    if not torch.cuda.is_available():
        yield "none that PyTorch can use"
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(number)
        yield f"{about.name}, {about.total_memory / 2**30:.4g} GiB, compute capability {about.major}.{about.minor}"


def _driver() -> Iterator[str]:
    if shutil.which("nvidia-smi") is None:
        yield "none: nvidia-smi is not here"
        return
    asked = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    yield from dict.fromkeys((told.stdout if told.returncode == 0 else told.stderr or told.stdout).strip().splitlines())


def _triton() -> str:
    import torch

    return f"{version('triton')}{'' if torch.cuda.is_available() else '; without a GPU, plain PyTorch stands in'}"


def _pyav() -> str:
    import av

    return f"{av.__version__}, with libavcodec {'.'.join(map(str, av.library_versions['libavcodec']))}"


def _dali() -> str:
    import torch

    from pipeline.decoding.graph import CPU_CODECS, dali_is_installed

    if not dali_is_installed():
        return "is not installed: PyAV decodes everything"
    import nvidia.dali

    known = "NVDEC's codecs" if torch.cuda.is_available() else f"only {', '.join(sorted(CPU_CODECS))} on a CPU"
    return f"{nvidia.dali.__version__}, decodes {known}"


def _nvdec() -> str:
    import torch

    from pipeline.decoding.nvdec import NvdecError, read_limits

    if not torch.cuda.is_available():
        return "none: there is no GPU"
    try:
        limits = read_limits(torch.device("cuda", 0))
    except NvdecError as error:
        return f"none: {error}"
    return ", ".join(f"{codec} to {limit.max_width}×{limit.max_height}" for codec, limit in limits.items())


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
