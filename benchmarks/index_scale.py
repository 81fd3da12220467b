"""What it costs to open a dataset, by the number of its clips: time, memory, random rows, digest, and the first batches
of a run's plan.

    python benchmarks/data/index_scale.py [--clips 100000 1000000 …] [--work FOLDER] [--output FOLDER]

Tables are made up: nobody looks into the tars. Each size is opened in a process of its own, as schema version 2 and, up
to Kinetics' 240,000, as version 1, whose table of every shard is read whole. 100,000,000 clips (--clips 100000000)
take 15 GB in FOLDER, which are removed again.
"""

import argparse
import hashlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib
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
from common.atomic_io import atomic_write, hash_file
from common.errors import InputError, run_command
from pipeline.config import DataConfig
from pipeline.planning.plan import Plan
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import (
    SAMPLE,
    SHARD,
    DatasetInfo,
    Sample,
    ShardInfo,
    Sides,
    TableInfo,
    read_dataset_info,
    sample_line,
)
from pipeline.shards.groups import GROUP
from pipeline.shards.index import HASHED_ROWS, Tables
from shard_tools.tables import write_description

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PER_SHARD = 256
VIDEO_BYTES = 100_000  # of a made-up video
MOST_OF_VERSION_1 = 240_000  # more takes a file a shard and long to make
SIZES = (100_000, 240_000, 1_000_000, 10_000_000)
LOOKS = 256  # random rows
NOTE = (
    f"Shards of {PER_SHARD} clips. open: from the call to a dataset of which any clip can be asked for, with the hash"
    f" of its table up to {HASHED_ROWS // SAMPLE.itemsize:,} clips; memory: what that adds to the process, the pages of"
    " files that it has looked at included; own: without those, which all"
    f" processes of a machine share. rows: {LOOKS} random samples, keys: with keys too. plan: made, with its first"
    " batch of 64 clips; turn: the first batch of the second epoch; batch: any other one, the median of 64. No video is"
    " touched. Times are the process's on a CPU, all its threads together: reading from a disk what is not in the page"
    " cache yet comes on top."
)


def main() -> None:
    options = parse(sys.argv[1:])
    rows: list[Row] = []
    for clips in options.clips:
        for version in (2, 1) if clips <= MOST_OF_VERSION_1 else (2,):
            with tempfile.TemporaryDirectory(dir=options.work) as folder:
                (make if version == 2 else make_version_1)(Path(folder), clips)
                rows.append(in_fresh_process(measure, Path(folder), clips, version))
    output = options.output or results_folder(torch.device("cpu"))
    write_results(output, "index_scale", rows, describe_machine(torch.device("cpu"), ("numpy", "msgspec")), [NOTE])
    draw(rows, output / "index_scale.png")
    print_table(rows)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, nargs="+", default=SIZES, help=f"default {SIZES}")
    parser.add_argument("--work", type=Path, help="folder for the tables (default: the system's temporary one)")
    parser.add_argument("--output", type=Path, help="folder for the results")
    options = parser.parse_args(arguments)
    if min(options.clips) < LOOKS:
        raise InputError(f"--clips: give at least {LOOKS}")
    needed = 180 * max(options.clips)
    free = shutil.disk_usage(options.work or tempfile.gettempdir()).free
    if free < needed:
        raise InputError(
            f"{needed / 1e9:.1f} GB are needed for the tables and {free / 1e9:.1f} are free: choose --work"
        )
    return options


def measure(folder: Path, clips: int, version: int) -> Row:
    """Open the dataset, and look at some of it."""
    before, own = memory_mib(), memory_mib("RssAnon")
    started = time.process_time()
    dataset = ShardDataset.open(folder)
    opened, memory = time.process_time() - started, memory_mib() - before
    chosen = np.random.default_rng(0).integers(0, clips, LOOKS).tolist()
    started = time.process_time()
    samples = [dataset.samples[number] for number in chosen]
    looked = time.process_time() - started
    keys = [sample.key for sample in samples]
    with_keys = time.process_time() - started
    right = [key_of(number) for number in chosen]
    require("the rows are those that were asked for", keys == right and len(dataset.samples) == clips, str(keys[:3]))
    started = time.process_time()
    require("the digest is one", len(dataset.digest) == 64, dataset.digest)
    digest = time.process_time() - started
    return {
        "clips": clips,
        "schema_version": version,
        "open_ms": opened * 1e3,
        "memory_mib": memory,
        "rows_ms": looked * 1e3,
        "keys_ms": with_keys * 1e3,
        "digest_ms": digest * 1e3,
        **planned(dataset),
        "memory_at_end_mib": memory_mib() - before,
        "own_at_end_mib": memory_mib("RssAnon") - own,
        "disk_mib": sum(path.stat().st_size for path in folder.iterdir()) / 2**20,
    }


def planned(dataset: ShardDataset) -> Row:
    """What the clips of a run's batches take to be found."""
    started = time.process_time()
    plan = Plan(dataset, DataConfig(), num_frames=16, image_size=224, seed=0, batch_size=64)
    plan.batch(0)
    begun = time.process_time() - started
    taken = []
    for number in range(turn := plan.clips_per_epoch // 64 + 1, turn + 65):
        started = time.process_time()
        plan.batch(number)
        taken.append(time.process_time() - started)
    return {"plan_ms": begun * 1e3, "turn_ms": taken[0] * 1e3, "batch_ms": statistics.median(taken[1:]) * 1e3}


def memory_mib(kind: str = "VmRSS") -> float:
    """Resident memory of this process; RssAnon: its own alone, without pages of files, which all processes share."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{kind}:")[1].split()[0]) / 1024


def key_of(number: int) -> str:
    return f"video_{number:09d}-{number * 2654435761 % 2**40:010x}"


def made_samples(first: int, end: int) -> Iterator[Sample]:
    for number in range(first, end):
        place = (number % PER_SHARD) * (VIDEO_BYTES + 2048) + 1536
        yield Sample(
            key_of(number), "mp4", "h264", 75, 7.5, 4, 342, 256, number % 400, f"class_{number % 400:03d}/{number}.mp4",
            hashlib.sha256(number.to_bytes(8, "little")).hexdigest(), place, VIDEO_BYTES,
        )  # fmt: skip


def made_shards(clips: int) -> Iterator[ShardInfo]:
    for number, first in enumerate(range(0, clips, PER_SHARD)):
        count = min(PER_SHARD, clips - first)
        digest = hashlib.sha256(number.to_bytes(8, "little")).hexdigest()
        yield ShardInfo(f"shard-{number:06d}.tar", count, count * (VIDEO_BYTES + 2048) + 10240, digest, digest, digest)


def described(clips: int) -> DatasetInfo:
    classes = [f"class_{number:03d}" for number in range(400)]
    return DatasetInfo(clips, clips * 75, clips * VIDEO_BYTES, classes, {}, [])


def make_version_1(folder: Path, clips: int) -> None:
    """dataset.json and a table a shard, as they were written before there were tables of all of them."""
    shards = list(made_shards(clips))
    for number, shard in enumerate(shards):
        first = number * PER_SHARD
        lines = map(sample_line, made_samples(first, first + shard.num_samples))
        (folder / shard.samples_name).write_bytes(b"".join(lines))
    said = described(clips).to_json()
    known = ("num_samples", "num_frames", "num_bytes", "classes", "encode", "num_rejected", "report")
    listed = [
        {k: v for k, v in asdict(shard).items() if k in ("name", "num_samples", "num_bytes", "sha256")}
        for shard in shards
    ]
    (folder / "dataset.json").write_text(
        json.dumps({**{name: said[name] for name in known}, "shards": listed, "schema_version": 1}), encoding="utf-8"
    )


def make(folder: Path, clips: int) -> None:
    """The tables of schema version 2, a million rows at a time; groups have none, as of copied videos."""
    tables = {}
    with (folder / "samples.npy").open("wb") as samples, (folder / "names.jsonl").open("wb") as names:
        header(samples, SAMPLE, clips)
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
    with (folder / "shards.npy").open("wb") as shards:
        header(shards, SHARD, -(-clips // PER_SHARD))
        for number, shard in enumerate(made_shards(clips)):
            digest = bytes.fromhex(shard.sha256)
            row = shard.name.encode(), number * PER_SHARD, shard.num_samples, shard.num_bytes, digest, digest, digest
            shards.write(np.array([row], SHARD).tobytes())
    np.save(folder / "groups.npy", np.empty(0, GROUP))
    counts = {"shards": -(-clips // PER_SHARD), "samples": clips, "groups": 0, "names": clips}
    for name, count in counts.items():
        (path,) = folder.glob(f"{name}.*")
        tables[name] = TableInfo(path.name, count, path.stat().st_size, hash_file(path))
    sides = Sides(clips, 342, 342, 256, 256, 342 * 256)
    facts: dict[str, Any] = {"codecs": {"h264": sides}, "containers": ["mp4"], "frame_strides": [4], "labels": (0, 399)}
    info = replace(described(clips), tables=tables, shards=[], **facts)
    write_description(folder, info)
    info = replace(read_dataset_info(folder), content="")
    content = Tables.open(info, folder, lambda table: folder / table.file).content
    write_description(folder, replace(info, content=content))


def name_lines(numbers: np.ndarray) -> np.ndarray:
    """`["key", "source"]` of each, as rows of bytes of one length."""
    count, decimal = len(numbers), digits(numbers, 10, 9)
    hashes = digits(numbers * 2654435761 % 2**40, 16, 10)
    key = [letters('["video_', count), decimal, letters("-", count), hashes]
    return np.concatenate([*key, letters('", "', count), decimal, letters('.mp4"]\n', count)], axis=1)


def letters(text: str, count: int) -> np.ndarray:
    return np.tile(np.frombuffer(text.encode(), np.uint8), (count, 1))


def digits(numbers: np.ndarray, base: int, width: int) -> np.ndarray:
    places = base ** np.arange(width)[::-1]
    return np.frombuffer(b"0123456789abcdef", np.uint8)[numbers[:, None] // places % base]


def header(file: BinaryIO, dtype: np.dtype, count: int) -> None:
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, described)


def draw(rows: list[Row], path: Path) -> None:
    """What grows with the number of clips, and what does not, written as PNG."""
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.5), layout="constrained")
    labels = {
        "open_ms": "open, ms", "memory_at_end_mib": "memory of the process, MiB", "digest_ms": "digest, ms",
        "plan_ms": "plan and first batch, ms",
    }  # fmt: skip
    for axis, (column, label) in zip(axes, labels.items(), strict=True):
        for version, colour in ((1, "#85929e"), (2, "#c0392b")):
            chosen = [row for row in rows if row["schema_version"] == version]
            axis.loglog(
                [row["clips"] for row in chosen], [max(row[column], 0.01) for row in chosen], "o-", color=colour,
                label=f"schema version {version}",
            )  # fmt: skip
        axis.set(xlabel="clips", ylabel=label)
        axis.grid(alpha=0.3)
        axis.legend()
    with atomic_write(path) as aside:
        figure.savefig(aside, format="png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    run_command(main)
