"""The first hour on a GPU: everything that needs one, in stages, into one folder.

    python -m benchmarks.on_gpu [STAGE ...] --output DIR [--videos VIDEOS] [--minutes N] [--small]

STAGE is any of those in benchmarks/on_gpu.yaml, in their order, the most telling first; none: all. A stage takes 8
minutes at most, and all together --minutes; what is left of it is then given up, and the next one goes on; so it does
after a failure. Nothing outside of DIR is needed or written: without VIDEOS, synthetic ones are generated in
DIR/scratch, beside shards and runs. DIR/<stage>.log holds what a stage printed, DIR/goals.json the goals beside the
results. Called again for other stages with the same DIR, it adds them.
--small: the same commands at sizes that a CPU takes, to see that they run.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.arguments import ArgumentParser, at_least, existing_folder
from benchmarks.harness import ROOT, Report, Row, find_version, print_table
from common.devices import choose_device
from common.errors import InputError, run_command
from common.yaml_io import read_yaml

STAGE_SECONDS = 480.0
# What train.py imports besides PyTorch and what comes with it; stages that are `plain` do without.
PACKAGES = (
    "av", "docstring-parser", "fsspec", "jaxtyping", "jinja2", "jsonargparse", "matplotlib", "msgspec", "pebble",
    "ruamel.yaml", "safetensors", "tensorboard", "torchao", "webdataset",
)  # fmt: skip
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL of a command whose time is up


STAGES: dict[str, dict[str, Any]] = read_yaml(ROOT / "benchmarks/on_gpu.yaml")
# Of a size that people store.
SYNTHETIC_VIDEOS = {
    "run": "shard_tools/synthetic_videos.py {videos}",
    "full": "--num-videos 96 --size 342x256 --num-frames 240",
    "small": "--num-videos 8 --size 64 --num-frames 64",
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    folder: Path = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    videos = options.videos.resolve() if options.videos else folder / "scratch" / "videos"
    ended: dict[str, str] = {}
    deadline = time.monotonic() + 60 * options.minutes
    for name in options.stages:
        started = time.monotonic()
        print(f"== {name}: {STAGES[name]['purpose']}", file=sys.stderr, flush=True)
        missing = (
            [] if STAGES[name].get("plain") else [package for package in PACKAGES if find_version(package) is None]
        )
        if missing:
            ended[name] = f"left out, for lack of packages: pip install {' '.join(missing)}"
        else:
            commands = list_commands(STAGES[name], folder, videos, options.small)
            ended[name] = run_stage(commands, folder / f"{name}.log", min(STAGE_SECONDS, deadline - started))
        print(f"== {name}: {ended[name]}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    rows = rate_goals(folder)
    stages = {f"stage {name}": how for name, how in ended.items()}
    Report("goals", folder, choose_device(), **stages).write(rows)
    print_table(rows)
    return 0 if set(ended.values()) == {"done"} else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__, output=None)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--videos", type=existing_folder, help="folder of videos (default: synthetic ones)")
    parser.add_argument("--minutes", type=at_least(1), default=1000, help="for all stages together")
    parser.add_argument("--small", action="store_true", help="a dry run at sizes that a CPU takes")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.stages if name not in STAGES]
    if unknown:
        raise InputError(f"there is no stage {unknown[0]}: choose among {', '.join(STAGES)}")
    if not options.small and choose_device().type != "cuda":
        raise InputError("PyTorch finds no GPU here: --small makes a dry run on the CPU")
    options.stages = [name for name in STAGES if name in options.stages or not options.stages]
    return options


def list_commands(stage: dict[str, Any], out: Path, videos: Path, small: bool) -> list[list[str]]:
    """List a stage's commands at their size, and before them the generation of videos where it needs them."""
    generate = [SYNTHETIC_VIDEOS] if stage.get("videos") and not videos.exists() else []
    size = "small" if small else "full"
    templates = [
        f"{command['run']} {command.get(size, '')}"
        for command in (*generate, *stage["commands"])
        if command.get(size, "") is not None
    ]
    folders = {"out": out, "videos": videos, "scratch": out / "scratch"}
    return [[word.format(**folders) for word in shlex.split(template)] for template in templates]


def rate_goals(folder: Path) -> list[Row]:
    return [rate(folder, **goal) for stage in STAGES.values() for goal in stage.get("goals", [])]


def rate(
    folder: Path, what: str, result: str, column: str, where: dict[str, Any], worst: bool = False, **goal: float
) -> Row:
    """Compare a goal, `at_least` or `at_most`, with the results in `folder`."""
    ((how, mark),) = goal.items()
    row: Row = {"what": what, "goal": f"{'≤' if how == 'at_most' else '≥'} {mark:g}"}
    wanted = {name: value if isinstance(value, list) else [value] for name, value in where.items()}
    try:
        rows = json.loads((folder / f"{result}.json").read_text(encoding="utf-8"))["rows"]
        rows = [row for row in rows if all(row[name] in values for name, values in wanted.items())]
        figure = (min if worst else max)(row[column] for row in rows)
    except (OSError, LookupError, ValueError):  # no such file, column or row
        return {**row, "figure": None, "met": "not measured"}
    met = figure <= mark if how == "at_most" else figure >= mark
    return {**row, "figure": round(figure, 4), "met": "yes" if met else "no"}


def run_stage(commands: Sequence[list[str]], log: Path, seconds: float) -> str:
    """Run commands, what they print into `log`; return how it ended, or the first failure."""
    deadline, ended = time.monotonic() + seconds, "done"
    with log.open("wb") as file:
        for command in commands:
            file.write(f"$ python {shlex.join(command)}\n".encode())
            file.flush()
            code = run(command, file, deadline - time.monotonic())
            if code is None:
                return f"given up after {max(0, seconds):.0f} s in `{command[0]}`"
            if code and ended == "done":
                last_line = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-1]
                ended = f"`{command[0]}` failed with exit code {code}: {last_line.strip()[:300]}"
    return ended


def run(command: list[str], log: BinaryIO, seconds: float) -> int | None:
    """Return the exit code of a command, or None if it took longer; then nothing of it is left."""
    # The repository comes first: where the package is not installed, scripts in a sub-folder would not find it.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:  # with all that it has started, politely first
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)


if __name__ == "__main__":
    run_command(main)
