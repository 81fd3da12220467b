"""What every benchmark shares: timing, fresh processes, a description of the machine, checks, result files."""

import multiprocessing
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from common.atomic_io import write_json
from common.devices import Precision, get_device_name
from common.errors import InputError
from common.progress import progress_bar
from model.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = "torch triton timm transformers av nvidia-dali-cuda130 spdl torchcodec decord2 decord".split()
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}  # beyond every cache

Row = dict[str, Any]
Case = TypeVar("Case")


@dataclass(frozen=True)
class Timing:
    """Milliseconds of calls, each timed on its own."""

    milliseconds: list[float]

    @property
    def quartiles(self) -> list[float]:
        at = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
        return torch.tensor(self.milliseconds, dtype=torch.float64).quantile(at).tolist()

    @property
    def median_ms(self) -> float:
        return self.quartiles[1]

    def columns(self, batch_size: int) -> Row:
        lower, median, upper = (round(value, 3) for value in self.quartiles)
        return {
            "step_median_ms": median,
            "step_lower_ms": lower,
            "step_upper_ms": upper,
            "repetitions": len(self.milliseconds),
            "clips_per_second": batch_size / self.median_ms * 1e3,
        }


def time_calls(call: Callable[[], Any], device: torch.device, warmup: int, repetitions: int) -> Timing:
    """Time each of `repetitions` calls, after `warmup` untimed ones.

    On CUDA they are timed by events, so that calls queue up as they do in training.
    """
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        milliseconds = []
        for _ in range(repetitions):
            start = time.perf_counter()
            call()
            milliseconds.append((time.perf_counter() - start) * 1e3)
        return Timing(milliseconds)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return Timing([start.elapsed_time(end) for start, end in pairwise(events)])


def copy_gb_per_second(device: torch.device) -> float:
    """Measure a copy on the device; reading and writing both count."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_calls(lambda: target.copy_(source), device, warmup=3, repetitions=20)
    return 2 * source.nbytes / timing.median_ms / 1e6


def matmul_tflops(device: torch.device, precision: Precision) -> float:
    """Measure the TFLOP/s of one large matrix product, the reference for model FLOPs utilization (MFU)."""
    side = 8192 if device.type == "cuda" else 2048
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    timing = time_calls(lambda: a @ b, device, warmup=3, repetitions=10)
    return 2 * side**3 / timing.median_ms / 1e9


def noise_clip(config: ModelConfig, batch_size: int, device: torch.device) -> Tensor:
    """Return random uint8 [B, T, H, W, C]: the contents change neither speed nor memory."""
    shape = (batch_size, config.num_frames, *config.frame_size, config.in_channels)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def in_fresh_process(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call `function` in a new process, forked from a server that has imported the running script and nothing more.

    Its memory and caches are those of a new process, without the seconds of the imports.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__"])
    with ProcessPoolExecutor(1, context, initializer=_exit_with_parent) as pool:
        return pool.submit(function, *arguments, **options).result()


def _exit_with_parent() -> None:
    """A killed benchmark must not leave a process behind that keeps a GPU busy."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def measure_cases(
    cases: Sequence[Case], measure: Callable[[Case], Iterable[Row]], report: Callable[[list[Row]], object], unit: str
) -> None:
    """Measure one case after the other, and report all rows after each, so that an interrupted run keeps its results.

    A case that fails, or whose check does, is reported on stderr and skipped: InputError is raised at the end.
    """
    rows: list[Row] = []
    failed = 0
    for case in progress_bar(cases, unit=unit):
        try:
            rows += measure(case)
        except Exception as error:
            failed += 1
            print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr)
        if rows:
            report(rows)
    if failed:
        raise InputError(f"{failed} of {len(cases)} cases could not be measured; see the errors above")


def require(claim: str, holds: bool, found: str) -> None:
    """Raise InputError when a correctness check fails: the timing of something wrong is worth nothing."""
    if not holds:
        raise InputError(f"no results written, because a check failed: {claim} ({found})")


def results_folder(device: torch.device) -> Path:
    """Return `benchmark_results/<gpu>` or `.../cpu` in the working directory: only --output replaces committed ones."""
    machine = get_device_name(device).lower().replace(" ", "-") if device.type == "cuda" else "cpu"
    return Path("benchmark_results") / machine


class Report:
    """The result file of a benchmark: rows, what they depend on, and notes on the columns."""

    def __init__(
        self, name: str, folder: Path | None, device: torch.device, notes: Sequence[str] = (), **about: Any
    ) -> None:
        """Describe the machine, package versions and the commit; `about` is added."""
        self.name, self.folder, self.notes = name, folder or results_folder(device), list(notes)
        self.about: dict[str, Any] = {
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "device": get_device_name(device),
            "cpu_threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            "packages": {name: found for name in PACKAGES if (found := find_version(name))},
            "cuda": torch.version.cuda if device.type == "cuda" else None,
            "commit": _commit(),
            **about,
        }

    def write(self, rows: list[Row], name: str | None = None) -> None:
        """Write the rows into the report's folder, under its own name or another."""
        self.folder.mkdir(parents=True, exist_ok=True)
        table = {"about": self.about, "notes": self.notes, "rows": rows}
        write_json(self.folder / f"{name or self.name}.json", table)


def print_table(rows: list[Row]) -> None:
    """Print rows as a Markdown table whose columns are all keys in the order in which they first occur."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    print(format_table(heads, [[format_cell(row.get(head)) for head in heads] for row in rows]), end="")


def format_table(heads: list[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, ["---"] * len(heads), *rows))


def format_cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """Return the commit of the code that ran, with `+` if the work tree differs from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # an image or an archive, without git or its folder
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
