"""The first hour on a GPU: everything that needs one, in stages, into one folder.

    python benchmarks/on_gpu.py [STAGE ...] --output DIR [--videos VIDEOS] [--small]

STAGE is any of the names in STAGES, in their order; none: all. A stage takes 8 minutes at most, what is left of it is
then given up, and the next one goes on; so it does after a failure. Nothing outside of DIR is needed or written:
without VIDEOS, synthetic ones are generated in DIR/scratch, beside shards and runs. DIR/<stage>.log holds what a stage
printed, DIR/goals.json the goals beside the results. Called again for other stages with the same DIR, it adds them.
--small: the same commands at sizes that a CPU takes, to see that they run.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from benchmarks.harness import ROOT, Row, describe_machine, print_table, write_results
from common.devices import choose_device
from common.errors import InputError, run_command

STAGE_SECONDS = 480.0
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL of a command whose time is up

Rows = list[Row]


@dataclass(frozen=True)
class Goal:
    """A figure in a stage's results that is to reach a mark."""

    what: str
    result: str  # name of the JSON file in DIR
    mark: float
    figure: Callable[[Rows], float]  # raises LookupError or ValueError where the rows do not tell it
    at_most: bool = False  # otherwise at least

    def row(self, folder: Path) -> Row:
        wanted = f"{'≤' if self.at_most else '≥'} {self.mark:g}"
        try:
            rows = json.loads((folder / f"{self.result}.json").read_text(encoding="utf-8"))["rows"]
            found = self.figure(rows)
        except (OSError, LookupError, ValueError):
            return {"what": self.what, "goal": wanted, "figure": None, "met": "not measured"}
        met = found <= self.mark if self.at_most else found >= self.mark
        return {"what": self.what, "goal": wanted, "figure": round(found, 4), "met": "yes" if met else "no"}


@dataclass(frozen=True)
class Place:
    """Where a call works, and at which sizes."""

    folder: Path
    videos: Path
    small: bool

    @property
    def scratch(self) -> Path:
        """For what is not worth keeping."""
        return self.folder / "scratch"

    def sized(self, small: str, full: str) -> list[str]:
        return (small if self.small else full).split()


@dataclass(frozen=True)
class Stage:
    """Commands to run one after the other, each with the arguments that come behind `python`."""

    purpose: str
    commands: Callable[[Place], list[list[str]]]
    goals: tuple[Goal, ...] = ()


def bench(place: Place, name: str, *arguments: str) -> list[str]:
    return [f"benchmarks/{name}.py", *arguments, "--output", str(place.folder)]


def synthetic_videos(place: Place) -> list[list[str]]:
    """Videos of a size that people store, where the call names none; generated once."""
    if place.videos.parent != place.scratch or place.videos.exists():
        return []
    size = place.sized("--num-videos 8 --size 64 --num-frames 64", "--num-videos 96 --size 342x256 --num-frames 240")
    return [["shard_tools/synthetic_videos.py", str(place.videos), *size]]


# A test of ten runs, what the stage `resume` does at size.
RESUMING = "test_killed_and_stopped_on_a_gpu_a_deterministic_run_ends_with_the_same_bits"


def tests(place: Place) -> list[list[str]]:
    # Where a package is missing that only some tests need, the others run, and these are errors.
    on_gpu = ["-m", "pytest", "-m", "gpu", "--continue-on-collection-errors", "-p", "no:cacheprovider", "tests"]
    kernels = ["-m", "pytest", "-m", "not gpu", "-p", "no:cacheprovider", "tests/kernels"]
    kernels += ["--ignore", "tests/kernels/test_compile.py"]
    on_gpu += ["--deselect", f"tests/training/test_numerics.py::{RESUMING}"]
    return [[*kernels, "-k", "noise"], [*on_gpu, "--collect-only"]] if place.small else [kernels, on_gpu]


def decode(place: Place) -> list[list[str]]:
    size = place.sized("--seconds 0.5 --encodes h264 --batch-size 4", "--seconds 3 --encodes h264 mjpeg copy")
    run = bench(place, "pipeline_throughput", str(place.videos), *size, "--work", str(place.scratch))
    return [*synthetic_videos(place), run]


def codecs(place: Place) -> list[list[str]]:
    size = place.sized("--seconds 0.5 --encodes vp9 --batch-size 4", "--seconds 3 --encodes hevc av1 vp9")
    apart = replace(place, folder=place.folder / "codecs")  # not over the figures of `decode`
    run = bench(apart, "pipeline_throughput", str(place.videos), *size, "--work", str(place.scratch))
    return [*synthetic_videos(place), run]


def end_to_end(place: Place) -> list[list[str]]:
    tiny = "--size tiny --batch-size 2 --steps 1 --rounds 1 --encodes h264"
    size = place.sized(tiny, "--compile --encodes h264 mjpeg --rounds 1 --steps 60")
    run = bench(place, "end_to_end", str(place.videos), *size, "--work", str(place.scratch))
    return [*synthetic_videos(place), run]


def resume(place: Place) -> list[list[str]]:
    shards = str(place.scratch / "resume")
    make = ["shard_tools/make_shards.py", str(place.videos), shards, "--frame-stride", "2", "--unlabeled"]
    run = bench(place, "gpu/resume_check", shards, *place.sized("--steps 6", "--steps 200"))
    return [*synthetic_videos(place), make, run]


def learning(place: Place) -> list[list[str]]:
    """As far as the time goes; called again, it goes on with the points that are not done."""
    preset = place.sized(
        "steps=2 batch_size=4 --preset cpu --num-videos 96 --strategies adaptive random --ratios 0.75 --seeds 0",
        "--preset gpu --strategies adaptive random --ratios 0.95 --seeds 0",
    )
    return [["benchmarks/masking_study.py", *preset, "--output", str(place.scratch / "masking_study")]]


def ablations(place: Place) -> list[list[str]]:
    tables = "b" if place.small else "abcdef"
    size = place.sized("--batch-size 1", "--batch-size 16")
    return [bench(place, "ablations", "--table", table, *size) for table in tables]


def best(implementation: str, measure: str) -> Callable[[Rows], float]:
    """The largest value of an implementation's, under adaptive masking."""
    return lambda rows: max(
        row[measure] for row in rows if row["implementation"] == implementation and row["masking"] == "adaptive"
    )


def default_point(measure: str) -> Callable[[Rows], float]:
    """Of the model that the paper trains, without checkpointing."""

    def find(rows: Rows) -> float:
        wanted = {"masking": "adaptive", "mask_ratio": 0.95, "activation_checkpointing": False}
        (row,) = (row for row in rows if wanted.items() <= row.items())
        return float(row[measure])

    return find


def fastest_of_ours(rows: Rows) -> float:
    return max(
        row["clips_per_second"]
        for row in rows
        if row["loader"] == "ours" and row["encode"] not in ("copy", "original") and row["repeats"] == 1
    )


def slowest_kernel(rows: Rows) -> float:
    """At the largest batch: small ones leave a GPU idle."""
    largest = max(row["batch"] for row in rows)
    return min(
        row["fraction_of_copy"]
        for row in rows
        if row["implementation"] == "ours" and row["batch"] == largest and row["phase"] != "both"
    )


STAGES: dict[str, Stage] = {
    "probe": Stage("driver, copy and product rates", lambda place: [bench(place, "gpu/probe")]),
    "tests": Stage("the tests that need a GPU, and the kernels' compiled", tests),
    "kernels": Stage(
        "every op of the token path beside the published way",
        lambda place: [
            bench(place, "kernel_speed", *place.sized("--batch-size 1 --repetitions 1 --op gather_tokens", ""))
        ],
        (Goal("slowest Triton kernel, fraction of copy bandwidth", "kernel_speed", 0.8, slowest_kernel),),
    ),
    "memory": Stage(
        "masking ratio against memory",
        lambda place: [bench(place, "memory_vs_ratio", *place.sized("--size tiny --batch-size 2 --repetitions 1", ""))],
        (
            Goal("GiB, batch 16, eager", "memory_vs_ratio", 3.6, default_point("measured_peak_gib"), at_most=True),
            Goal(
                *("GiB, batch 16, compiled", "memory_vs_ratio", 2.9),
                default_point("compiled_measured_peak_gib"),
                at_most=True,
            ),
        ),
    ),
    "step": Stage(
        "our step, eager and compiled, beside the peers'",
        lambda place: [
            bench(
                *(place, "train_throughput"),
                *place.sized("--size tiny --batch-size 1 --rounds 1 --repetitions 1", "--rounds 1"),
            )
        ],
        (
            Goal("times the published step", "train_throughput", 4, best("ours, compiled", "speed_up")),
            Goal("MFU, compiled", "train_throughput", 0.45, best("ours, compiled", "mfu")),
        ),
    ),
    "decode": Stage(
        "clips a second out of videos, by every decoder",
        decode,
        (Goal("decoded clips a second from prepared shards", "pipeline_throughput", 1000, fastest_of_ours),),
    ),
    "codecs": Stage("the same of the codecs that fewer use", codecs),
    "end_to_end": Stage(
        "training from shards beside training from clips that are there",
        end_to_end,
        (
            Goal(
                *("speed relative to a cached batch", "end_to_end", 0.9),
                lambda rows: max(row["relative_to_cached"] for row in rows if row["batches"] != "cached batch"),
            ),
        ),
    ),
    "resume": Stage("killed and started again, beside left alone", resume),
    "ablations": Stage("the paper's table 1 with our memory beside it", ablations),
    "learning": Stage("adaptive against random masking, as far as the time goes", learning),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    folder: Path = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    place = Place(folder, options.videos.resolve() if options.videos else folder / "scratch" / "videos", options.small)
    ended = {}
    for name in options.stages:
        started = time.monotonic()
        print(f"== {name}: {STAGES[name].purpose}", file=sys.stderr, flush=True)
        ended[name] = run_stage(STAGES[name], place, folder / f"{name}.log")
        print(f"== {name}: {ended[name]}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    rows = [goal.row(folder) for stage in STAGES.values() for goal in stage.goals]
    about = describe_machine(choose_device()) | {f"stage {name}": how for name, how in ended.items()}
    write_results(folder, "goals", rows, about, [])
    print_table(rows)
    return 0 if set(ended.values()) == {"done"} else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--output", type=Path, required=True, help="folder for everything")
    parser.add_argument("--videos", type=Path, help="folder of videos (default: synthetic ones)")
    parser.add_argument("--small", action="store_true", help="a dry run at sizes that a CPU takes")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.stages if name not in STAGES]
    if unknown:
        raise InputError(f"there is no stage {unknown[0]}: choose among {', '.join(STAGES)}")
    if options.videos is not None and not options.videos.is_dir():
        raise InputError(f"{options.videos} is no folder of videos")
    if not options.small and choose_device().type != "cuda":
        raise InputError("PyTorch finds no GPU here: --small makes a dry run on the CPU")
    options.stages = [name for name in STAGES if name in options.stages or not options.stages]
    return options


def run_stage(stage: Stage, place: Place, log: Path) -> str:
    """Run all of a stage's commands, what they print into `log`; returns how it ended, or the first failure."""
    deadline, ended = time.monotonic() + STAGE_SECONDS, "done"
    with log.open("wb") as file:
        for command in stage.commands(place):
            file.write(f"$ python {' '.join(command)}\n".encode())
            file.flush()
            code = run(command, file, deadline - time.monotonic())
            if code is None:
                return f"given up after {STAGE_SECONDS:.0f} s in `{command[0]}`"
            if code and ended == "done":
                ended = f"`{command[0]}` failed with exit code {code}: {last_line(log)}"
    return ended


def run(command: list[str], log: BinaryIO, seconds: float) -> int | None:
    """Exit code of a command, or None if it took longer; then nothing of it is left."""
    # The repository comes first: where the package is not installed, scripts in a sub-folder would not find it.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=settings, stdout=log, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """End a command and all that it has started, politely first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300]


if __name__ == "__main__":
    run_command(main)
