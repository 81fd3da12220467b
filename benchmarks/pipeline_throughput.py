"""Clips a second out of real videos: our pipeline against the loaders that people use, on the same videos and cores.

    python benchmarks/pipeline_throughput.py VIDEOS [--encodes h264 mjpeg copy] [--seconds 10] [--output FOLDER]

VIDEOS is a folder. Shards are made of it with every encode (kept in --work for the next time), and each loader runs in
a process of its own, over the originals and over the very bytes that are in the shards. decord and torchcodec take part
where they can be imported. Clips per CPU-second is the figure that other programs on the machine do not disturb.
"""

import argparse
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image

from benchmarks.harness import (
    ROOT,
    Row,
    describe_machine,
    in_fresh_process,
    measure_cases,
    print_table,
    require,
    results_folder,
    write_results,
)
from benchmarks.peers.loaders import DECODERS, NUM_FRAMES, SIDE, file_batches, tar_batches
from benchmarks.reports.pipeline_plot import draw
from common.devices import choose_device
from common.errors import InputError, run_command
from pipeline.config import DataConfig
from pipeline.decoding.containers import open_video
from pipeline.decoding.dali import CPU_CODECS, GPU_CODECS, dali_is_installed
from pipeline.decoding.sources import decode_frames
from pipeline.loader import ClipLoader
from pipeline.planning.plan import TrainingPlan
from pipeline.reading.reader import Reader
from pipeline.shards.dataset import ShardDataset
from shard_tools.plan import make_key

FRAME_STRIDE = 4
BASELINES_BATCH = 8  # a worker of theirs makes a batch alone: of large ones, few are made while the clock runs
WARM_UP_BATCHES = 4
PACKAGES = ("av", "nvidia-dali-cuda130", "webdataset", "decord", "torchcodec")


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    loader: str  # ours, or a baseline
    decoder: str
    encode: str  # of the shards; original: the files as they were
    repeats: int = 1
    batch_size: int = BASELINES_BATCH

    @property
    def name(self) -> str:
        return f"{self.loader}, {self.decoder}" + (f", {self.repeats} crops a decode" if self.repeats > 1 else "")


def main() -> None:
    options = parse(sys.argv[1:])
    device = choose_device()
    work = options.work or kept_folder(options.videos)
    for encode in {*options.encodes, "copy"}:
        prepare(options.videos, work / encode, encode)
    batch_size = options.batch_size or (64 if device.type == "cuda" else BASELINES_BATCH)
    cases = [
        replace(case, batch_size=batch_size) if case.loader == "ours" else case
        for case in sorted(make_cases(options.encodes, device), key=lambda case: case.loader != "ours")
    ]
    about = describe_machine(device, PACKAGES)
    about |= {"videos": len(ShardDataset.open(work / "copy").samples), "threads": options.threads}
    note = (
        f"Clips of {NUM_FRAMES} frames, {SIDE}², every {FRAME_STRIDE}th source frame; ours in batches of {batch_size},"
        f" the others in batches of {BASELINES_BATCH}. One round of {options.seconds:g} s a loader, after"
        f" {WARM_UP_BATCHES} batches."
    )
    folder = options.output or results_folder(device)

    def measured(case: Case) -> Row:
        found: Row = in_fresh_process(measure, case, work, options.seconds, options.threads, device.type)
        return found

    measure_cases(cases, measured, partial(report, folder=folder, about=about, note=note), unit="loader")


def report(rows: list[Row], folder: Path, about: dict[str, Any], note: str) -> None:
    """The table so far, the others beside one of them."""
    reference = next((row for row in rows if row["loader"] == "decord" and row["encode"] == "original"), rows[0])
    shown = [
        row | {"times_reference": row["clips_per_cpu_second"] / reference["clips_per_cpu_second"]}
        for row in sorted(rows, key=lambda row: row["loader"] == "ours")
    ]
    times = f"times_reference: clips per CPU-second against {reference['loader']} over the {reference['encode']} files."
    write_results(folder, "pipeline_throughput", shown, about, [note, times])
    draw(shown, folder / "pipeline_throughput.png")
    print_table(shown[-1:])


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", type=Path, help="folder of videos")
    parser.add_argument("--encodes", nargs="+", default=["h264", "mjpeg", "copy"], help="of make_shards.py")
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring, for each loader")
    parser.add_argument("--batch-size", type=int, help="clips; default: 64 on a GPU, 8 on a CPU")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="or worker processes")
    parser.add_argument("--work", type=Path, help="folder that keeps the shards")
    parser.add_argument("--output", type=Path, help="folder for the results")
    options = parser.parse_args(arguments)
    if not options.videos.is_dir():
        raise InputError(f"{options.videos} is no folder of videos")
    if options.batch_size is not None and options.batch_size < 1:
        raise InputError(f"--batch-size is {options.batch_size}: give a whole number of at least 1")
    return options


def kept_folder(videos: Path) -> Path:
    """Where the shards of these videos lie for the next time."""
    return Path(tempfile.gettempdir()) / "adamae-pipeline-throughput" / make_key(str(videos.resolve()))


def prepare(videos: Path, folder: Path, encode: str) -> None:
    """Make shards of the videos, and lay their samples beside them as files for the loaders that want files."""
    command = [sys.executable, str(ROOT / "shard_tools" / "make_shards.py"), str(videos), str(folder)]
    if subprocess.run([*command, "--encode", encode, "--unlabelled"], stdout=subprocess.DEVNULL).returncode:
        raise InputError(f"shards of {videos} could not be made: see above")
    dataset = ShardDataset.open(folder)
    reader = Reader(dataset)
    files = folder / "files"
    files.mkdir(exist_ok=True)
    for index, sample in enumerate(dataset.samples):
        path = files / f"{sample.key.replace('/', '_')}.{sample.container}"
        if not path.exists():
            data = reader.read(index)
            path.write_bytes(unfragmented(data) if sample.container == "mp4" else data)


def unfragmented(data: bytes) -> bytes:
    """The same packets in an MP4 with one table of them at its end: decord reads no fragments."""
    plain = io.BytesIO()
    with open_video(data) as source, av.open(plain, "w", format="mp4") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:  # the demuxer's last one is empty
                packet.stream = stream
                target.mux(packet)
    return plain.getvalue()


def can_take_part(decoder: str) -> bool:
    """Whether it is installed and finds its libraries; if it does not find them, say that it is left out."""
    if importlib.util.find_spec(decoder) is None:
        return False
    module = "torchcodec.decoders" if decoder == "torchcodec" else decoder  # torchcodec itself loads no library yet
    tried = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True)
    if tried.returncode:
        reason = tried.stderr.strip().splitlines()[-1]
        print(f"{decoder} is left out: it is installed, but cannot be imported ({reason})", file=sys.stderr)
    return tried.returncode == 0


def codecs_of_dali(device: torch.device) -> Iterable[str]:
    """What DALI may decode on the device; which codecs a GPU lacks, the measurement says."""
    if not dali_is_installed():
        print("DALI is left out: nvidia-dali is not installed", file=sys.stderr)
        return ()
    return GPU_CODECS if device.type == "cuda" else CPU_CODECS


def make_cases(encodes: list[str], device: torch.device) -> list[Case]:
    by_dali = codecs_of_dali(device)
    baselines = [name for name in DECODERS if name == "pyav" or can_take_part(name)]
    cases = [Case("decord" if name == "decord" else name, name, "original") for name in baselines]
    for encode in encodes:
        if encode != "copy":  # copied files are the originals
            cases += [Case(name, name, encode) for name in baselines]
        cases.append(Case("webdataset", "pyav", encode))
        cases.append(Case("ours", "pyav", encode))
        if encode in by_dali:
            cases.append(Case("ours", "dali", encode))
        if encode != "copy":
            cases.append(Case("ours", "auto", encode, repeats=2))
        elif device.type == "cuda" and by_dali:
            cases.append(Case("ours", "auto", encode))  # DALI what it can, PyAV the rest
    return cases


def measure(case: Case, work: Path, seconds: float, threads: int, device: str) -> Row:
    """Run one loader for `seconds`; called in a process of its own."""
    torch.set_num_threads(1)
    folder = work / ("copy" if case.encode == "original" else case.encode)
    contender = our_batches if case.loader == "ours" else baseline_batches
    with contender(case, folder, threads, torch.device(device)) as (batches, counters):
        for _ in range(WARM_UP_BATCHES):
            next(batches)
        before, cpu, started = counters(), cpu_seconds(), time.perf_counter()
        clips = 0
        while time.perf_counter() - started < seconds:
            clips += next(batches)
        wall, cpu, after = time.perf_counter() - started, cpu_seconds() - cpu, counters()
        memory = memory_mib()
    decoded = after.get("frames_decoded", 0) - before.get("frames_decoded", 0)
    return {
        "loader": case.loader,
        "decoder": case.decoder,
        "encode": case.encode,
        "repeats": case.repeats,
        "clips_per_second": clips / wall,
        "clips_per_cpu_second": clips / cpu,
        "cores_busy": cpu / wall,
        "frames_decoded_per_delivered": decoded / (clips * NUM_FRAMES) if decoded else None,
        "memory_mib": memory,
    }


Contender = tuple[Iterator[int], Callable[[], dict[str, float]]]  # sizes of the batches as they come, and counters


@contextmanager
def our_batches(case: Case, folder: Path, threads: int, device: torch.device) -> Iterator[Contender]:
    config = DataConfig(
        frame_stride=FRAME_STRIDE, decoder=case.decoder, repeats=case.repeats, num_threads=threads  # type: ignore[arg-type]
    )  # fmt: skip
    dataset = ShardDataset.open(folder)
    plan = TrainingPlan(dataset, config, num_frames=NUM_FRAMES, image_size=SIDE, seed=0, batch_size=case.batch_size)
    with ClipLoader(dataset, plan, device, config, None) as loader:
        check(dataset, plan, next(loader.batches(0)).clip.cpu().numpy())
        yield (len(batch.keys) for batch in loader.batches(0)), lambda: loader.counters


def check(dataset: ShardDataset, plan: TrainingPlan, clips: np.ndarray) -> None:
    """The clips are what the plan says: against whole frames, cropped and scaled with PIL."""
    reader = Reader(dataset)
    most = 16 if dataset.holds_copies else 4  # grey levels; colours of copied HD videos are read as BT.601
    for row, clip in zip(plan.batch(0), clips, strict=True):
        x, y, w, h = row.crop
        frames = decode_frames(reader.read(row.sample), row.frames, dataset.samples[row.sample].num_frames)
        images = [Image.fromarray(frame).crop((x, y, x + w, y + h)).resize((SIDE, SIDE), 2) for frame in frames]
        expected = np.stack([np.asarray(image)[:, :: -1 if row.flip else 1] for image in images])
        difference = float(np.abs(expected.astype(int) - clip).mean())
        require(
            "clips show what the plan says", difference < most, f"{dataset.where(row.sample)} is {difference:.1f} off"
        )


@contextmanager
def baseline_batches(case: Case, folder: Path, threads: int, _: torch.device) -> Iterator[Contender]:
    stride = FRAME_STRIDE // ShardDataset.open(folder).samples[0].frame_stride
    if case.loader == "webdataset":
        batches = tar_batches(sorted(folder.glob("*.tar")), stride, case.batch_size, threads)
    else:
        files = sorted((folder / "files").iterdir())
        batches = file_batches(DECODERS[case.decoder], files, stride, case.batch_size, threads)
    first = next(batches)
    shape = (case.batch_size, NUM_FRAMES, 3, SIDE, SIDE)
    require("a baseline gives whole clips", tuple(first.shape) == shape, str(first.shape))
    yield (len(batch) for batch in batches), dict


def cpu_seconds() -> float:
    """User and system time of this process and its children so far."""
    ticks = 0
    for process in family():
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mib() -> float:
    """Resident memory of this process and its children; what they share is counted once."""
    sizes = [Path(f"/proc/{process}/smaps_rollup").read_text() for process in family()]
    return sum(int(text.split("Pss:")[1].split()[0]) for text in sizes) / 1024


def family() -> list[str]:
    me = str(os.getpid())
    children = Path(f"/proc/{me}/task/{me}/children")  # which not every kernel has
    return [me, *(children.read_text().split() if children.exists() else ())]


if __name__ == "__main__":
    run_command(main)
