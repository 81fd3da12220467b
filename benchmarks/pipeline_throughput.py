"""Measure data-loading throughput on real videos: this loader beside others, on the same videos and cores.

    python benchmarks/pipeline_throughput.py VIDEOS [--encodes h264 mjpeg copy] [--seconds 10] [--output FOLDER]

VIDEOS is a folder. Shards are made with every encode (kept in --work), and each loader runs in a process of its own,
over the original files and over the same re-encoded bytes as in the shards. SPDL, torchcodec and decord take part if
they are installed: `pip install -e .[peers]`, and FFmpeg's shared libraries for the first two (SPDL 0.8, torchcodec
0.17 and decord2 3.4 were found to work with FFmpeg 5.1, Debian 12's package ffmpeg). They cut the very clips that this
loader (`adamae`) cuts, and these are checked first. The bound is `decoding`: PyAV from packets to frames of the same
clips, in as many threads, without anything else. Clips per CPU-second is the metric that other programs on the machine
do not disturb.
"""

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import ROOT, Report, Row, find_version, in_fresh_process, measure_cases, print_table, require
from benchmarks.peers.loaders import NUM_FRAMES, PEERS, SIDE, CutClip, Source, plan_batches
from common.cpus import count_cpus
from common.devices import choose_device
from common.errors import InputError, run_command
from pipeline.config import DataConfig
from pipeline.decoding.containers import main_stream, open_video
from pipeline.decoding.sources import decode_frames
from pipeline.decoding.video import Video
from pipeline.loader import ClipLoader
from pipeline.planning.plan import PlanRow, TrainingPlan
from pipeline.reading.reader import Reader
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.gops import VideoSlice
from shard_tools.plan import make_key

FRAME_STRIDE = 4
PEER_BATCH = 8
WARM_UP_BATCHES = 4
CHECKED_CLIPS = 16  # which take a second of many cores
MAX_DIFFERENCE = 4  # gray levels, on average over a clip, from PIL's scaling
LOADERS = ("adamae", "decoding", *PEERS)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    loader: str  # one of LOADERS
    decoder: str
    encode: str  # of the shards; original: the files as they were
    repeats: int = 1  # clips per decoded video
    batch_size: int = PEER_BATCH
    threads: int = 1


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    device = choose_device()
    work = prepare_shards(options.videos, options.work, {*options.encodes, "copy"})
    note = (
        f"Clips of {NUM_FRAMES} frames, {SIDE}², every {FRAME_STRIDE}th source frame. {options.seconds:g} s per loader"
        f" after {WARM_UP_BATCHES} batches. relative_to_reference: clips per CPU-second, relative to the fastest of"
        f" {', '.join(PEERS)} on the original files, or the first row without them. decoding: packets to frames alone."
        " dali_share: of the clips, PyAV decodes the others. videos_left_out: what a loader reads wrong, and is not"
        " measured with."
    )
    videos = len(ShardDataset.open(work / "copy").samples)
    report = Report("pipeline_throughput", options.output, device, [note], videos=videos)

    def measure_case(case: Case) -> list[Row]:
        return [in_fresh_process(measure, case, work, options.seconds, device.type)]

    def write_table(rows: list[Row]) -> None:
        add_relative_speed(rows)
        report.write(rows)
        print_table(rows[-1:])

    measure_cases(list_cases(options, device.type == "cuda"), measure_case, write_table, unit="loader")


def add_relative_speed(rows: list[Row]) -> None:
    others = [row for row in rows if row["loader"] in PEERS and row["encode"] == "original"]
    reference = max(others or rows[:1], key=lambda row: row["clips_per_cpu_second"])
    for row in rows:
        row["relative_to_reference"] = row["clips_per_cpu_second"] / reference["clips_per_cpu_second"]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_videos()
    parser.set_defaults(encodes=["h264", "mjpeg", "copy"])
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=LOADERS, help="default: all")
    parser.add_argument("--seconds", type=float, default=10.0, help="measuring time per loader")
    parser.add_argument("--threads", type=at_least(1), default=count_cpus(), help="threads or worker processes")
    of_own = "of this loader; auto: both, by data.dali_share=auto"
    parser.add_argument("--decoders", nargs="+", choices=("pyav", "dali", "auto"), default=["pyav"], help=of_own)
    return parser.parse_args(arguments)


def list_cases(options: argparse.Namespace, on_gpu: bool) -> list[Case]:
    """List the peers on the original files, then every loader on every encode."""
    peers = [name for name in PEERS if name in options.loaders and is_installed(name)]
    batch_size = options.batch_size or (64 if on_gpu else PEER_BATCH)
    cases = [Case(name, name, "original", threads=options.threads) for name in peers]
    for encode in options.encodes:
        if encode != "copy":  # copied files are the originals
            cases += [Case(name, name, encode, threads=options.threads) for name in peers]
        if "decoding" in options.loaders:
            cases.append(Case("decoding", "pyav", encode, threads=options.threads))
        if "adamae" in options.loaders:
            cases += [
                Case("adamae", decoder, encode, repeats, batch_size, options.threads)
                for decoder in options.decoders
                for repeats in (1, 2)
            ]
    return cases


def is_installed(peer: str) -> bool:
    return any(find_version(package) for package in (peer, f"{peer}2"))  # decord2 is imported as decord


def prepare_shards(videos: Path, work: Path | None, encodes: Iterable[str]) -> Path:
    """Make shards of the videos with every encode, such as h264 or h264-size (--tune size), each in a folder of the one
    that is returned.

    Their samples are written beside them as files, for the loaders that need files.
    """
    work = work or Path(tempfile.gettempdir()) / "adamae-pipeline-throughput" / make_key(str(videos.resolve()))
    for encode in encodes:
        codec, _, tune = encode.partition("-")
        settings = ["--encode", codec, *(["--tune", tune] if tune else []), "--unlabeled"]
        command = [sys.executable, str(ROOT / "shard_tools" / "make_shards.py"), str(videos), str(work / encode)]
        if subprocess.run([*command, *settings], stdout=subprocess.DEVNULL).returncode:
            raise InputError(f"making shards of {videos} failed, see above")
        dataset = ShardDataset.open(work / encode)
        reader = Reader(dataset)
        files = work / encode / "files"
        files.mkdir(exist_ok=True)
        for index, sample in enumerate(dataset.samples):
            path = file_of(work / encode, dataset, index)
            if not path.exists():
                data = reader.read(index)
                path.write_bytes(remux(data) if sample.container == "mp4" else data)
    return work


def file_of(folder: Path, dataset: ShardDataset, index: int) -> Path:
    sample = dataset.samples[index]
    return folder / "files" / f"{sample.key.replace('/', '_')}.{sample.container}"


def remux(data: bytes) -> bytes:
    """Return the packets of the video in an MP4 without fragments, which decord cannot read, and other streams."""
    plain = io.BytesIO()
    with open_video(data) as source, av.open(plain, "w", format="mp4") as target:
        video = main_stream(source)
        assert video is not None
        stream = target.add_stream_from_template(video)
        for packet in source.demux(video):
            if packet.dts is not None:  # the demuxer's last one is empty
                packet.stream = stream
                target.mux(packet)
    return plain.getvalue()


def measure(case: Case, work: Path, seconds: float, device: str) -> Row:
    """Run one loader for `seconds`, in a process of its own."""
    torch.set_num_threads(1)
    folder = work / ("copy" if case.encode == "original" else case.encode)
    with open_batches(case, folder, torch.device(device)) as (batches, loader, left_out):
        for _ in range(WARM_UP_BATCHES):
            next(batches)
        before = loader.counters if loader else {}
        cpu, started = cpu_seconds(), time.perf_counter()
        clips = 0
        while time.perf_counter() - started < seconds:
            clips += next(batches)
        wall, cpu = time.perf_counter() - started, cpu_seconds() - cpu
        counts = {name: value - before[name] for name, value in loader.counters.items()} if loader else {}
    return {
        **asdict(case),
        "clips_per_second": clips / wall,
        "clips_per_cpu_second": clips / cpu,
        "cores_busy": cpu / wall,
        "dali_share": counts["dali_clips"] / counts["clips"] if case.decoder in ("dali", "auto") else None,
        "videos_left_out": left_out,
    }


@contextmanager
def open_batches(
    case: Case, folder: Path, device: torch.device
) -> Iterator[tuple[Iterator[int], ClipLoader | None, list[str]]]:
    """Open the sizes of the batches as they come, this repository's loader, and the videos that are left out."""
    dataset = ShardDataset.open(folder)
    if case.loader == "adamae":
        config = DataConfig(
            frame_stride=FRAME_STRIDE, decoder=case.decoder, repeats=case.repeats,  # type: ignore[arg-type]
            num_workers=case.threads, dali_share="auto" if case.decoder == "auto" else None,
        )  # fmt: skip
        with open_loader(folder, config, case.batch_size, NUM_FRAMES, SIDE, device) as loader:
            yield (len(batch.keys) for batch in loader.batches(0)), loader, []
    elif case.loader == "decoding":
        plan, reader = make_plan(dataset, case.batch_size), Reader(dataset)
        rows = map(plan.row, count())
        batches = plan_batches(
            decode_only, rows, lambda row: reader.clip(row.sample, row.frames), case.batch_size, case.threads
        )
        yield map(len, batches), None, []
    else:
        batches, left_out = open_peer(case, folder, dataset)
        yield map(len, batches), None, left_out


def decode_only(video: VideoSlice, row: PlanRow) -> Tensor:
    """Decode the frames of a clip, and drop them: no cropping, scaling or colors."""
    with Video(video.data, video.num_frames) as opened:
        return torch.tensor(sum(1 for _ in opened.frames(video.numbers)))


def open_peer(case: Case, folder: Path, dataset: ShardDataset) -> tuple[Iterator[Tensor], list[str]]:
    """Return the batches of a peer over the videos that it reads right, and the other videos.

    Original files are read from the disk, the bytes of shards from memory.
    """

    def open_source(row: PlanRow) -> Source:
        path = file_of(folder, dataset, row.sample)
        return str(path) if case.encode == "original" else path.read_bytes()

    cut: CutClip = PEERS[case.loader]
    plan, reader = make_plan(dataset, case.batch_size), Reader(dataset)
    left_out: dict[int, str] = {}  # samples, and their keys
    for row in map(plan.row, range(plan.clips_per_epoch)):
        try:
            fault = find_fault(reader, dataset, row, cut(open_source(row), row).numpy())
        except Exception as error:  # each library raises what it likes
            fault = f"{type(error).__name__}: {error}"
        if fault:
            left_out[row.sample] = dataset.samples[row.sample].key
            print(f"{case.loader} is not measured with {dataset.where(row.sample)}: {fault[:200]}", file=sys.stderr)
    right = plan.clips_per_epoch - len(left_out)
    require(f"{case.loader} reads most videos right", right > len(left_out), f"{right} of {plan.clips_per_epoch}")
    rows = (row for row in map(plan.row, count()) if row.sample not in left_out)
    return plan_batches(cut, rows, open_source, case.batch_size, case.threads), list(left_out.values())


@contextmanager
def open_loader(
    folder: Path, config: DataConfig, batch_size: int, num_frames: int, side: int, device: torch.device
) -> Iterator[ClipLoader]:
    """Open this repository's loader over shards, and check its first batch."""
    dataset = ShardDataset.open(folder)
    plan = TrainingPlan(dataset, config, num_frames=num_frames, image_size=side, seed=0, batch_size=batch_size)
    with ClipLoader(dataset, plan, device, config, None) as loader:
        check_clips(dataset, plan, next(loader.batches(0)).clip.cpu().numpy())
        yield loader


def make_plan(dataset: ShardDataset, batch_size: int) -> TrainingPlan:
    """Plan the clips that everybody cuts: those of this repository's loader."""
    config = DataConfig(frame_stride=FRAME_STRIDE)
    return TrainingPlan(dataset, config, num_frames=NUM_FRAMES, image_size=SIDE, seed=0, batch_size=batch_size)


def check_clips(dataset: ShardDataset, plan: TrainingPlan, clips: np.ndarray) -> None:
    """Require that clips, as far as they are checked, are those of the plan's first batch."""
    reader, rows = Reader(dataset), plan.batch(0)[:CHECKED_CLIPS]
    with ThreadPoolExecutor() as pool:
        faults = list(pool.map(partial(find_fault, reader, dataset), rows, clips))
    for row, fault in zip(rows, faults, strict=True):
        require("clips are what the plan says", not fault, f"{dataset.where(row.sample)} {fault}")


def find_fault(reader: Reader, dataset: ShardDataset, row: PlanRow, clip: np.ndarray) -> str:
    """Compare a clip with whole frames, cropped and scaled with PIL, and with the frames beside them.

    Return what is wrong, "" if nothing is.
    """
    sample = dataset.samples[row.sample]
    if len(clip) != len(row.frames):
        return f"has {len(clip)} frames instead of {len(row.frames)}"
    around = [min(max(0, number + step), sample.num_frames - 1) for number in row.frames for step in (0, -1, 1)]
    size = clip.shape[2], clip.shape[1]
    frames = decode_frames(reader.read(row.sample), around, sample.num_frames)
    # The plan's boxes are in square pixels, which those of copies need not be.
    x, y, w, h = row.crop.within((sample.width, sample.height), (frames.shape[2], frames.shape[1]))
    images = [
        Image.fromarray(frame).crop((x, y, x + w, y + h)).resize(size, Image.Resampling.BILINEAR) for frame in frames
    ]
    expected = np.stack([np.asarray(image)[:, :: -1 if row.flip else 1] for image in images]).astype(int)
    right, before, after = (float(np.abs(expected[step::3] - clip).mean()) for step in range(3))
    if right >= MAX_DIFFERENCE:
        return f"is {right:.1f} off"
    return "has the frames beside the right ones" if right > min(before, after) + 0.05 else ""


def cpu_seconds() -> float:
    """Return user and system time of this process and of those that work for it so far."""
    ticks = 0
    for process in list_family("self"):
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def list_family(process: str) -> list[str]:
    """List a process and all its descendants."""
    lists = Path(f"/proc/{process}/task").glob("*/children")  # of each thread; not every kernel has them
    children = [child for found in lists for child in found.read_text().split()]
    return [process, *(member for child in children for member in list_family(child))]


if __name__ == "__main__":
    run_command(main)
