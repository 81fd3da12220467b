"""Measure what opening a dataset costs by its number of clips: time, memory, random rows, and a run's first batches.

    python benchmarks/index_scale.py [--clips 100000 1000000 ...] [--work FOLDER] [--output FOLDER]

Only the tables are written; no video is read. Each size is opened in a process of its own. 100,000,000 clips
(--clips 100000000) take 15 GB in FOLDER, which are removed again.
"""

import hashlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import ArgumentParser, at_least, existing_folder
from benchmarks.harness import Report, Row, in_fresh_process, print_table, require
from common.atomic_io import hash_file
from common.errors import InputError, run_command
from pipeline.config import DataConfig
from pipeline.planning.plan import TrainingPlan
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import SAMPLE, SHARD, DatasetInfo, Sides, TableInfo, read_dataset_info
from pipeline.shards.gops import GOP
from pipeline.shards.index import HASHED_ROWS, Tables
from shard_tools.write import write_description

PER_SHARD = 256
VIDEO_BYTES = 100_000
SIZES = (100_000, 240_000, 1_000_000, 10_000_000)
NUM_ROWS = 256  # random rows
NOTE = (
    f"Shards of {PER_SHARD} clips. open: until any clip can be asked for, with the hash of the table up to"
    f" {HASHED_ROWS // SAMPLE.itemsize:,} clips; memory: added to the process, including the file pages it has read;"
    f" own: without those, which all processes of a node share. rows: {NUM_ROWS} random samples; keys: with their keys."
    " plan: created, with its first batch of 64 clips; epoch: the first batch of the second epoch; batch: any other,"
    " median of 64. Times are CPU times of the process with warm page cache."
)


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__, "benchmarks/results/cpu")
    parser.add_argument("--clips", type=at_least(NUM_ROWS), nargs="+", default=SIZES, help=f"default: {SIZES}")
    parser.add_argument("--work", type=existing_folder, help="folder for the tables (default: the temporary one)")
    options = parser.parse_args(arguments)
    needed, free = 180 * max(options.clips), shutil.disk_usage(options.work or tempfile.gettempdir()).free
    if free < needed:
        raise InputError(f"the tables take {needed / 1e9:.1f} GB and {free / 1e9:.1f} are free: choose --work")
    rows: list[Row] = []
    for clips in options.clips:
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            write_tables(Path(folder), clips)
            rows.append(in_fresh_process(measure, Path(folder), clips))
    report = Report("index_scale", options.output, torch.device("cpu"), [NOTE], ("numpy", "msgspec"))
    report.write(rows)
    print_table(rows)


def measure(folder: Path, clips: int) -> Row:
    before, own = memory_mib(), memory_mib("RssAnon")
    dataset, open_ms = time_call(lambda: ShardDataset.open(folder))
    memory = memory_mib() - before
    chosen = np.random.default_rng(0).integers(0, clips, NUM_ROWS).tolist()
    samples, rows_ms = time_call(lambda: [dataset.samples[number] for number in chosen])
    keys, keys_ms = time_call(lambda: [sample.key for sample in samples])
    expected = [f"video_{number:09d}" for number in chosen]
    require("rows are those asked for", keys == expected and len(dataset.samples) == clips, str(keys[:3]))
    sizes = {"num_frames": 16, "image_size": 224, "batch_size": 64}
    plan, plan_ms = time_call(lambda: TrainingPlan(dataset, DataConfig(), seed=0, **sizes))
    _, first_ms = time_call(lambda: plan.batch(0))
    epoch = plan.clips_per_epoch // 64 + 1
    batches = [time_call(partial(plan.batch, number))[1] for number in range(epoch, epoch + 65)]
    return {
        "clips": clips,
        "open_ms": open_ms,
        "memory_mib": memory,
        "rows_ms": rows_ms,
        "keys_ms": rows_ms + keys_ms,
        "plan_ms": plan_ms + first_ms,
        "epoch_ms": batches[0],
        "batch_ms": statistics.median(batches[1:]),
        "memory_at_end_mib": memory_mib() - before,
        "own_at_end_mib": memory_mib("RssAnon") - own,
        "disk_mib": sum(path.stat().st_size for path in folder.iterdir()) / 2**20,
    }


def time_call(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a call returns, and its milliseconds of CPU time."""
    started = time.process_time()
    result = call()
    return result, (time.process_time() - started) * 1e3


def memory_mib(kind: str = "VmRSS") -> float:
    """Return the resident memory of this process; RssAnon: without file pages, which all processes share."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{kind}:")[1].split()[0]) / 1024


def write_tables(folder: Path, clips: int) -> None:
    """Write the tables of a dataset of copied videos, a million rows at a time, and its description."""
    samples = np.lib.format.open_memmap(folder / "samples.npy", "w+", SAMPLE, (clips,))
    with (folder / "names.jsonl").open("wb") as names:
        for first in range(0, clips, 1_000_000):
            numbers = np.arange(first, min(first + 1_000_000, clips))
            lines = [f'["video_{number:09d}", "{number:09d}.mp4"]\n'.encode() for number in numbers.tolist()]
            names.writelines(lines)
            rows = samples[first : first + len(numbers)]
            rows["shard"], rows["label"] = numbers // PER_SHARD, numbers % 400
            rows["offset"], rows["size"] = numbers % PER_SHARD * (VIDEO_BYTES + 2048) + 1536, VIDEO_BYTES
            rows["fps"], rows["num_frames"], rows["frame_stride"] = 7.5, 75, 4
            rows["width"], rows["height"] = 342, 256
            rows["name"] = numbers * len(lines[0])
            rows["sha256"] = np.frombuffer(np.random.default_rng(first).bytes(32 * len(rows)), "V32")
    num_shards = -(-clips // PER_SHARD)
    shards = np.lib.format.open_memmap(folder / "shards.npy", "w+", SHARD, (num_shards,))
    for number in range(num_shards):
        count = min(PER_SHARD, clips - number * PER_SHARD)
        digest = hashlib.sha256(number.to_bytes(8, "little")).digest()
        size = count * (VIDEO_BYTES + 2048) + 10240
        shards[number] = f"shard-{number:06d}.tar".encode(), number * PER_SHARD, count, size, digest, digest, digest
    samples.flush()
    shards.flush()
    np.save(folder / "gops.npy", np.empty(0, GOP))
    tables = {}
    for name, rows_of_table in {"shards": num_shards, "samples": clips, "gops": 0, "names": clips}.items():
        (path,) = folder.glob(f"{name}.*")
        tables[name] = TableInfo(path.name, rows_of_table, path.stat().st_size, hash_file(path))
    facts: dict[str, Any] = {
        "codecs": {"h264": Sides(clips, 342, 342, 256, 256, 342 * 256)}, "containers": ["mp4"], "frame_strides": [4],
        "labels": (0, 399), "tables": tables,
    }  # fmt: skip
    classes = [f"class_{number:03d}" for number in range(400)]
    write_description(folder, DatasetInfo(clips, clips * 75, clips * VIDEO_BYTES, classes, {}, [], **facts))
    info = replace(read_dataset_info(folder), content="")
    content = Tables.open(info, folder, lambda table: folder / table.file).content
    write_description(folder, replace(info, content=content))


if __name__ == "__main__":
    run_command(main)
