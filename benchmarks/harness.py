"""Measure in rounds and in fresh processes, check what is measured, and write result files."""

import multiprocessing
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from importlib.metadata import distributions
from multiprocessing.connection import wait
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from adamae.common.atomic_io import write_json
from adamae.common.devices import Precision, get_device_name
from adamae.common.errors import InputError
from adamae.common.progress import progress_bar
from adamae.training.timing import time_calls

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# The packages whose versions a result file names: another version is another measurement.
PACKAGES = (
    "torch",
    "triton",
    "timm",
    "transformers",
    "av",
    "nvidia-dali-cuda130",
    "spdl",
    "torchcodec",
    "decord2",
    "webdataset",
)
# Larger than the caches (an H200's L2 holds 50 MB), so that a copy runs at the speed of memory.
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
# What reading a file of a process or thread in /proc raises if it has just ended.
HAS_ENDED = (FileNotFoundError, ProcessLookupError)

Row = dict[str, Any]
Case = TypeVar("Case", bound=Hashable)
Result = TypeVar("Result")


def cpu_seconds() -> float:
    """Return the user and system time of this process and its descendants, in seconds.

    The difference of two calls is what the work between them cost. Other programs on the machine
    stretch the time by the clock, but hardly this one.
    """
    ticks = 0
    # time.process_time() would count this process alone, but workers do the decoding. A worker that
    # has ended is not counted; those of a loader live until after the second call.
    for process in list_family("self"):
        with suppress(*HAS_ENDED):
            # proc_pid_stat(5): utime and stime are the 14th and 15th field, and the name before ")"
            # may hold spaces.
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def list_family(process: str) -> list[str]:
    """List a process and all its descendants."""
    family = [process]
    # Each thread has a list of its children. A kernel that is built without these files
    # (CONFIG_PROC_CHILDREN) leaves the process alone to be counted.
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(*HAS_ENDED):
            for child in children.read_text().split():
                family += list_family(child)
    return family


def copy_gb_per_second(device: torch.device) -> float:
    """Measure the bandwidth of a large copy on the device; reading and writing both count.

    An op that only moves bytes cannot be faster, so this is what its bandwidth is compared with.
    """
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # The first copy waits for the pages of `target`, which the kernel hands out when they are
    # written. Warm-up keeps this out of the measurement.
    milliseconds = time_calls(lambda: target.copy_(source), device, warmup=3, repetitions=20)
    return 2 * source.nbytes / median(milliseconds) / 1e6


def matmul_tflops(device: torch.device, precision: Precision) -> float:
    """Measure the TFLOP/s of one large matrix product.

    It is the reference for model FLOPs utilization (MFU). A data sheet's rate is not, since no
    product sustains it: an H200 ran at 806 TFLOP/s of the 989 that its data sheet promises.
    """
    # Large matrices: the arithmetic grows with the cube of the side, the bytes with its square, so
    # memory does not bound the product. A CPU takes a smaller one, to be done within seconds.
    side = 8192 if device.type == "cuda" else 2048
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a = torch.randn(side, side, device=device, dtype=dtype)
    b = torch.randn(side, side, device=device, dtype=dtype)
    milliseconds = time_calls(lambda: a @ b, device, warmup=3, repetitions=10)
    return 2 * side**3 / median(milliseconds) / 1e9


def in_fresh_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call `function` in a new process and return what it returns.

    The process is forked from a server that has imported the running script and nothing more. So
    its memory and caches are those of a new process, without the seconds of the imports.
    """
    # CUDA cannot be used in a fork of a process that uses it. A spawned process would import torch
    # for every measurement, which takes seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__"])
    with ProcessPoolExecutor(1, context, initializer=_exit_with_parent) as pool:
        return pool.submit(function, *arguments).result()


def _exit_with_parent() -> None:
    """End this process when its parent ends: a killed benchmark must not keep a GPU busy.

    prctl's signal would not come: to the kernel, this process's parent is the server of forks.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_for_the_end() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait_for_the_end, daemon=True).start()


def require(claim: str, holds: bool, observed: str) -> None:
    """Raise InputError, unless a claim holds: the timing of something wrong is worth nothing."""
    if not holds:
        raise InputError(f"no results written, because a check failed: {claim} ({observed})")


def results_folder(device: torch.device) -> Path:
    """Return `benchmark_results/<gpu>` or `benchmark_results/cpu` in the working directory.

    Committed results are replaced only where --output says so.
    """
    machine = "cpu"
    if device.type == "cuda":
        machine = get_device_name(device).lower().replace(" ", "-")
    return Path("benchmark_results") / machine


class Report:
    """The result file of a benchmark: rows, what they depend on, and notes on the columns."""

    def __init__(
        self,
        name: str,
        folder: Path | None,
        device: torch.device,
        notes: Sequence[str] = (),
        **about: Any,
    ) -> None:
        """Describe the machine, package versions and the commit; `about` is added."""
        self.name = name
        self.folder = folder or results_folder(device)
        self.notes = list(notes)
        system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
        versions = {package.name: package.version for package in distributions()}
        self.about: dict[str, Any] = {
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "device": get_device_name(device),
            "cpu_threads": torch.get_num_threads(),
            "system": system,
            "packages": {name: versions[name] for name in PACKAGES if name in versions},
            "cuda": torch.version.cuda if device.type == "cuda" else None,
            "commit": _commit(),
            **about,
        }

    def write(self, rows: list[Row]) -> None:
        """Write NAME.json into the folder, in place of an earlier one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        table = {"about": self.about, "notes": self.notes, "rows": rows}
        write_json(self.folder / f"{self.name}.json", table)


def measure_cases(
    report: Report,
    cases: Iterable[Case],
    measure: Callable[[Case], Result],
    make_rows: Callable[[dict[Case, list[Result]]], list[Row]],
    rounds: int = 1,
) -> list[Row]:
    """Measure all cases in turn, `rounds` times, and return the rows of the report.

    Taking turns compares the cases under the same conditions. After each measurement the rows so
    far are written: an interrupted run keeps its results. A case that fails, or whose check does,
    is named on stderr and left out. Raise InputError at the end if there was one.
    """
    results: dict[Case, list[Result]] = {}
    failed: set[Case] = set()
    rows: list[Row] = []
    for case in progress_bar([*cases] * rounds, unit="measurement"):
        if case in failed:
            continue
        try:
            results.setdefault(case, []).append(measure(case))
        # Whatever is wrong with one case, the others are worth hours.
        except Exception as error:
            failed.add(case)
            # The earlier rounds go too: whatever failed may have made them wrong.
            del results[case]
            print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr)
        if results:
            rows = make_rows(results)
            report.write(rows)
    if failed:
        num_cases = len(failed) + len(results)
        raise InputError(
            f"{len(failed)} of {num_cases} cases could not be measured; see the errors above"
        )
    return rows


def print_table(rows: list[Row]) -> None:
    """Print rows as a Markdown table, with a column for every key, in order of occurrence."""
    heads: dict[str, None] = {}
    for row in rows:
        heads.update(dict.fromkeys(row))
    cells = []
    for row in rows:
        cells_of_row = [format_cell(row.get(head)) for head in heads]
        cells.append(cells_of_row)
    print(format_table(list(heads), cells), end="")


def format_table(heads: list[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def format_cell(value: object) -> str:
    """Return a float with three digits, None as an empty cell, and anything else as it is."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    # More digits would claim more than was measured: rounds of one row differ by up to a fifth
    # (docs/results.md).
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _commit() -> str:
    """Return the commit of the code that ran, with `+` if the work tree differs from it."""
    # Tags are excluded, because their names would stand in place of the hash.
    command = ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
    try:
        described = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    # A container or an archive has no git, or no folder of it.
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()
