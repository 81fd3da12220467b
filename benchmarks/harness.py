"""What every benchmark shares: timing, the description of the machine, red checks that stop a report, result files."""

import csv
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from common.atomic_io import write_json, write_text
from common.devices import Precision, device_name
from common.errors import InputError
from common.progress import progress_bar
from shard_tools.workers.processes import end_with_parent

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, Any]
Case = TypeVar("Case")


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median and quartiles over `repetitions` calls, each timed on its own."""

    median_ms: float
    lower_ms: float
    upper_ms: float
    repetitions: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> "Timing":
        if len(milliseconds) < 2:
            return cls(milliseconds[0], milliseconds[0], milliseconds[0], 1)
        lower, median, upper = statistics.quantiles(milliseconds, n=4, method="inclusive")
        return cls(median, lower, upper, len(milliseconds))


def time_calls(call: Callable[[], Any], device: torch.device, warmup: int, repetitions: int) -> Timing:
    return Timing.of(call_times(call, device, warmup, repetitions))


def call_times(call: Callable[[], Any], device: torch.device, warmup: int, repetitions: int) -> list[float]:
    """Milliseconds of each of `repetitions` calls, after `warmup` untimed ones. On CUDA by events, so that calls queue
    up as they do in training."""
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        milliseconds = []
        for _ in range(repetitions):
            start = time.perf_counter()
            call()
            milliseconds.append((time.perf_counter() - start) * 1e3)
        return milliseconds
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def matmul_tflops(device: torch.device, precision: Precision) -> float:
    """TFLOP/s that one large matrix product sustains here: what model FLOP utilisation (MFU) is measured against."""
    side = 8192 if device.type == "cuda" else 2048
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    timing = time_calls(lambda: a @ b, device, warmup=3, repetitions=10)
    return 2 * side**3 / timing.median_ms / 1e9


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `function`, run in a process that is forked from a server which has imported the running script
    and done nothing more: as good as new, without the seconds of the imports."""
    with _processes(1) as pool:
        return pool.submit(function, *arguments).result()


def rows_of(
    cases: Sequence[Case], measure: Callable[[Case], Row], report: Callable[[list[Row]], object], unit: str
) -> None:
    """Measure one case after the other, and report all rows after each: what is cut off has what it found.

    A case that fails is said and left out; a red check ends it all. Raises InputError in the end if one has failed.
    """
    rows: list[Row] = []
    failed = 0
    for case in progress_bar(cases, unit=unit):
        try:
            rows.append(measure(case))
        except InputError:
            raise
        except Exception as error:
            failed += 1
            print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr)
        if rows:
            report(rows)
    if failed:
        raise InputError(f"{failed} of {len(cases)} could not be measured: their errors stand above")


def side_by_side(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """The results of `function` for all items, in order, made by as many processes as there are cores, or eight."""
    with _processes(min(8, len(os.sched_getaffinity(0)))) as pool:
        yield from pool.map(function, items)


def _processes(count: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__"])
    return ProcessPoolExecutor(count, context, initializer=end_with_parent)


def stolen_seconds() -> float:
    """CPU seconds, of all cores, that the host of a virtual machine gave to others since it started; 0 where none are
    counted."""
    file = Path("/proc/stat")
    counts = file.read_text(encoding="utf-8").partition("\n")[0].split() if file.is_file() else []
    return int(counts[8]) / os.sysconf("SC_CLK_TCK") if len(counts) > 8 else 0.0


def require(claim: str, green: bool, found: str) -> None:
    """Stop the benchmark when one of its checks is red: a figure for something that is wrong is worth nothing."""
    if not green:
        raise InputError(f"nothing is reported, because a check is red: {claim} ({found})")


def machine(device: torch.device, packages: Sequence[str] = ("timm", "transformers")) -> dict[str, Any]:
    """What a figure depends on, to stand beside it; `packages` besides PyTorch and Triton."""
    return {
        "device": device_name(device),
        "cpu_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "packages": {name: _version(name) for name in ("torch", "triton", *packages)},
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "commit": _commit(),
    }


def default_output(device: torch.device) -> Path:
    """`benchmarks/results/<gpu>` or `.../cpu`."""
    name = device_name(device).lower().replace(" ", "-") if device.type == "cuda" else "cpu"
    return RESULTS / name


def write_results(folder: Path, name: str, rows: list[Row], about: dict[str, Any], notes: Sequence[str]) -> None:
    """Write `name`.csv, .json and .md: all of them state the machine, the commit and the notes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", {"about": about, "notes": list(notes), "rows": rows})
    text = StringIO()
    writer = csv.DictWriter(text, fieldnames=columns(rows), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(folder / f"{name}.csv", text.getvalue())
    write_text(folder / f"{name}.md", markdown(name, rows, about, notes))


def markdown(name: str, rows: list[Row], about: dict[str, Any], notes: Sequence[str]) -> str:
    heads = columns(rows)
    lines = [f"# {name}", "", *(f"- {key}: {_cell(value)}" for key, value in about.items()), ""]
    lines += [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    lines += [f"| {' | '.join(_cell(row.get(head, '')) for head in heads)} |" for row in rows]
    return "\n".join([*lines, "", *notes, ""])


def columns(rows: list[Row]) -> list[str]:
    """All keys of all rows, in the order in which they first come."""
    return list(dict.fromkeys(key for row in rows for key in row))


def timing_columns(timing: Timing, batch_size: int) -> Row:
    fields = {f"step_{key}": round(value, 3) for key, value in asdict(timing).items() if key.endswith("_ms")}
    return {**fields, "repetitions": timing.repetitions, "clips_per_second": batch_size / timing.median_ms * 1e3}


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if inner)
    return str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit of the code that ran, with `+` where the work tree differs from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # an image or an archive, without git or its folder
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
