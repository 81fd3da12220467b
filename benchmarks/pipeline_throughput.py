"""Measure data-loading throughput on real videos: our pipeline beside common loaders, on the same videos and cores.

    python benchmarks/pipeline_throughput.py VIDEOS [--encodes h264 mjpeg copy] [--seconds 10] [--output FOLDER]
    python benchmarks/pipeline_throughput.py VIDEOS --loaders ours --encodes h264 --threads 1 2 4 --prefetch 1 2 3 4

VIDEOS is a folder. Shards are made with every encode (kept in --work), and each loader runs in a process of its own,
over the original files and over the same re-encoded bytes as in the shards. decord and torchcodec take part if they can
be imported. Clips per CPU-second is the metric that other programs on the machine do not disturb.
"""

import argparse
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image

from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import ROOT, Report, Row, in_fresh_process, measure_cases, print_table, require
from benchmarks.peers.loaders import DECODERS, NUM_FRAMES, SIDE, file_batches, tar_batches
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
BASELINE_BATCH = 8  # one of their workers makes a whole batch: of large ones, few would be made while the clock runs
WARM_UP_BATCHES = 4
MAX_DIFFERENCE = 4  # gray levels, on average over a clip, from PIL's scaling
PACKAGES = ("av", "nvidia-dali-cuda130", "webdataset", "decord", "torchcodec")


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    loader: str  # ours, or a baseline
    decoder: str
    encode: str  # of the shards; original: the files as they were
    repeats: int = 1  # clips per decoded video
    batch_size: int = BASELINE_BATCH
    threads: int = 1
    prefetch: int | None = None  # batches, of ours


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    device = choose_device()
    work = prepare_shards(options.videos, options.work, {*options.encodes, "copy"})
    note = (
        f"Clips of {NUM_FRAMES} frames, {SIDE}², every {FRAME_STRIDE}th source frame. {options.seconds:g} s per loader"
        f" after {WARM_UP_BATCHES} batches. relative_to_reference: clips per CPU-second, relative to decord on the"
        " original files, or the first row without it."
    )
    videos = len(ShardDataset.open(work / "copy").samples)
    report = Report("pipeline_throughput", options.output, device, [note], PACKAGES, videos=videos)

    def write_table(rows: list[Row]) -> None:
        add_relative_speed(rows)
        report.write(rows)
        print_table(rows[-1:])

    measure_case = partial(in_fresh_process, measure, work=work, seconds=options.seconds, device=device.type)
    measure_cases(list_cases(options, device), measure_case, write_table, unit="loader")


def add_relative_speed(rows: list[Row]) -> None:
    reference = next((row for row in rows if row["loader"] == "decord" and row["encode"] == "original"), rows[0])
    for row in rows:
        row["relative_to_reference"] = row["clips_per_cpu_second"] / reference["clips_per_cpu_second"]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_videos()
    parser.set_defaults(encodes=["h264", "mjpeg", "copy"])
    parser.add_argument("--loaders", nargs="+", choices=["ours", "webdataset", *DECODERS], help="default: all")
    parser.add_argument("--seconds", type=float, default=10.0, help="measuring time per loader")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=at_least(1), nargs="+", default=[cores], help="threads or worker processes")
    prefetch = [DataConfig.prefetch]
    parser.add_argument("--prefetch", type=at_least(1), nargs="+", default=prefetch, help="batches, of ours")
    return parser.parse_args(arguments)


def list_cases(options: argparse.Namespace, device: torch.device) -> list[Case]:
    """List baselines, then ours with every decoder; threads and prefetched batches vary for ours only."""
    on_gpu = device.type == "cuda"
    loaders = options.loaders or ["ours", "webdataset", *DECODERS]
    baselines = [name for name in DECODERS if name in loaders and (name == "pyav" or can_import(name))]
    cases = [Case(name, name, "original", threads=options.threads[0]) for name in baselines]
    ours: list[tuple[str, str, int]] = []
    for encode in options.encodes:
        if encode != "copy":  # copied files are the originals
            cases += [Case(name, name, encode, threads=options.threads[0]) for name in baselines]
        if "webdataset" in loaders:
            cases.append(Case("webdataset", "pyav", encode, threads=options.threads[0]))
        ours.append(("pyav", encode, 1))
        if dali_is_installed() and encode in (GPU_CODECS if on_gpu else CPU_CODECS):
            ours.append(("dali", encode, 1))
        if encode != "copy":
            ours.append(("auto", encode, 2))
        elif on_gpu and dali_is_installed():
            ours.append(("auto", encode, 1))  # DALI where it can, PyAV for the rest
    batch_size = options.batch_size or (64 if on_gpu else BASELINE_BATCH)
    for (decoder, encode, repeats), threads, prefetch in product(ours, options.threads, options.prefetch):
        if "ours" in loaders:
            cases.append(Case("ours", decoder, encode, repeats, batch_size, threads, prefetch))
    return cases


def can_import(decoder: str) -> bool:
    """Whether a decoder is installed and finds its libraries; say so on stderr if it does not find them."""
    if importlib.util.find_spec(decoder) is None:
        return False
    module = "torchcodec.decoders" if decoder == "torchcodec" else decoder  # torchcodec itself loads no library yet
    tried = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True)
    if tried.returncode:
        reason = tried.stderr.strip().splitlines()[-1]
        print(f"skipping {decoder}: it is installed, but cannot be imported ({reason})", file=sys.stderr)
    return tried.returncode == 0


def prepare_shards(videos: Path, work: Path | None, encodes: Iterable[str]) -> Path:
    """Make shards of the videos with every encode, each in a folder of the one that is returned.

    Their samples are written beside them as files, for the loaders that need files.
    """
    work = work or Path(tempfile.gettempdir()) / "adamae-pipeline-throughput" / make_key(str(videos.resolve()))
    for encode in encodes:
        command = [sys.executable, str(ROOT / "shard_tools" / "make_shards.py"), str(videos), str(work / encode)]
        if subprocess.run([*command, "--encode", encode, "--unlabeled"], stdout=subprocess.DEVNULL).returncode:
            raise InputError(f"making shards of {videos} failed, see above")
        dataset = ShardDataset.open(work / encode)
        reader = Reader(dataset)
        files = work / encode / "files"
        files.mkdir(exist_ok=True)
        for index, sample in enumerate(dataset.samples):
            path = files / f"{sample.key.replace('/', '_')}.{sample.container}"
            if not path.exists():
                data = reader.read(index)
                path.write_bytes(remux(data) if sample.container == "mp4" else data)
    return work


def remux(data: bytes) -> bytes:
    """Return the same packets in an MP4 without fragments, which decord cannot read."""
    plain = io.BytesIO()
    with open_video(data) as source, av.open(plain, "w", format="mp4") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:  # the demuxer's last one is empty
                packet.stream = stream
                target.mux(packet)
    return plain.getvalue()


def measure(case: Case, work: Path, seconds: float, device: str) -> Row:
    """Run one loader for `seconds`, in a process of its own."""
    torch.set_num_threads(1)
    folder = work / ("copy" if case.encode == "original" else case.encode)
    with open_batches(case, folder, torch.device(device)) as (batches, loader):
        for _ in range(WARM_UP_BATCHES):
            next(batches)
        decoded = loader.counters["frames_decoded"] if loader else 0
        cpu, started = cpu_seconds(), time.perf_counter()
        clips = 0
        while time.perf_counter() - started < seconds:
            clips += next(batches)
        wall, cpu = time.perf_counter() - started, cpu_seconds() - cpu
        decoded = loader.counters["frames_decoded"] - decoded if loader else 0
        memory = memory_mib()
    return {
        **asdict(case),
        "clips_per_second": clips / wall,
        "clips_per_cpu_second": clips / cpu,
        "cores_busy": cpu / wall,
        "frames_decoded_per_delivered": decoded / (clips * NUM_FRAMES) if decoded else None,
        "memory_mib": memory,
    }


@contextmanager
def open_batches(case: Case, folder: Path, device: torch.device) -> Iterator[tuple[Iterator[int], ClipLoader | None]]:
    """Open the sizes of the batches as they come, and our loader."""
    if case.loader == "ours":
        config = DataConfig(
            frame_stride=FRAME_STRIDE, decoder=case.decoder, repeats=case.repeats,  # type: ignore[arg-type]
            num_threads=case.threads, prefetch=case.prefetch or DataConfig.prefetch,
        )  # fmt: skip
        with open_loader(folder, config, case.batch_size, NUM_FRAMES, SIDE, device) as loader:
            yield (len(batch.keys) for batch in loader.batches(0)), loader
        return
    stride = FRAME_STRIDE // ShardDataset.open(folder).samples[0].frame_stride
    if case.loader == "webdataset":
        batches = tar_batches(sorted(folder.glob("*.tar")), stride, case.batch_size, case.threads)
    else:
        files = sorted((folder / "files").iterdir())
        batches = file_batches(DECODERS[case.decoder], files, stride, case.batch_size, case.threads)
    shape = tuple(next(batches).shape)
    whole = (case.batch_size, NUM_FRAMES, 3, SIDE, SIDE)
    require("a baseline gives whole clips", shape == whole, f"{shape} instead of {whole}")
    yield map(len, batches), None


@contextmanager
def open_loader(
    folder: Path, config: DataConfig, batch_size: int, num_frames: int, side: int, device: torch.device
) -> Iterator[ClipLoader]:
    """Open our loader over shards, and check its first batch."""
    dataset = ShardDataset.open(folder)
    plan = TrainingPlan(dataset, config, num_frames=num_frames, image_size=side, seed=0, batch_size=batch_size)
    with ClipLoader(dataset, plan, device, config, None) as loader:
        check_clips(dataset, plan, next(loader.batches(0)).clip.cpu().numpy())
        yield loader


def check_clips(dataset: ShardDataset, plan: TrainingPlan, clips: np.ndarray) -> None:
    """Require that clips are what the plan says: whole frames, cropped and scaled with PIL."""
    reader = Reader(dataset)
    for row, clip in zip(plan.batch(0), clips, strict=True):
        x, y, w, h = row.crop
        frames = decode_frames(reader.read(row.sample), row.frames, dataset.samples[row.sample].num_frames)
        size = clip.shape[2], clip.shape[1]
        images = [Image.fromarray(frame).crop((x, y, x + w, y + h)).resize(size, 2) for frame in frames]
        expected = np.stack([np.asarray(image)[:, :: -1 if row.flip else 1] for image in images])
        difference = float(np.abs(expected.astype(int) - clip).mean())
        found = f"{dataset.where(row.sample)} is {difference:.1f} off"
        require("clips are what the plan says", difference < MAX_DIFFERENCE, found)


def cpu_seconds() -> float:
    """Return user and system time of this process and its children so far."""
    ticks = 0
    for process in family():
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mib() -> float:
    """Return the resident memory of this process and its children, shared pages counted once."""
    sizes = [Path(f"/proc/{process}/smaps_rollup").read_text() for process in family()]
    return sum(int(text.split("Pss:")[1].split()[0]) for text in sizes) / 1024


def family() -> list[str]:
    me = str(os.getpid())
    children = Path(f"/proc/{me}/task/{me}/children")  # which not every kernel has
    return [me, *(children.read_text().split() if children.exists() else ())]


if __name__ == "__main__":
    run_command(main)
