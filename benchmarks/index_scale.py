"""Measure what opening a dataset costs by its number of clips: time, memory, random rows, and a run's first batches.

    python benchmarks/index_scale.py [--clips 100000 1000000 ...] [--work FOLDER] [--output FOLDER]

Only the tables are written; no video is read. Each size is opened in a process of its own. 100,000,000 clips
(--clips 100000000) take 15 GB in FOLDER, which are removed again.
"""

import argparse
import hashlib
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from benchmarks.harness import (
    Row,
    describe_machine,
    in_fresh_process,
    print_table,
    require,
    results_folder,
    write_results,
)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, nargs="+", default=SIZES, help=f"default: {SIZES}")
    parser.add_argument("--work", type=Path, help="folder for the tables (default: the system's temporary one)")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/cpu")
    options = parser.parse_args(arguments)
    if min(options.clips) < NUM_ROWS:
        raise InputError(f"--clips: give at least {NUM_ROWS}")
    needed, free = 180 * max(options.clips), shutil.disk_usage(options.work or tempfile.gettempdir()).free
    if free < needed:
        raise InputError(f"the tables take {needed / 1e9:.1f} GB and {free / 1e9:.1f} are free: choose --work")
    rows: list[Row] = []
    for clips in options.clips:
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            write_tables(Path(folder), clips)
            rows.append(in_fresh_process(measure, Path(folder), clips))
    cpu = torch.device("cpu")
    write_results(
        options.output or results_folder(cpu), "index_scale", rows, describe_machine(cpu, ("numpy", "msgspec")), [NOTE]
    )
    print_table(rows)


def measure(folder: Path, clips: int) -> Row:
    before, own = memory_mib(), memory_mib("RssAnon")
    started = time.process_time()
    dataset = ShardDataset.open(folder)
    opened, memory = time.process_time() - started, memory_mib() - before
    chosen = np.random.default_rng(0).integers(0, clips, NUM_ROWS).tolist()
    started = time.process_time()
    samples = [dataset.samples[number] for number in chosen]
    read = time.process_time() - started
    keys = [sample.key for sample in samples]
    with_keys = time.process_time() - started
    expected = [f"video_{number:09d}" for number in chosen]
    require("rows are those asked for", keys == expected and len(dataset.samples) == clips, str(keys[:3]))
    started = time.process_time()
    plan = TrainingPlan(dataset, DataConfig(), num_frames=16, image_size=224, seed=0, batch_size=64)
    plan.batch(0)
    planned = time.process_time() - started
    batches = []
    for number in range(epoch := plan.clips_per_epoch // 64 + 1, epoch + 65):
        started = time.process_time()
        plan.batch(number)
        batches.append(time.process_time() - started)
    return {
        "clips": clips,
        "open_ms": opened * 1e3,
        "memory_mib": memory,
        "rows_ms": read * 1e3,
        "keys_ms": with_keys * 1e3,
        "plan_ms": planned * 1e3,
        "epoch_ms": batches[0] * 1e3,
        "batch_ms": statistics.median(batches[1:]) * 1e3,
        "memory_at_end_mib": memory_mib() - before,
        "own_at_end_mib": memory_mib("RssAnon") - own,
        "disk_mib": sum(path.stat().st_size for path in folder.iterdir()) / 2**20,
    }


def memory_mib(kind: str = "VmRSS") -> float:
    """Return the resident memory of this process; RssAnon: without file pages, which all processes share."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{kind}:")[1].split()[0]) / 1024


def write_tables(folder: Path, clips: int) -> None:
    """Write the tables of a dataset of copied videos, a million rows at a time, and its description."""
    with (folder / "samples.npy").open("wb") as samples, (folder / "names.jsonl").open("wb") as names:
        write_header(samples, SAMPLE, clips)
        for first in range(0, clips, 1_000_000):
            numbers = np.arange(first, min(first + 1_000_000, clips))
            lines = name_lines(numbers)
            rows = np.zeros(len(numbers), SAMPLE)
            rows["shard"], rows["label"] = numbers // PER_SHARD, numbers % 400
            rows["offset"], rows["size"] = numbers % PER_SHARD * (VIDEO_BYTES + 2048) + 1536, VIDEO_BYTES
            rows["fps"], rows["num_frames"], rows["frame_stride"] = 7.5, 75, 4
            rows["width"], rows["height"] = 342, 256
            rows["name"] = numbers * lines.shape[1]
            rows["sha256"] = np.frombuffer(np.random.default_rng(first).bytes(32 * len(rows)), "V32")
            samples.write(rows.tobytes())
            names.write(lines.tobytes())
    num_shards = -(-clips // PER_SHARD)
    with (folder / "shards.npy").open("wb") as shards:
        write_header(shards, SHARD, num_shards)
        for number in range(num_shards):
            count = min(PER_SHARD, clips - number * PER_SHARD)
            digest = hashlib.sha256(number.to_bytes(8, "little")).digest()
            size = count * (VIDEO_BYTES + 2048) + 10240
            row = f"shard-{number:06d}.tar".encode(), number * PER_SHARD, count, size, digest, digest, digest
            shards.write(np.array([row], SHARD).tobytes())
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


def name_lines(numbers: np.ndarray) -> np.ndarray:
    """Return the lines `["key", "source"]` of the table of names, as rows of bytes of one length."""
    digits = (numbers[:, None] // 10 ** np.arange(9)[::-1] % 10 + ord("0")).astype(np.uint8)
    parts = [np.tile(np.frombuffer(text, np.uint8), (len(numbers), 1)) for text in (b'["video_', b'", "', b'.mp4"]\n')]
    return np.concatenate([parts[0], digits, parts[1], digits, parts[2]], axis=1)


def write_header(file: BinaryIO, dtype: np.dtype, count: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)


if __name__ == "__main__":
    run_command(main)
