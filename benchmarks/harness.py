"""What every benchmark shares: timing, rounds, fresh processes, correctness checks, result files."""

import multiprocessing
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
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
PACKAGES = (
    "torch triton timm transformers av nvidia-dali-cuda130 spdl torchcodec decord2 decord".split()
)
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}  # beyond every cache

Row = dict[str, Any]
Case = TypeVar("Case", bound=Hashable)
Result = TypeVar("Result")


def cpu_seconds() -> float:
    """Return user and system time of this process and of those that work for it so far."""
    ticks = 0
    for process in list_family("self"):
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def list_family(process: str) -> list[str]:
    """List a process and all its descendants."""
    lists = Path(f"/proc/{process}/task").glob(
        "*/children"
    )  # of each thread; not every kernel has them
    children = [child for found in lists for child in found.read_text().split()]
    return [process, *(member for child in children for member in list_family(child))]


def copy_gb_per_second(device: torch.device) -> float:
    """Measure a copy on the device; reading and writing both count."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median(time_calls(lambda: target.copy_(source), device, 3, 20)) / 1e6


def matmul_tflops(device: torch.device, precision: Precision) -> float:
    """Measure the TFLOP/s of one large matrix product, the reference for model FLOPs utilization (MFU)."""
    side = 8192 if device.type == "cuda" else 2048
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / median(time_calls(lambda: a @ b, device, 3, 10)) / 1e9


def in_fresh_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call `function` in a new process, forked from a server that has imported the running script and nothing more.

    Its memory and caches are those of a new process, without the seconds of the imports.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__"])
    with ProcessPoolExecutor(1, context, initializer=_exit_with_parent) as pool:
        return pool.submit(function, *arguments).result()


def _exit_with_parent() -> None:
    """A killed benchmark must not leave a process behind that keeps a GPU busy."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


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
        self,
        name: str,
        folder: Path | None,
        device: torch.device,
        notes: Sequence[str] = (),
        **about: Any,
    ) -> None:
        """Describe the machine, package versions and the commit; `about` is added."""
        self.name, self.folder, self.notes = name, folder or results_folder(device), list(notes)
        self.about: dict[str, Any] = {
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "device": get_device_name(device),
            "cpu_threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            "packages": {
                found.name: found.version for found in distributions() if found.name in PACKAGES
            },
            "cuda": torch.version.cuda if device.type == "cuda" else None,
            "commit": _commit(),
            **about,
        }

    def write(self, rows: list[Row]) -> None:
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
    """Measure all cases in turn, `rounds` times, so that they are compared under the same conditions; return the rows.

    After each, write the rows of what was found so far: an interrupted run keeps its results. A case that fails, or
    whose check does, is named on stderr and left out: InputError is raised at the end.
    """
    found: dict[Case, list[Result]] = {}
    failed: set[Case] = set()
    rows: list[Row] = []
    for case in progress_bar([*cases] * rounds, unit="measurement"):
        if case in failed:
            continue
        try:
            found.setdefault(case, []).append(measure(case))
        except Exception as error:
            failed.add(case)
            del found[case]
            print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr)
        if found:
            report.write(rows := make_rows(found))
    if failed:
        raise InputError(
            f"{len(failed)} of {len(failed) + len(found)} cases could not be measured; see the errors above"
        )
    return rows


def print_table(rows: list[Row]) -> None:
    """Print rows as a Markdown table whose columns are all keys in the order in which they first occur."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    print(
        format_table(heads, [[format_cell(row.get(head)) for head in heads] for row in rows]),
        end="",
    )


def format_table(heads: list[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, ["---"] * len(heads), *rows))


def format_cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def _commit() -> str:
    """Return the commit of the code that ran, with `+` if the work tree differs from it."""
    describe = [
        "git",
        "-C",
        str(ROOT),
        "describe",
        "--always",
        "--abbrev=10",
        "--exclude=*",
        "--dirty=+",
    ]
    try:
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (
        OSError,
        subprocess.CalledProcessError,
    ):  # an image or an archive, without git or its folder
        return "unknown"
