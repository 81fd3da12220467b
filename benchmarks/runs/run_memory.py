"""Memory of a long run over shards in which videos have gone bad: does it grow?

    python benchmarks/runs/run_memory.py [--minutes 60] [--bad 0.05] [--nice 19] [--output FOLDER]

Draws videos, makes shards of them, changes a byte of some, and trains a tiny model on them by `train.py`, as users do.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import linear_regression, median

import torch
from matplotlib.figure import Figure

from benchmarks.harness import ROOT, Row, default_output, machine, require, write_results
from common.atomic_io import atomic_write
from common.errors import InputError, run_command
from common.progress import progress_bar
from pipeline.shards.dataset import ShardDataset

EVERY_S = 10
WARM_UP_SHARE = 0.25  # of the rows, which the slope leaves out
SETTINGS = (
    *("model.size=tiny", "model.num_frames=8", "model.image_size=32", "model.patch_size=8", "model.mask_ratio=0.75"),
    *("data.frame_stride=2", "data.num_threads=2", "batch_size=4", "steps=100000000", "precision=fp32", "device=cpu"),
    *("optimizer.warmup_epochs=0", "checkpoint_every=1000", "figure_every=1000", "data.max_bad_fraction=0.5"),
)
NOTES = [
    f"memory_mib: what the process holds that is no mapped file (RssAnon), every {EVERY_S} s. mib_a_minute and"
    f" kib_a_step: slopes of a straight line through all but the first {WARM_UP_SHARE:.0%} of the rows.",
]


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        shards, count = damaged_shards(Path(folder), options.bad)
        rows = watched(shards, Path(folder) / "run", options)
    steady = rows[int(len(rows) * WARM_UP_SHARE) :]
    minutes, steps, memory = ([row[name] for row in steady] for name in ("minutes", "step", "memory_mib"))
    require("the run takes steps", steps[-1] > steps[0], f"{steps[-1]} steps")
    require("bad videos were met", rows[-1]["bad_clips"] > 0, "none")
    about = machine(torch.device("cpu"), ("av", "numpy", "tensorboard"))
    about |= {"minutes": rows[-1]["minutes"], "steps": steps[-1], "bad_videos": count, "niceness": options.nice}
    about["mib_a_minute"] = round(linear_regression(minutes, memory).slope, 4)
    about["kib_a_step"] = round(1024 * linear_regression(steps, memory).slope, 4)
    about["median_memory_mib"] = round(median(memory), 1)
    output = options.output or default_output(torch.device("cpu"))
    write_results(output, "run_memory", rows, about, NOTES)
    draw(rows, about, output / "run_memory.png")
    print(f"{about['mib_a_minute']} MiB a minute, {about['kib_a_step']} KiB a step; written to {output}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--bad", type=float, default=0.05, help="share of the videos (default 0.05)")
    parser.add_argument("--nice", type=int, default=19, help="how much other work goes first (default 19: all)")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/cpu")
    options = parser.parse_args(arguments)
    if not options.minutes >= 1 or not 0 < options.bad < 0.5 or not 0 <= options.nice <= 19:
        raise InputError("--minutes must be at least 1, --bad between 0 and 0.5, --nice from 0 to 19")
    return options


def damaged_shards(folder: Path, share: float) -> tuple[Path, int]:
    """Shards of drawn videos, and how many of these have another byte than when they were made."""
    tools = ROOT / "shard_tools"
    drawn = ["--num-videos", "200", "--size", "64", "--num-frames", "48"]
    run_tool(tools / "synthetic_videos.py", folder / "videos", *drawn)
    run_tool(tools / "make_shards.py", folder / "videos", folder / "shards", "--frame-stride", "2")
    dataset = ShardDataset.open(folder / "shards")
    chosen = random.Random(0).sample(range(len(dataset.samples)), max(1, round(share * len(dataset.samples))))
    for index in chosen:
        sample = dataset.samples[index]
        with dataset.shard_path(index).open("r+b") as shard:
            shard.seek(sample.offset + sample.size // 2)
            byte = shard.read(1)[0]
            shard.seek(sample.offset + sample.size // 2)
            shard.write(bytes([byte ^ 0xFF]))
    return folder / "shards", len(chosen)


def run_tool(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, *map(str, arguments)], check=True, env=environment(), capture_output=True)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def watched(shards: Path, run: Path, options: argparse.Namespace) -> list[Row]:
    """A row every few seconds, from the first figures that the run writes on."""
    command = [sys.executable, str(ROOT / "train.py"), *SETTINGS, f"data.shards={shards}", f"run={run}"]
    process = subprocess.Popen(
        command, env=environment(), stderr=subprocess.DEVNULL, preexec_fn=lambda: os.nice(options.nice)
    )
    rows: list[Row] = []
    try:
        started = time.monotonic()
        for _ in progress_bar(range(round(60 * options.minutes / EVERY_S)), unit="row"):
            time.sleep(EVERY_S)
            require("the run goes on", process.poll() is None, f"it ended with {process.returncode}")
            figures = last_figures(run / "metrics.jsonl")
            if figures is not None:
                minutes = round((time.monotonic() - started) / 60, 3)
                row = {"minutes": minutes, "step": figures["step"], "memory_mib": anonymous_mib(process.pid)}
                rows.append(row | {"bad_clips": int(figures["pipeline/bad_clips"])})
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    require("the run has begun", len(rows) > 4, f"{len(rows)} rows: give it more --minutes")
    return rows


def last_figures(file: Path) -> Row | None:
    if not file.exists():
        return None
    lines = file.read_bytes().rpartition(b"\n")[0].splitlines()  # what is behind the last end of a line is half one
    return json.loads(lines[-1]) if lines else None


def anonymous_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return round(next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024, 2)


def draw(rows: list[Row], about: Row, path: Path) -> None:
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["minutes"] for row in rows], [row["memory_mib"] for row in rows], color="#2471a3")
    axes.set(
        xlabel="minutes", ylabel="MiB", ylim=(0, None),
        title=f"{about['mib_a_minute']:+.2f} MiB a minute, {about['kib_a_step']:+.3f} KiB a step,"
        f" {about['steps']} steps, {rows[-1]['bad_clips']} bad clips",
    )  # fmt: skip
    with atomic_write(path) as aside:
        figure.savefig(aside, format="png", dpi=110)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
